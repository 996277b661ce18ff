"""WordPiece, against cases worked out by hand."""

import json

import pytest

from tfdp_rec.datasets.mind import files as mind
from tfdp_rec.datasets.mind.wordpiece import WordPiece

pytest.importorskip("tokenizers")

PIECES = [
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "un", "##aff", "##able", "##a", "play", "##ing", "##s", "the", "cafe", "é",
    "!", "'", "t", "don", "中", "文", "$", "9", "##99", ".", "Cafe", "café", "a", "##ff", "-", "[", "]",
    "sep", "“", "in", "##in",
]  # fmt: skip


def pieces_of(tokenizer, text):
    return [tokenizer.vocabulary[number] for number in tokenizer(text, 500)[1:-1]]


def pieces(text, lower_case=True, **more):
    return pieces_of(WordPiece(PIECES, lower_case, **more), text)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("unaffable", ["un", "##aff", "##able"]),
        ("unaffa", ["un", "##aff", "##a"]),
        ("UnAffable Plays", ["un", "##aff", "##able", "play", "##s"]),
        ("playing, the", ["play", "##ing", "[UNK]", "the"]),
        ("playinging", ["play", "##ing", "##ing"]),
        ("inplay", ["[UNK]"]),
        ("unaffablex the", ["[UNK]", "the"]),
        ("don't!", ["don", "'", "t", "!"]),
        ("$999.", ["$", "9", "##99", "."]),
        ("a-a", ["a", "-", "a"]),
        ("“the“", ["“", "the", "“"]),
        ("CAFÉ café", ["cafe", "cafe"]),
        ("中文中", ["中", "文", "中"]),
        ("the中the", ["the", "中", "the"]),
        ("  the\t\nthe\u3000the\u00a0the ", ["the"] * 4),
        ("th\x00e t\u200bhe \ufffdthe", ["the"] * 3),
        ("[SEP]", ["[", "sep", "]"]),
        ("a" * 101, ["[UNK]"]),
        ("a" * 100, ["a"] + ["##a"] * 99),
        ("", []),
    ],
)
def test_pieces_by_hand(text, expected):
    assert pieces(text) == expected


def test_capitals_and_accents_stay_where_the_checkpoint_has_them():
    assert pieces("Cafe café", lower_case=False) == ["Cafe", "café"]
    assert pieces("CAFÉ", strip_accents=False) == ["café"]
    assert pieces("Café", lower_case=False, strip_accents=True) == ["Cafe"]
    assert pieces("中文", split_chinese=False) == ["[UNK]"]


def test_ids_are_framed_cut_and_never_padded():
    tokenizer = WordPiece(PIECES, lower_case=True)
    assert tokenizer("the unaffable", 30) == [2, 11, 4, 5, 6, 3]
    assert tokenizer("the unaffable", 4) == [2, 11, 4, 3]
    assert tokenizer("", 3) == [2, 3]
    with pytest.raises(ValueError, match="at least 3"):
        tokenizer("the", 2)


@pytest.mark.parametrize(
    "vocabulary, message",
    [
        (PIECES[1:], "begin with"),
        (["the", *PIECES], "begin with"),
        (PIECES[:3], "begin with"),
        ([*PIECES, "the"], "twice"),
    ],
)
def test_vocabularies_that_cannot_be_one_are_refused(vocabulary, message):
    with pytest.raises(ValueError, match=message):
        WordPiece(vocabulary, lower_case=True)


def publish(folder, about=None, rows=35):
    (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n", encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"vocab_size": rows}))
    if about is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


def test_a_published_folder_says_how_text_is_folded(tmp_path):
    publish(tmp_path, {"do_lower_case": False, "strip_accents": None, "tokenize_chinese_chars": False})
    assert pieces_of(WordPiece.read(tmp_path), "Cafe 中文") == ["Cafe", "[UNK]"]
    assert pieces_of(WordPiece.read(tmp_path, lower_case=True), "Cafe") == ["cafe"]
    publish(tmp_path, {"do_lower_case": True, "strip_accents": False})
    assert pieces_of(WordPiece.read(tmp_path), "CAFÉ 中") == ["café", "中"]
    assert WordPiece.read(tmp_path).vocabulary == tuple(PIECES)


def test_a_folder_that_says_too_little_or_too_much_is_refused(tmp_path):
    publish(tmp_path)
    with pytest.raises(ValueError, match="do_lower_case"):
        WordPiece.read(tmp_path)
    assert WordPiece.read(tmp_path, lower_case=True)("the", 3) == [2, 11, 3]
    publish(tmp_path, rows=34)
    with pytest.raises(ValueError, match="has 35 pieces and config.json rows for 34"):
        WordPiece.read(tmp_path, lower_case=True)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match="no JSON"):
        WordPiece.read(tmp_path)
    with pytest.raises(FileNotFoundError):
        WordPiece.read(tmp_path / "nowhere")


def test_titles_and_abstracts_of_mind_are_tokenized_by_it(tmp_path):
    line = "N1\tsport\tgolf\tUnaffable cafés!\tPlaying the\turl\t[]\t[]\n"
    (tmp_path / "news.tsv").write_text(line, encoding="utf-8")
    (tmp_path / "behaviors.tsv").write_text("")
    data = mind.read(tmp_path, title_length=8, body_length=4, tokenizer=WordPiece(PIECES, lower_case=True))
    assert data.catalogue.features["title"].tolist() == [[0] * 8, [2, 4, 5, 6, 12, 10, 14, 3]]
    assert data.catalogue.features["body"].tolist() == [[0] * 4, [2, 8, 9, 3]]
    assert data.catalogue.vocabulary == tuple(PIECES)
