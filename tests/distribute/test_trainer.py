"""The trainer on real loopback clusters. Each process is started, and ended, by the test that needs it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SECONDS = 600  # patience, for a machine that has other work


def run(command, seconds=SECONDS):
    """What a script prints; it and all its processes are ended, whatever happens."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", *command],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"{command} took more than {seconds} s:\n{process.communicate()[1][-3000:]}") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, f"{out[-1000:]}\n{err[-3000:]}"
    return out


def scenario(*arguments):
    return json.loads(run([str(HERE / "scenarios.py"), *arguments]).splitlines()[-1])


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory):
    return scenario("one_worker", str(tmp_path_factory.mktemp("training")))


@pytest.fixture(scope="module")
def released_models(tmp_path_factory):
    return scenario("released_models", str(tmp_path_factory.mktemp("training")))


@pytest.fixture(scope="module")
def two_workers():
    return scenario("two_workers")


@pytest.fixture(scope="module")
def refused_dearly():
    return scenario("refused_dearly")


def check_equal(found):
    """What one worker makes, against one machine."""
    for name, result in found.items():
        assert result["shards"] == {"many/embeddings": 2, "few/embeddings": 1}, "a large kernel is put together again"
        assert result["traced in release"] == 0, "a server that freezes just then would freeze us, deaf to Ctrl-C"
        assert result["moved"] > 0.05 and result["off"] < 1e-5, (name, result)


@pytest.mark.slow
def test_one_worker_makes_the_single_machines_model_for_every_mechanism():
    check_equal(scenario("every_mechanism"))


def test_an_interrupted_training_goes_on_as_if_it_had_not_been(one_worker):
    found = one_worker["resumed"]
    acts = ("fit", "model", "save", "model")  # the last one is a release by shards
    assert all(f"resume() before {act}" in words for act, words in zip(acts, found["refused"], strict=True))
    assert "is in use" in found["beside"]
    assert found["forgotten"].startswith("BrokenLedger") and "Restore the right one" in found["forgotten"]
    assert found["attempts"] == 7
    assert found["counted"] == found["in all"], "an accountant that follows counts what comes after, too"
    check_equal({"an interrupted training": found})
    assert found["modes"] == ["700"]


@pytest.mark.slow
def test_a_model_of_more_rows_goes_on_from_a_release_in_one_ledger(released_models):
    found = released_models["grown"]
    assert found["first"] == 0.0 and found["moved"] > 0.1 and found["off"] < 1e-5
    assert found["resumed"] == 7 and found["carried"] == 12 and found["paid"] == 24
    twice = released_models["released twice"]  # goes on with what had been released in the middle of the training
    assert twice["undescribed"] == found["undescribed"] == 0 and twice["steps"] == 5
    assert "earlier_steps: that is their number when this training began" in found["late"]
    assert 12 in found["kept"], "a trainer that resumes without begin_with has its history from the checkpoint"
    assert found["other"].startswith("ValueError: begin_with has variables of [(300, 8, 'float32')")


@pytest.mark.slow
def test_what_was_released_is_not_forgotten(released_models):
    found = released_models["released twice"]
    assert found["off"] == 0.0
    assert 0.9 < found["spread"] < 1.1  # one noise a step; of 3,184 values these are eight standard deviations
    assert abs(found["alike"]) < 0.15  # the two servers' noise; six standard deviations


def test_a_release_by_shards_answers_as_the_whole_model_and_nothing_is_written_twice(one_worker):
    found = one_worker["by shards"]
    assert found["off"] == 0.0 and found["spread"] > 0.1
    assert sorted(found["sizes"])[-2:] == [150 * 8 * 4] * 2, "each of two servers wrote its half"
    assert sum(found["sizes"]) < 2 * 9600, "Keras would write each table twice"
    some = found["unread"]
    assert some["off"] == 0.0 and some["spread"] > 0.01
    assert sum(some["sizes"]) < 2 * 9600, "the table that no answer reads is not there"


