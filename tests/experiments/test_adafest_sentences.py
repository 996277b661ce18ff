"""Generated sentences: repeatable, Zipf's law, labels that follow the planted weights."""

import numpy as np
import pytest
from scipy import stats

from experiments.adafest.sentence_files import HASHED, SentenceFiles
from experiments.adafest.sentences import SyntheticText

TEXT = SyntheticText(vocabulary_size=2000, seed=3)


def test_equal_arguments_give_equal_sentences_and_parts_differ():
    first, again = TEXT.examples(50), SyntheticText(vocabulary_size=2000, seed=3).examples(50)
    np.testing.assert_array_equal(first.tokens, again.tokens)
    np.testing.assert_array_equal(first.labels, again.labels)
    others = [TEXT.examples(50, part="test"), TEXT.examples(50, day=1), SyntheticText(2000, seed=4).examples(50)]
    assert all((first.tokens != other.tokens).any() for other in others)


def test_public_sentences_agree_in_part():
    """By the correlation of their weights, and by how often the truth of the others is right about them."""
    public = TEXT.examples(4000, part="public")
    polar = (TEXT._weights != 0) | (TEXT._public_weights != 0)
    found = np.corrcoef(TEXT._weights[polar], TEXT._public_weights[polar])[0, 1]
    assert abs(found - TEXT.agreement) < 0.2 and found < 0.95
    right = np.mean((TEXT.logits(public) > 0) == public.labels)
    assert 0.6 < right < np.mean((TEXT.logits(TEXT.examples(4000)) > 0) == TEXT.examples(4000).labels) - 0.03


def test_sentences_are_tokens_and_then_padding():
    tokens = TEXT.examples(3000).tokens
    lengths = (tokens > 0).sum(axis=1)
    assert lengths.min() == 5 and lengths.max() == 32 and tokens.max() < 2000
    assert all((row[:length] > 0).all() for row, length in zip(tokens, lengths))


@pytest.mark.parametrize("exponent, accepted", [(1.1, True), (1.15, False)])
def test_tokens_follow_the_shifted_law(exponent, accepted):
    tokens = TEXT.examples(4000).tokens
    ends = np.array([0, 1, 3, 10, 30, 100, 300, 1000, 1999]) + 2.7
    shares = np.diff(ends ** (1 - exponent)) / (ends[-1] ** (1 - exponent) - ends[0] ** (1 - exponent))
    observed = np.histogram(tokens[tokens > 0] - 1, bins=ends - 2.7)[0]
    assert (stats.chisquare(observed, shares * observed.sum()).pvalue > 1e-6) == accepted


@pytest.mark.parametrize("signal", [1.0, 3.0])
def test_labels_are_coins_of_the_planted_logits(signal):
    text = SyntheticText(seed=1, signal=signal)
    examples = text.examples(40_000)
    logits = text.logits(examples)
    assert logits.std() == pytest.approx(signal, rel=0.1)
    for low, high in ((-2, -1), (-0.5, 0.5), (1, 2)):
        chosen = (logits > low) & (logits < high)
        expected = np.mean(1 / (1 + np.exp(-logits[chosen])))
        assert stats.binomtest(int(examples.labels[chosen].sum()), int(chosen.sum()), expected).pvalue > 1e-6


def test_function_words_and_padding_have_no_weight():
    assert (TEXT._weights[:21] == 0).all() and 0.2 < (TEXT._weights[21:] != 0).mean() < 0.4


@pytest.mark.parametrize("wrong", [{"vocabulary_size": 10}, {"max_length": 4}, {"polar_share": 0.0}])
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SyntheticText(**wrong)


def files(folder, **extra):
    rows = {
        "train.tsv": 'sentence\tlabel\n"good, not bad\t1\n' + "".join(f"film {n} is bad\t{n % 2}\n" for n in range(39)),
        "dev.tsv": "sentence\tlabel\nA Good film\t1\n\t0\nso so\t2\n",
        "public.csv": 'text,airline_sentiment\n"@air a good, good flight",positive\nlate,neutral\n'
        "bad flight,negative\n",
    }
    for name, text in (rows | extra).items():
        if text:
            (folder / name).write_text(text, encoding="utf-8")
    return SentenceFiles(str(folder), max_length=4)


def test_sentences_of_files_are_read_as_they_stand(tmp_path):
    texts = files(tmp_path)
    known = {"flight": HASHED + 1, "good": HASHED + 2}  # twice in the public file: an id each, in order
    assert texts.vocabulary_size == 1 + HASHED + len(known)
    tokens, labels = texts.examples(2, part="public").fetch(slice(None))
    by_label = dict(zip(labels.tolist(), tokens.tolist()))
    assert by_label[1][1] == by_label[1][3] == known["good"] and by_label[0][1:] == [known["flight"], 0, 0]
    (tokens,), (label,) = texts.examples(99, part="test").fetch(slice(None))  # no empty sentence, no other label
    assert label == 1 and tokens[1] == known["good"] and 0 < tokens[0] <= HASHED and tokens[3] == 0


def test_a_tenth_of_the_training_sentences_is_for_choosing(tmp_path):
    texts = files(tmp_path)
    train, chosen = texts.examples(36), texts.examples(99, part="validation")
    assert len(train) == 36 and len(chosen) == 4
    lines = [tuple(row) for part in (train, chosen) for row in part.tokens.tolist()]
    assert len(set(lines)) == 40
    with pytest.raises(ValueError, match="has 36 train sentences; the study asks for 37"):
        texts.examples(37)


def test_a_folder_without_sentences_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no dev.tsv"):
        files(tmp_path, **{"dev.tsv": ""})
    (tmp_path / "dev.tsv").write_text("content\tlabel\nx\t1\n")
    with pytest.raises(ValueError, match="no column of sentence or text"):
        SentenceFiles(str(tmp_path)).examples(1, part="test")
    (tmp_path / "public.csv").unlink()
    assert SentenceFiles(str(tmp_path)).vocabulary_size == 1 + HASHED
