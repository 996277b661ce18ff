"""`tfdp-rec train --sampling allocation`: whole epochs, each of which is paid for at its first step."""

import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent, SelfComposedDpEvent
from job.conftest import cut_at, results_of

from tfdp_rec.cli import main
from tfdp_rec.core.claim.events import RandomAllocationDpEvent
from tfdp_rec.core.claim.ledger import read
from tfdp_rec.job.budget import prior_noise
from tfdp_rec.privacy import epsilon_of

SMALL = "--users 600 --movies 150 --steps 20 --batch-size 60 --width 4 --hidden 0 --quiet --epsilon 2".split()
CHOSEN = "--sampling allocation --mechanism lazydpsgd".split()
DELTA, EPOCH = 1e-6, 8  # of 480 users or so


def cost(ledger, noise):
    """ε of what the ledger holds, from the events alone."""
    epochs = sum(paid.attempts for paid in read(ledger).paid if paid.steps)
    each = SelfComposedDpEvent(RandomAllocationDpEvent(GaussianDpEvent(noise), EPOCH), epochs)
    figures = [paid.event for paid in read(ledger).paid if paid.label == "metrics of held-out units"]
    assert len(figures) == 1
    return epochs, epsilon_of(ComposedDpEvent([each, GaussianDpEvent(prior_noise(2.0, DELTA)), *figures]), DELTA)


def test_steps_are_whole_epochs_and_cost_what_the_run_may(tmp_path):
    import json

    assert main(["train", *SMALL, *CHOSEN, "--out", str(tmp_path / "run")]) == 0
    result = results_of(tmp_path / "run")["lazydpsgd"]
    config = json.loads((tmp_path / "run" / "private" / "config.json").read_text())
    epochs, epsilon = cost(tmp_path / "run" / "release" / "ledger.jsonl", config["noise_multipliers"]["lazydpsgd"])
    assert (epochs, result["steps"]) == (2, 16) and 1.9 < epsilon <= 2
    assert result["epsilon"] == pytest.approx(epsilon, rel=1e-6)
    report = " ".join((tmp_path / "run" / "private" / "report.md").read_text().split())
    assert "random allocation: every user is in one of the 8 batches of each epoch" in report


@pytest.mark.slow
@pytest.mark.parametrize("dead", [False, True])
def test_a_killed_run_loses_the_rest_of_its_epoch(tmp_path, dead):
    kept, ledger = tmp_path / "kept", tmp_path / "run" / "release" / "ledger.jsonl"
    with pytest.MonkeyPatch.context() as cutting:
        cut_at(cutting, 7, dead)
        keeping = ["--checkpoint", str(kept), "--checkpoint-every", "3"]
        assert main(["train", *SMALL, *CHOSEN, *keeping, "--out", str(tmp_path / "run")]) == 130
    assert main(["train", "--checkpoint", str(kept), "--resume", "--quiet"]) == 0
    result = results_of(tmp_path / "run")["lazydpsgd"]
    # Six of the first epoch's steps are kept, or all seven that were made before an interruption; then one epoch.
    assert result["steps"] == (6 if dead else 7) + EPOCH
    epochs = sum(paid.attempts for paid in read(ledger).paid if paid.steps)
    assert epochs == 2 and 1.9 < result["epsilon"] <= 2
