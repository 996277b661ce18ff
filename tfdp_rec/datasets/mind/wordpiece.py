"""WordPiece: text to the token ids that BERT's published weights are for, by the library `tokenizers`.

A text is text: "[SEP]" in a title is a word between brackets, and no title can write a special token.

Reference:
    Devlin et al., "BERT", NAACL 2019; Wu et al., "Google's Neural Machine Translation System", 2016.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfdp_rec.core.ground.lazy_imports import optional

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


class WordPiece:
    """Token ids of texts, for `mind.read(..., tokenizer=...)`. Needs the extra `bert`.

    Args:
        vocabulary: Pieces by token id, "[PAD]" the first.
        lower_case: Whether capitals are folded.
        strip_accents: Whether accents are removed; None does as `lower_case` says.
        split_chinese: Whether each Chinese character is a word.

    Raises:
        ValueError: If the vocabulary lacks a special token, "[PAD]" is not the first, or a piece is there twice.
        ImportError: If the extra is missing.

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
        library = optional("tokenizers", "bert")
        # The special tokens are framed here and not registered: a registered one would be recognised within a text.
        self._tokenizer = library.Tokenizer(library.models.WordPiece(self._ids, unk_token="[UNK]"))
        self._tokenizer.normalizer = library.normalizers.BertNormalizer(
            clean_text=True, handle_chinese_chars=split_chinese, strip_accents=strip_accents, lowercase=lower_case
        )
        self._tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()

    @classmethod
    def read(cls, folder: str | Path, lower_case: bool | None = None) -> WordPiece:
        """Reads the folder of a published checkpoint.

        Args:
            folder: Folder with vocab.txt and, mostly, tokenizer_config.json.
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
        """At most `length` ids, "[CLS]" and "[SEP]" among them; a length below 3 is refused."""
        if length < 3:
            raise ValueError(f"length must be at least 3, for [CLS], a piece and [SEP], got {length}.")
        return [self._ids["[CLS]"], *self._tokenizer.encode(text).ids[: length - 2], self._ids["[SEP]"]]


def _json(path: Path) -> dict[str, Any]:
    """What a file says; nothing if there is none."""
    if not path.exists():
        return {}
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise ValueError(f"{path} is no JSON: it is damaged, or of another format.") from problem
    return said if isinstance(said, dict) else {}