def test_a_release_by_shards_that_is_cut_short_leaves_nothing_and_draws_no_other_noise_when_repeated(one_worker):
    found = one_worker["by shards"]
    words, left = found["cut short"]
    assert words.startswith("RuntimeError: a server died") and left == []
    words, left = found["not shared"]
    assert words.startswith("OSError: A server wrote to") and left == []
    assert found["another noise"] == 0.0
    assert found["older stays"]


def test_a_release_by_shards_settles_what_lands_while_it_is_written(one_worker):
    found = one_worker["by shards"]["unread"]
    assert found["late"] == 0.0 and found["moved"] > 0.05


def test_a_release_by_shards_appears_after_the_checkpoint_of_what_it_holds(one_worker):
    assert one_worker["by shards"]["there"] == [False]


def test_what_cannot_be_released_by_shards_is_refused(one_worker):
    found = one_worker["by shards"]
    assert found["address"].startswith("ValueError: gs://somewhere/else is an address")
    assert found["reads"].startswith("ValueError: The model reads its tables when it is made or exported")
    assert found["reads in call"] == found["reads"]
    assert found["own export"].startswith("ValueError: OwnExport has an export of its own")


@pytest.mark.slow
def test_a_server_killed_during_a_release_by_shards_leaves_nothing_and_the_training_goes_on(tmp_path):
    found = scenario("killed_while_it_writes", str(tmp_path))
    assert found["lost"].startswith("ServerLost: A parameter server died") and found["left"] == ["training"]
    assert found["off"] == 0.0 and found["spread"] > 0.01


@pytest.mark.slow
def test_a_table_four_times_the_chiefs_memory_limit_is_released_by_shards(tmp_path):
    if os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 12 * 2**30:
        pytest.skip("needs 12 GB of free memory: two servers, and at the end the whole model to compare with")
    found = scenario("by_shards_under_a_limit", str(tmp_path))
    assert found["off"] == 0.0 and found["spread"] > 0.01
    assert "ResourceExhaustedError" in found["refused"], "the limit holds: the whole model does not fit"
    assert 4 < found["written"] < 4.01


def test_everything_in_a_section_runs_on_its_server(one_worker):
    assert one_worker["sections"] > 10 and one_worker["strays"] == []


@pytest.mark.slow
def test_no_read_of_two_workers_sees_half_a_step_of_any_mechanism():
    for name, result in scenario("two_workers_every_mechanism", "200").items():
        assert result["reads"] == 2 * 200 and result["wrong"] == 0, (name, result)
        assert result["final"] < 1e-3, (name, result)


@pytest.mark.slow
def test_a_release_has_one_noise_for_every_step_also_of_those_that_had_nothing_for_a_server(two_workers):
    assert two_workers["sparse"]["final"] < 1e-3 and two_workers["sparse"]["clocks"] == [40, 40]


@pytest.mark.slow
def test_a_budget_is_never_overspent(two_workers):
    found = two_workers["budget"]
    assert 4 < found["attempts"] == found["counted"] <= found["most"] < found["attempts"] + 4
    assert found["epsilon"] <= 20.0


def whole(numbers):
    return all(abs(number - round(number)) < 1e-2 for number in numbers)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lazy", "lazy, momentum", "eager", "eana"])
def test_a_worker_killed_within_a_section_leaves_no_server_locked_and_no_gradient_without_noise(name):
    found = scenario("killed_within_sections", "12", name)
    for server in found["servers"]:
        clock, noise, gradients = server["clock"], server["noise"], server["gradients"]
        assert 4 < clock <= found["attempts"] and whole(noise) and {round(n) for n in noise} <= {0, 1}
        if name.startswith("lazy"):  # the tick alone makes the noise due, and the gradient comes after it
            assert min(noise) > 0.99 and gradients <= clock / (0.5 if "momentum" in name else 1) + 1e-2
            assert "momentum" in name or whole([gradients])
        else:  # gradient and noise come in one write
            assert abs(gradients - sum(noise)) < 1e-2
        untouched, none = server["untouched"]
        assert whole(untouched) and abs(none) < 1e-2
        assert not name.startswith("lazy") or min(untouched) > 0.99


