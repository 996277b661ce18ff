"""A page that is described once and written twice: as Markdown, and as one HTML file that needs nothing but itself.

A `Page` is a title, a warning, and sections of blocks. Each block knows its two forms, so that they cannot say
different things. Words are our own, or `Given` (titles, names of files), or `Code`, or `Strong`.

**Escaping** is done here and nowhere else. In HTML everything is escaped. In Markdown our own words are as they stand,
and what is `Given` or `Code` cannot become markup.

**The HTML file** loads nothing: its policy forbids what is not in it, scripts of any kind included. Pictures are there
twice, for light and for dark; tables that are wider than a telephone scroll in their own box.
"""

from __future__ import annotations

import base64
import dataclasses
import html
import re
from collections.abc import Iterator, Sequence
from typing import Protocol

STYLE = """\
:root {
  color-scheme: light dark;
  --paper: #ffffff; --ink: #1d2430; --soft: #596372; --line: #e2e5ea; --panel: #f6f7f9;
  --accent: #5a3a94; --marked: #f4f0fb; --warn: #8a5200; --warn-paper: #fff8e8; --warn-line: #e9b44c;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171c; --ink: #e4e7ec; --soft: #9aa4b2; --line: #2c323b; --panel: #1c2027;
    --accent: #b9a2ea; --marked: #251f35; --warn: #f0c674; --warn-paper: #241e12; --warn-line: #8a6a24;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif;
}
main { max-width: 64rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; overflow-wrap: break-word; }
h1 { margin: 0 0 1rem; font-size: 1.75rem; line-height: 1.2; letter-spacing: -0.01em; }
h2 {
  margin: 3rem 0 0.75rem; padding-top: 1.5rem; border-top: 1px solid var(--line); font-size: 1.25rem; line-height: 1.3;
}
h3 { margin: 1.75rem 0 0.5rem; font-size: 1rem; }
p, ul, dl { max-width: 48rem; margin: 0 0 1rem; }
ul { padding-left: 1.25rem; }
li + li { margin-top: 0.35rem; }
code, pre {
  font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 0.85em;
}
code { padding: 0.1em 0.3em; border-radius: 4px; background: var(--panel); }
pre {
  margin: 0 0 1rem; padding: 0.9rem 1rem; border: 1px solid var(--line); border-radius: 8px; background: var(--panel);
  font-size: 0.8rem; line-height: 1.5; overflow-x: auto; white-space: pre;
}
pre.broken { white-space: pre-wrap; overflow-wrap: anywhere; }
.warning {
  max-width: none; padding: 0.8rem 1rem; border: 1px solid var(--warn-line); border-left-width: 5px; border-radius: 8px;
  background: var(--warn-paper); color: var(--warn);
}
ul.figures {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 13rem), 1fr)); gap: 0.75rem;
  max-width: none; margin: 1.5rem 0; padding: 0; list-style: none;
}
.figures li {
  margin: 0; padding: 0.8rem 1rem; border: 1px solid var(--line); border-radius: 10px; background: var(--panel);
}
.figures span, .figures small { display: block; color: var(--soft); font-size: 0.8rem; line-height: 1.4; }
.figures b {
  display: block; font-size: 1.75rem; font-weight: 650; line-height: 1.3; font-variant-numeric: tabular-nums;
}
.wide { margin: 0 0 1rem; border: 1px solid var(--line); border-radius: 10px; overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-size: 0.9rem; line-height: 1.45; }
th, td { padding: 0.5rem 0.8rem; text-align: left; vertical-align: top; font-weight: inherit; }
thead th { background: var(--panel); color: var(--soft); font-size: 0.8rem; white-space: nowrap; }
tbody tr { border-top: 1px solid var(--line); }
table code { white-space: nowrap; }
table.numbers td { white-space: nowrap; font-variant-numeric: tabular-nums; }
tr.marked { background: var(--marked); }
tr.marked th, tr.marked td { color: var(--accent); font-weight: 650; }
dl { display: grid; grid-template-columns: 9.5rem 1fr; gap: 0.6rem 1.25rem; }
dt { color: var(--soft); }
dd { margin: 0; min-width: 0; }
.pictures {
  display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 25rem), 1fr)); gap: 1rem; margin: 1.5rem 0;
}
.pictures img { display: block; width: 100%; height: auto; border: 1px solid var(--line); border-radius: 10px; }
@media (max-width: 40rem) {
  main { padding: 1.5rem 1rem 3rem; }
  h1 { font-size: 1.45rem; }
  dl { display: block; }
  dd { margin-bottom: 0.75rem; }
  ul.figures { grid-template-columns: minmax(0, 1fr); gap: 0.5rem; }
  th, td { padding: 0.45rem 0.6rem; }
  thead th { white-space: normal; }
  table.numbers tbody th { min-width: 8.5rem; }
}
@media print {
  main { max-width: none; padding: 0; }
  pre { white-space: pre-wrap; }
}
"""
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_BEFORE = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,">
<style>
{STYLE}</style>
"""
_MARKUP = re.compile(r"([\\`*_\[\]<>|&~$])")


@dataclasses.dataclass(frozen=True)
class Given:
    r"""Words from outside, shown as they are.

    Example:
        >>> title = Given("<b>Up</b> | *Down*")
        >>> print(as_html(title), as_markdown(title))
        &lt;b&gt;Up&lt;/b&gt; | *Down* \<b\>Up\</b\> \| \*Down\*
    """

    text: str


@dataclasses.dataclass(frozen=True)
class Code:
    """Names of files, and what is typed."""

    text: str


@dataclasses.dataclass(frozen=True)
class Strong:
    """What the eye should find."""

    text: str


Piece = str | Given | Code | Strong
Words = Piece | tuple[Piece, ...]


def as_html(words: Words) -> str:
    """Words for HTML, all of them escaped."""
    if isinstance(words, tuple):
        return "".join(map(as_html, words))
    if isinstance(words, str):
        return html.escape(words)
    tags = {Code: ("<code>", "</code>"), Strong: ("<strong>", "</strong>"), Given: ("", "")}
    return html.escape(words.text).join(tags[type(words)])


def as_markdown(words: Words) -> str:
    """Words for Markdown, on one line."""
    if isinstance(words, tuple):
        return "".join(map(as_markdown, words))
    if isinstance(words, str):
        return words
    text = " ".join(words.text.split())
    if isinstance(words, Code):
        fence = _fence(text, 1)
        return f"{fence} {text} {fence}" if "`" in text else f"{fence}{text}{fence}"
    return f"**{text}**" if isinstance(words, Strong) else _MARKUP.sub(r"\\\1", text)


def _fence(text: str, least: int) -> str:
    """More backticks than any that stand together in a text."""
    return "`" * max(least, 1 + max(map(len, re.findall("`+", text)), default=0))


def _in_cell(words: Words) -> str:
    return re.sub(r"(?<!\\)\|", r"\\|", as_markdown(words))


class Block(Protocol):
    """Part of a page, in its two forms."""

    def markdown(self) -> str:
        """As Markdown."""

    def html(self) -> str:
        """As HTML."""


@dataclasses.dataclass(frozen=True)
class Paragraph:
    """A paragraph."""

    words: Words

    def markdown(self) -> str:
        return as_markdown(self.words)

    def html(self) -> str:
        return f"<p>{as_html(self.words)}</p>"


@dataclasses.dataclass(frozen=True)
class BulletList:
    """A list."""

    items: Sequence[Words]

    def markdown(self) -> str:
        return "\n".join(f"- {as_markdown(item)}" for item in self.items)

    def html(self) -> str:
        return "<ul>\n" + "".join(f"<li>{as_html(item)}</li>\n" for item in self.items) + "</ul>"


@dataclasses.dataclass(frozen=True)
class FactList:
    """Names, and what is to be said of each."""

    facts: Sequence[tuple[str, Words]]

    def markdown(self) -> str:
        return "\n".join(f"- **{name}**: {as_markdown(words)}" for name, words in self.facts)

    def html(self) -> str:
        rows = (f"<dt>{html.escape(name)}</dt>\n<dd>{as_html(words)}</dd>\n" for name, words in self.facts)
        return "<dl>\n" + "".join(rows) + "</dl>"


@dataclasses.dataclass(frozen=True)
class Figures:
    """The few numbers that one looks for first: name, figure, and what to know of it."""

    figures: Sequence[tuple[str, str, str]]

    def markdown(self) -> str:
        return "\n".join(f"- {name}: **{figure}** ({note})" for name, figure, note in self.figures)

    def html(self) -> str:
        tiles = (
            f"<li><span>{name}</span> <b>{figure}</b> <small>{note}</small></li>\n"
            for name, figure, note in (map(html.escape, each) for each in self.figures)
        )
        return '<ul class="figures">\n' + "".join(tiles) + "</ul>"


@dataclasses.dataclass(frozen=True)
class PageTable:
    """Rows under a heading; the first column says what a row is about."""

    about: str
    heading: Sequence[str]
    rows: Sequence[Sequence[Words]]
    marked: int | None = None
    figures: bool = False

    def markdown(self) -> str:
        lines = [list(self.heading), ["---"] * len(self.heading), *(list(map(_in_cell, row)) for row in self.rows)]
        if self.marked is not None:
            lines[2 + self.marked] = [f"**{cell}**" for cell in lines[2 + self.marked]]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def html(self) -> str:
        head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in self.heading)
        body = "\n".join(self._row(number, row) for number, row in enumerate(self.rows))
        kind = ' class="numbers"' if self.figures else ""
        return (
            f'<div class="wide" role="region" tabindex="0" aria-label="{html.escape(self.about)}">\n<table{kind}>\n'
            f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>"
        )

    def _row(self, number: int, row: Sequence[Words]) -> str:
        first, *others = map(as_html, row)
        cells = f'<th scope="row">{first}</th>' + "".join(f"<td>{cell}</td>" for cell in others)
        return f'<tr class="marked">{cells}</tr>' if number == self.marked else f"<tr>{cells}</tr>"


@dataclasses.dataclass(frozen=True)
class Verbatim:
    """Text word for word; only lines as long as paragraphs are broken."""

    text: str

    def markdown(self) -> str:
        fence = _fence(self.text, 3)
        return f"{fence}\n{self.text.strip()}\n{fence}"

    def html(self) -> str:
        kind = ' class="broken"' if max(map(len, self.text.splitlines()), default=0) > 110 else ""
        return f'<pre{kind} tabindex="0">{html.escape(self.text.strip())}</pre>'


@dataclasses.dataclass(frozen=True)
class Picture:
    """A plot as a PNG file beside the page, for light and for dark paper; `about` describes it to a screen reader."""

    file: str
    about: str
    light: bytes
    dark: bytes


@dataclasses.dataclass(frozen=True)
class Pictures:
    """Some of them, side by side where there is room."""

    pictures: Sequence[Picture]

    def markdown(self) -> str:
        return "\n".join(f"![{each.about}]({each.file})" for each in self.pictures)

    def html(self) -> str:
        shown = (
            f'<picture><source media="(prefers-color-scheme: dark)" srcset="{_data(each.dark)}">'
            f'<img src="{_data(each.light)}" alt="{html.escape(each.about)}"></picture>\n'
            for each in self.pictures
        )
        return '<div class="pictures">\n' + "".join(shown) + "</div>"


def _data(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading, what is under it, and smaller ones below that."""

    title: str
    blocks: Sequence[Block]
    parts: Sequence[Section] = ()

    def markdown(self, level: int = 2) -> str:
        """As Markdown, with that many # before its title."""
        below = [part.markdown(level + 1) for part in self.parts]
        return "\n\n".join([f"{'#' * level} {self.title}", *(block.markdown() for block in self.blocks), *below])

    def html(self, level: int = 2) -> str:
        """As HTML, with a heading of that level."""
        below = [part.html(level + 1) for part in self.parts]
        inner = "\n".join([*(block.html() for block in self.blocks), *below])
        return f"<section>\n<h{level}>{html.escape(self.title)}</h{level}>\n{inner}\n</section>"


