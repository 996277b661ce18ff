"""WordPiece: text to the token ids that BERT's published weights are for.

    clean       control characters go, every space is one space, a Chinese character is a word
    fold        lower case, accents off, where the checkpoint was trained so
    split       at spaces; every punctuation mark is a word
    pieces      from the left the longest known piece, "##" before those that go on; a word that cannot be
                put together so is [UNK] as a whole
    frame       [CLS] pieces [SEP], zeros behind

What stands in a text is text: "[SEP]" in a title is a word between brackets, and no title can write a special token.

Reference:
    Devlin et al., "BERT", NAACL 2019; Wu et al., "Google's Neural Machine Translation System", 2016.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
_LONGEST_WORD = 100
_CHINESE = (
    (0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F),
)  # fmt: skip


class WordPiece:
    """Token ids of texts, for `mind.read(..., tokenizer=...)`.

    Args:
        vocabulary: Pieces by token id, "[PAD]" the first.
        lower_case: Whether capitals are folded.
        strip_accents: Whether accents are; None does as `lower_case` says.
        split_chinese: Whether each Chinese character is a word.

    Raises:
        ValueError: If the vocabulary lacks a special token, "[PAD]" is not the first, or a piece is there twice.

    Example:
        >>> pieces = WordPiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "play", "##ing", "!"], lower_case=True)
        >>> pieces("Playing!", length=8)
        [2, 4, 5, 6, 3]
    """

    def __init__(
        self,
        vocabulary: Sequence[str],
        lower_case: bool,
        strip_accents: bool | None = None,
        split_chinese: bool = True,
    ) -> None:
        self.vocabulary = tuple(vocabulary)
        self._ids = {piece: index for index, piece in enumerate(self.vocabulary)}
        lacking = [piece for piece in SPECIAL if piece not in self._ids]
        if lacking or self.vocabulary[0] != "[PAD]":
            raise ValueError(f"vocabulary must begin with [PAD] and have {', '.join(SPECIAL)}.")
        if len(self._ids) < len(self.vocabulary):
            raise ValueError("vocabulary has a piece twice: ids would not be what the weights were trained with.")
        self.lower_case = lower_case
        self.strip_accents = lower_case if strip_accents is None else strip_accents
        clean = _cleaned if split_chinese else _cleaned_but_whole
        self._clean, self._split = (
            _Remembered(lambda code: clean(chr(code))),
            _Remembered(lambda code: _apart(chr(code))),
        )
        self._of = _Remembered(self._of_word)

    @classmethod
    def read(cls, folder: str | Path, lower_case: bool | None = None) -> WordPiece:
        """From the folder of a published checkpoint.

        Args:
            folder: Where vocab.txt, and mostly tokenizer_config.json, are.
            lower_case: Whether capitals are folded; None takes what tokenizer_config.json says.

        Raises:
            FileNotFoundError: If there is no vocab.txt.
            ValueError: If nothing says whether capitals are folded, or vocab.txt is not one of these, or has more
                pieces than config.json has rows for.
        """
        path = Path(folder)
        vocabulary = (path / "vocab.txt").read_text(encoding="utf-8").removesuffix("\n").split("\n")
        said, rows = _json(path / "tokenizer_config.json"), _json(path / "config.json").get("vocab_size")
        if rows is not None and len(vocabulary) > rows:
            raise ValueError(f"{path}/vocab.txt has {len(vocabulary)} pieces and config.json rows for {rows}.")
        lower_case = said.get("do_lower_case") if lower_case is None else lower_case
        if not isinstance(lower_case, bool):
            raise ValueError(f"{path}/tokenizer_config.json says no do_lower_case: pass lower_case=True or False.")
        return cls(vocabulary, lower_case, said.get("strip_accents"), said.get("tokenize_chinese_chars", True))

    def __call__(self, text: str, length: int) -> list[int]:
        """At most `length` ids, "[CLS]" and "[SEP]" among them.

        Raises:
            ValueError: If that leaves no room for the text.
        """
        if length < 3:
            raise ValueError(f"length must be at least 3, for [CLS], a piece and [SEP], got {length}.")
        pieces = ["[CLS]", *self.pieces(text)[: length - 2], "[SEP]"]
        return [self._ids[piece] for piece in pieces]

    def pieces(self, text: str) -> list[str]:
        """The pieces of a text."""
        text = text.translate(self._clean)
        if self.lower_case:
            text = text.lower()
        if self.strip_accents:
            text = "".join(c for c in unicodedata.normalize("NFD", text) if unicodedata.category(c) != "Mn")
        return [piece for word in text.translate(self._split).split() for piece in self._of[word]]

    def _of_word(self, word: str) -> list[str]:
        pieces: list[str] = []
        while word and len(word) <= _LONGEST_WORD:
            before = "##" if pieces else ""
            longest = next((before + word[:n] for n in range(len(word), 0, -1) if before + word[:n] in self._ids), None)
            if longest is None:
                return ["[UNK]"]
            pieces.append(longest)
            word = word[len(longest) - len(before) :]
        return pieces if not word else ["[UNK]"]


class _Remembered(dict[Any, Any]):
    """Answers of a rule, each worked out when it is first asked for; `str.translate` takes it too."""

    def __init__(self, rule: Callable[[Any], Any]) -> None:
        super().__init__()
        self._rule = rule

    def __missing__(self, key: Any) -> Any:
        self[key] = self._rule(key)
        return self[key]


def _cleaned_but_whole(character: str) -> str:
    kind = unicodedata.category(character)
    if character in "\t\n\r" or kind == "Zs":
        return " "
    return "" if kind.startswith("C") or character == "\ufffd" else character


def _cleaned(character: str) -> str:
    if any(first <= ord(character) <= last for first, last in _CHINESE):
        return f" {character} "
    return _cleaned_but_whole(character)


def _apart(character: str) -> str:
    ascii_mark = character.isascii() and character.isprintable() and not character.isalnum() and character != " "
    return f" {character} " if ascii_mark or unicodedata.category(character).startswith("P") else character


def _json(path: Path) -> dict[str, Any]:
    """What a file says; nothing if there is none."""
    if not path.exists():
        return {}
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise ValueError(f"{path} is no JSON: it is damaged, or of another format.") from problem
    return said if isinstance(said, dict) else {}
