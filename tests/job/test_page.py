"""A page is told once and written twice: whole, with nothing from elsewhere, and nobody's words become markup."""

import re

import pytest
from pages import Read, fits, self_contained

from tfdp_rec.job import page as told
from tfdp_rec.job.page import Code, Given, Page, PageTable, Paragraph, Section, Strong, Verbatim

BAD = "<script>alert(1)</script>"
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d494844520000000100000001080600000" "01f15c4890000000d49444154789c6360606060000000050001"
    "a5f645400000000049454e44ae426082"
)  # fmt: skip


def every_kind(words=BAD):
    """A page with a block of each kind, all of it somebody else's words."""
    given = Given(words)
    rows = [(given, Code(words)), (Strong(words), words)]
    blocks = [
        Paragraph((Strong(words), " and ", given)), told.BulletList([given, Code(words)]),
        told.FactList([(words, given)]),
        told.Figures([(words, words, words)]), PageTable(words, (words, "b"), rows, 1),
        Verbatim(f"{words}\n" + "long " * 60), told.Pictures([told.Picture("a.png", words, PNG, PNG + b" ")]),
    ]  # fmt: skip
    return Page(words, words, blocks, [Section(words, blocks[:1], [Section(words, blocks[:1])])])


@pytest.mark.parametrize("words", [BAD, '" onload="alert(1)', "'><img src=x>", "a & b", "</style>", "&lt;b&gt;"])
def test_nobodys_words_become_markup(words):
    page = self_contained(every_kind(words).html())
    assert page.text.count(words) >= 18 and page.tags.count("img") == 1 == page.tags.count("source")
    assert page.rows == [[words, "b"], [words, words], [words, words]]


def test_in_markdown_what_is_given_stays_words():
    given = "<b> [x](http://y) `c` *d* _e_ | f\n# g"
    cells = PageTable("", ("a", "b"), [(Given(given), Code("x | `y`"))]).markdown().splitlines()
    assert cells[2] == r"| \<b\> \[x\](http://y) \`c\` \*d\* \_e\_ \| f # g | `` x \| `y` `` |"
    assert Verbatim("a\n```\nb").markdown() == "````\na\n```\nb\n````"


def test_both_forms_say_the_same():
    page = Page(
        "Title", "Warning.", [told.Figures([("ε", "8", "of it")]), Paragraph(("One ", Code("two"), Strong("three")))],
        [Section("Part", [told.FactList([("unit", "a user")]), PageTable("t", ("x", "y"), [("1", "2")])])],
    )  # fmt: skip
    words = "".join(re.findall(r"\w+", page.markdown()))
    # HTML says the title in its head, too.
    assert "Title" + words == "".join(re.findall(r"\w+", Read(page.html()).text))


def test_a_text_keeps_its_lines_unless_they_are_paragraphs():
    assert "broken" not in Verbatim("short\n" * 9).html() and 'class="broken"' in Verbatim("long " * 60).html()


@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_browser_a_page_of_long_words_has_the_browsers_width(width, tmp_path):
    fits(every_kind("unbroken" * 40).html(), width, tmp_path)