@dataclasses.dataclass(frozen=True)
class Page:
    """A title, a warning that stands above everything, blocks, and sections.

    Example:
        >>> page = Page("Run", "Not private.", [Paragraph(("See ", Code("servable/"), "."))], [Section("Why", [])])
        >>> print(page.markdown())
        # Run
        <BLANKLINE>
        > Not private.
        <BLANKLINE>
        See `servable/`.
        <BLANKLINE>
        ## Why
        <BLANKLINE>
        >>> "<p>See <code>servable/</code>.</p>" in page.html()
        True
    """

    title: str
    warning: Words
    blocks: Sequence[Block]
    sections: Sequence[Section] = ()

    def markdown(self) -> str:
        """As Markdown; its pictures are files beside it."""
        parts = [f"# {self.title}", f"> {as_markdown(self.warning)}"]
        parts += [part.markdown() for part in (*self.blocks, *self.sections)]
        return "\n\n".join(parts) + "\n"

    def html(self) -> str:
        """As one file of HTML."""
        title = html.escape(self.title)
        parts = [f"<h1>{title}</h1>", f'<p class="warning" role="note">{as_html(self.warning)}</p>']
        parts += [part.html() for part in (*self.blocks, *self.sections)]
        inner = "\n".join(parts)
        return f"{_BEFORE}<title>{title}</title>\n</head>\n<body>\n<main>\n{inner}\n</main>\n</body>\n</html>\n"

    @property
    def pictures(self) -> Iterator[Picture]:
        """All that it shows before its first section."""
        for block in self.blocks:
            yield from block.pictures if isinstance(block, Pictures) else ()
