"""Markdown in which no word from outside becomes markup, and a page of it as one HTML file.

The HTML is rendered from the Markdown by markdown-it, which escapes all else: the two forms cannot say different
things. **The HTML file** loads nothing: its policy forbids what is not in it, scripts of any kind included, and its
pictures are in it as data.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Mapping, Sequence

from markdown_it import MarkdownIt

_STYLE = """\
:root { color-scheme: light dark; }
main { max-width: 64rem; margin: 0 auto; padding: 2rem 1.25rem; font: 16px/1.6 system-ui, sans-serif; }
body { margin: 0; background: Canvas; color: CanvasText; overflow-wrap: break-word; text-size-adjust: 100%; }
blockquote { margin: 0; padding: 0 1rem; border-left: 5px solid orange; }
pre { padding: 0.9rem; border: 1px solid GrayText; white-space: pre-wrap; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; }
th, td { padding: 0.5rem 0.8rem; border-bottom: 1px solid GrayText; text-align: left; vertical-align: top; }
img { max-width: min(100%, 30rem); height: auto; }
"""
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_BEFORE = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,">
<style>
{_STYLE}</style>
"""
_MARKUP = re.compile(r"([\\`*_\[\]<>|&~$])")


def escape(text: object) -> str:
    r"""Words from outside, on one line, as Markdown that shows them as they are.

    Example:
        >>> print(escape("<b>Up</b> | *Down*"))
        \<b\>Up\</b\> \| \*Down\*
    """
    return _MARKUP.sub(r"\\\1", " ".join(str(text).split()))


def code(text: str) -> str:
    """A name of a file, or what is typed, as Markdown on one line."""
    text = " ".join(text.split())
    fence = _fence(text, 1)
    return f"{fence} {text} {fence}" if "`" in text else f"{fence}{text}{fence}"


def verbatim(text: str) -> str:
    """A text word for word and line by line."""
    fence = _fence(text, 3)
    return f"{fence}\n{text.strip()}\n{fence}"


def _fence(text: str, least: int) -> str:
    """More backticks than any that stand together in a text."""
    return "`" * max(least, 1 + max(map(len, re.findall("`+", text)), default=0))


def table(heading: Sequence[str], rows: Sequence[Sequence[str]], strong: int = -1) -> str:
    """Rows of Markdown under a heading, one of them in strong letters."""
    cells = [[re.sub(r"(?<!\\)\|", r"\\|", cell) for cell in row] for row in rows]
    lines = [heading, ["---"] * len(heading), *cells]
    if strong >= 0:
        lines[2 + strong] = [f"**{cell}**" for cell in cells[strong]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def bullets(items: Sequence[str]) -> str:
    """A list."""
    return "\n".join(f"- {item}" for item in items)


def section(title: str, *blocks: str) -> str:
    """A heading with blocks under it."""
    return "\n\n".join([f"## {title}", *blocks])


def render_html(title: str, markdown: str, pictures: Mapping[str, bytes]) -> str:
    """A page of Markdown as one file of HTML; `pictures` are PNG files by the names that the Markdown has for them."""
    parser = MarkdownIt("commonmark", {"html": False, "xhtmlOut": False}).enable("table")
    # Every "<" of a text is escaped by now: what is replaced here are the renderer's own tags.
    inner = parser.render(markdown).replace("<table>", '<div class="wide" tabindex="0"><table>')
    inner = inner.replace("</table>", "</table></div>").replace("<pre>", '<pre tabindex="0">')
    for name, picture in pictures.items():
        data = f"data:image/png;base64,{base64.b64encode(picture).decode('ascii')}"
        inner = inner.replace(f'<img src="{name}"', f'<img src="{data}"')
    return f"{_BEFORE}<title>{html.escape(title)}</title>\n</head>\n<body>\n<main>\n{inner}</main>\n</body>\n</html>\n"
