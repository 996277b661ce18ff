"""How tests look at a page of HTML: by reading it, and in a browser if this machine has one."""

import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

VOID = {"meta", "link", "img", "source", "br"}
BROWSERS = ("chromium", "google-chrome", "chromium-browser", "google-chrome-stable")
QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars"
).split()


class Read(HTMLParser):
    """What is in a page: its tags, all that it refers to, its text, and the rows of its tables."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.refers, self.rows, self.text, self.policy = [], [], [], [], "", ""
        self.feed(page)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.open += [] if tag in VOID else [tag]
        for name, value in attributes:
            assert not name.startswith("on"), f"{tag} {name}"
            if name in ("src", "href", "srcset", "action", "data", "poster", "background"):
                self.refers.append(value)
            if value == "Content-Security-Policy":
                self.policy = dict(attributes)["content"]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert tag not in VOID and self.open and self.open.pop() == tag, f"</{tag}> closes another"

    def handle_data(self, words):
        assert "style" not in self.open or not re.search(r"url\(|@import|expression|</", words)
        if "style" not in self.open:
            self.text += words
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += words


def self_contained(page):
    """The page, read; nothing in it is from elsewhere, or runs."""
    found = Read(page)
    assert page.startswith("<!DOCTYPE html>") and {"html", "head", "body", "main", "title", "h1"} <= set(found.tags)
    assert not {"script", "iframe", "object", "embed", "form", "base", "svg"} & set(found.tags)
    assert found.refers and all(value.startswith(("data:", "#")) for value in found.refers)
    assert found.policy.startswith("default-src 'none'") and "script" not in found.policy
    return found


def browser():
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser on this machine: none of {', '.join(BROWSERS)}")
    return found


PROBE = """<script>addEventListener("load", () => {
  const wide = document.documentElement, pictures = [...document.images];
  parent.postMessage([innerWidth, wide.scrollWidth, document.body.scrollWidth, pictures.length,
    pictures.filter(each => each.naturalWidth > 0 && each.clientWidth > 0).length,
    getComputedStyle(document.body).backgroundColor].join(" | "), "*");
})</script></head>"""
FRAME = """<!DOCTYPE html><script>addEventListener("message", said => document.title = said.data)</script>
<iframe src="%s" style="width: %dpx; height: 4000px; border: 0"></iframe>"""


def looked_at(page, width, folder, dark=False):
    """What a browser makes of a page in a frame of that width (a window has at least 500): the frame's width, the
    document's, the body's, pictures, those that are drawn, and the colour of the paper.
    """
    copy, frame, profile = (folder / f"{name}-{width}-{dark}.html" for name in ("probed", "frame", "profile"))
    profile.mkdir()
    frame.write_text(FRAME % (copy.name, width), encoding="utf-8")
    allowed = re.sub(r"<meta http-equiv=.*?>\n", "", page)  # the policy would forbid the probe, as it should
    copy.write_text(allowed.replace("</head>", PROBE), encoding="utf-8")
    scheme = f"--blink-settings=preferredColorScheme={int(not dark)}"
    options = [*QUIET, scheme, f"--user-data-dir={profile}", "--window-size=1600,4200", "--virtual-time-budget=5000"]
    asked = [browser(), *options, "--dump-dom", frame.as_uri()]
    said = subprocess.run(asked, capture_output=True, text=True, timeout=120).stdout
    *numbers, paper = re.search(r"<title>(.*?)</title>", said)[1].split(" | ")
    return [*map(int, numbers), paper]


def fits(page, width, folder):
    """The page has the width of the browser, and all of its pictures are drawn, in light and in dark."""
    light, dark = (looked_at(page, width, folder, dark) for dark in (False, True))
    for seen in (light, dark):
        own, document, body, pictures, drawn, *_ = seen
        assert own == width and max(document, body) <= width, seen
        assert pictures == drawn == page.count("<img "), seen
    assert light[5] != dark[5], (light, dark)
