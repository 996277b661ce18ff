"""A page of Markdown is one file of HTML, with nothing from elsewhere, and no word from outside becomes markup."""

import re

import pytest
from pages import Read, fits, self_contained

from tfdp_rec.job import page
from tfdp_rec.job.page import code, escape, render_html, verbatim

BAD = "<script>alert(1)</script>"
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d494844520000000100000001080600000" "01f15c4890000000d49444154789c6360606060000000050001"
    "a5f645400000000049454e44ae426082"
)  # fmt: skip


def every_kind(words=BAD):
    """A page with words from outside at every place that takes them."""
    rows = [(escape(words), code(words)), (escape(words), "ours")]
    markdown = "\n\n".join([
        f"# {escape(words)}", f"> {escape(words)}", f"See {escape(words)} and {code(words)}.",
        page.bullets([escape(words), code(words)]), page.bullets([f"**name**: {escape(words)}"]),
        page.table(("a", "b"), rows, 1), verbatim(f"{words}\n" + "long " * 60), "![a plot](a.png)",
        page.section(escape(words), escape(words)),
    ])  # fmt: skip
    return render_html(words, markdown, {"a.png": PNG})


@pytest.mark.parametrize(
    "words",
    [BAD, '" onload="alert(1)', "'><img src=x>", "a & b", "</style>", "&lt;b&gt;", "![x](http://y/z.png)",
     "[x](javascript:alert(1))", "<http://y>", "http://y", "a \\| b | c", "`` ` ``", "**b** _i_ ~~s~~", "# h", "a \\",
     '<img src="a.png"', "$x$"],
)  # fmt: skip
def test_no_words_from_outside_become_markup(words):
    read = self_contained(every_kind(words))
    assert read.text.count(words) >= 10 and read.tags.count("img") == 1 and "a" not in read.tags
    assert read.tags.count("em") == 0 and read.tags.count("strong") == 3
    shown = words.replace(r"\|", "|")  # within code, a table has no other way to write it
    assert read.rows == [["a", "b"], [words, shown], [words, "ours"]]


def test_in_markdown_what_is_given_stays_words():
    given_words = "<b> [x](http://y) `c` *d* _e_ | f\n# g"
    cells = page.table(("a", "b"), [(escape(given_words), code("x | `y`"))]).splitlines()
    assert cells[2] == r"| \<b\> \[x\](http://y) \`c\` \*d\* \_e\_ \| f # g | `` x \| `y` `` |"
    assert verbatim("a\n```\nb") == "````\na\n```\nb\n````"


def test_both_forms_say_the_same():
    markdown = f"# Title\n\n> Warning.\n\nOne {code('two')} **three**\n\n" + page.section(
        "Part", page.bullets(["**unit**: a user"]), page.table(("x", "y"), [("1", "2")]), verbatim("a text")
    )
    words = "".join(re.findall(r"\w+", markdown))
    # HTML says the title in its head, too.
    assert "Title" + words == "".join(re.findall(r"\w+", Read(render_html("Title", markdown, {})).text))


@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_browser_a_page_of_long_words_has_the_browsers_width(width, tmp_path):
    fits(every_kind("unbroken" * 40), width, tmp_path)
