"""`tfdp-rec audit`: what it prints, and its exit code."""

import json

import pytest

from tfdp_rec.cli import main

SMALL = ["audit", "--canaries", "2000", "--guesses", "200", "--runs", "1"]


@pytest.mark.slow
def test_a_correct_mechanism_is_not_refuted(tmp_path, capsys):
    path = tmp_path / "audit.json"
    assert main([*SMALL, "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "LazyDPSGD, noise multiplier 4, 2 steps: claims ε = 1.54" in printed
    assert "not refuted" in printed
    found = json.loads(path.read_text())
    assert found["refuted"] == 0 and len(found["curve_bounds"]) == len(found["independent_bounds"]) == 1
    assert len(found["bounds"]) == 1 and found["claim"] == pytest.approx(1.5436, abs=1e-3)


@pytest.mark.slow
def test_sampled_batches_have_a_claim_of_their_own(capsys):
    assert main([*SMALL, "--noise-multiplier", "1", "--steps", "4", "--sampling-rate", "0.25"]) == 0
    assert "4 steps: claims ε = 4.98" in capsys.readouterr().out


@pytest.mark.slow
def test_a_false_claim_is_refuted(capsys):
    assert main([*SMALL, "--noise-multiplier", "0.5", "--claim", "0.5"]) == 1
    assert "refuted in 1 of 1 runs" in capsys.readouterr().out
    # 200 guesses, all right, let (ε, δ) alone refute no more than 3.8
    assert main([*SMALL, "--noise-multiplier", "0.5", "--claim", "6"]) == 1


@pytest.mark.parametrize("wrong, words", [
    (["--runs", "0"], "--runs"),
    (["--claim", "-1"], "--claim"),
    (["--guesses", "5000"], "--guesses must be at most 2000"),
    (["--canaries", "0"], "--canaries"),
    (["--json", "/nowhere/found.json"], "/nowhere/found.json"),
    (["--delta", "2"], "delta"),
    (["--sampling-rate", "0"], "--sampling-rate"),
])  # fmt: skip
def test_wrong_arguments_are_answered_in_one_line(wrong, words, capsys):
    assert main([*SMALL, *wrong]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_an_unknown_mechanism_is_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["audit", "--mechanism", "SGD"])
    assert stopped.value.code == 2