@pytest.mark.slow
def test_training_goes_on_without_a_worker_and_notices_a_frozen_one():
    found = scenario("absent")
    assert found["without"] == 80
    assert found["frozen"].startswith("Silence: No step ended for 5 s. No answer from worker 1 (127.0.0.1:")
    assert "it listens and says nothing: frozen?" in found["frozen"] and "ps" not in found["frozen"]
    assert 200 <= min(found["clocks"]) and max(found["clocks"]) <= found["attempts"] <= 260
    assert found["server frozen in model"].startswith("Silence: No answer from ps 1 (127.0.0.1:")
    assert found["server frozen in fit"].startswith("Silence: No step ended for 5 s. No answer from ps 1 (127")
    assert found["interrupted"] and found["moved after"] > 0


@pytest.fixture(scope="module")
def broken():
    return scenario("broken")


@pytest.mark.slow
def test_the_invariants_notice_a_missing_lock(broken):
    found = broken["no lock"]  # where each step waits for the other worker's read before it adds its gradient
    assert found["reads"] == 40 and found["wrong"] > 10, found


@pytest.mark.slow
def test_the_invariants_notice_a_step_that_untouched_rows_do_not_count(broken):
    found = broken["tick if touched"]
    assert found["final"] > 1 and found["clocks"] != [40, 40]


@pytest.mark.parametrize(
    "what, words",
    [
        ("AdaFEST", "NotPrivate: AdaFEST does not run on parameter servers"),
        ("Adam", "NotPrivate: Adam does not run on parameter servers: it is no mechanism"),
        ("regularizer", "NotPrivate: Table 'many/embeddings' has a regularizer, and EANA moves only some rows"),
        ("secure", "NotPrivate: SecureNoise cannot draw on a parameter server"),
        ("random layer", "draws random numbers from a seed that the workers of a cluster would share"),
        ("no sampling", "NotPrivate: Workers draw their batches by themselves"),
        ("in order", "NotPrivate: Workers draw their batches by themselves"),
        ("other data", "NotPrivate: dataset_fn does not draw with the sampling"),
        ("plain Keras", "TypeError: model_fn must make a model with tfdp_rec.PrivateTraining"),
        ("whole read", "trainer.model()"),
        ("another batch size", "expected_batch_size is 16 and the optimizer's 32"),
        ("BackupAndRestore", "NotPrivate: BackupAndRestore forgets the steps"),
        ("TrainingCheckpoint", "give the trainer a checkpoint_directory"),
        ("resume", "pass checkpoint_directory"),
        ("deserted", "TimeoutError: No answer within 0.2 s from worker 0 (127.0.0.1:9)"),
        ("another sampling", "NotPrivate: dataset_fn gives batches of another sampling"),
        ("mapped", "went through Map after sampling"),
    ],
)
def test_refuses_with_words_that_help(one_worker, what, words):
    assert words in one_worker["refusals"][what]


@pytest.mark.slow
@pytest.mark.parametrize(
    "what, words",
    [
        ("mixing", "(per_example_loss) puts several examples of the batch together"),
        ("cached", "NotPrivate: Refused batch: draw 0 of this iteration was trained on before"),
        ("cached", "inf, since no sampling drew the batches, as far as is proved"),
        ("no proof", "carry no proof that they were sampled"),
        ("ends", "ValueError: The data of dataset_fn ended"),
        ("batched anew", "NotPrivate: A sampled batch cannot be regrouped"),
        ("rows dropped", "Every unit gives exactly one row"),
    ],
)
def test_refuses_at_some_cost_with_words_that_help(refused_dearly, what, words):
    assert words in refused_dearly["refusals"][what]


def kills(workers, servers, coordinators, seconds):
    script = str(ROOT / "scripts" / "cluster_kill_test.py")
    counts = ("--workers", str(workers), "--servers", str(servers), "--coordinators", str(coordinators))
    return run([script, *counts], seconds).splitlines()[-1]


@pytest.mark.slow
def test_killed_processes_cost_no_noise_and_no_count():
    assert kills(1, 1, 1, 180) == "good"


@pytest.mark.slow
def test_many_killed_processes_cost_no_noise_and_no_count():
    assert kills(12, 5, 3, 580) == "good"
