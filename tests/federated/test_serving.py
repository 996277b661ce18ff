"""Serving: bundles, the client's ledger, memoised draws, a budget for every click, and bytes on the wire."""

import dataclasses
import functools
import inspect
import json
import os
import pathlib
import shutil
import socket
import threading

import numpy as np
import pytest
from helpers import bytes_in, of_this_machine
from scipy import stats

from experiments.news.published import PublishedGaussian
from tfdp_rec.core.claim.ledger import read
from tfdp_rec.core.claim.profiles import epsilon_of_releases
from tfdp_rec.core.mechanism.noise import words
from tfdp_rec.federated import AttentionMechanism, client
from tfdp_rec.privacy import BrokenLedger

MECHANISM = AttentionMechanism(3, 2.0, 1e-5, padding=0.2)


@pytest.fixture(scope="module")
def served(world, tmp_path_factory):
    from tfdp_rec.federated import serving

    folder = tmp_path_factory.mktemp("served")
    model = world.model()
    serving.export_server(model, world.catalogue, folder / "server")
    serving.export_client(model, world.catalogue, folder / "client", MECHANISM, history_length=5)
    return folder, model, world.catalogue


def make(served, tmp_path, **settings):
    settings = {"budget_epsilon": 20.0} | settings
    return client.PrivateClient(served[0] / "client", tmp_path / "ledger.jsonl", **settings)


def places(tmp_path):
    """The ids of the clicks, oldest first."""
    return [click[2] for click in client.State.read(str(tmp_path / "ledger.jsonl.clicks")).clicks]


@pytest.mark.parametrize("runtime", ("graph", "tflite"))
def test_the_exported_graphs_give_the_models_attention(served, world, runtime):
    folder, model, _ = served
    vectors = np.array(model.news_vectors(world.features))
    history = np.array([[3, 7, 1, 0, 0]], dtype="int32")
    expected, _ = model.encode_history(vectors, history)
    encode = client._encoder(folder / "client", runtime, 5, world.dim, MECHANISM)
    np.testing.assert_allclose(encode(vectors[history], history != 0), expected, atol=1e-5)


def test_the_server_ranks_by_the_reconstructed_user(served, world):
    import tensorflow as tf

    folder, model, catalogue = served
    server = tf.saved_model.load(str(folder / "server"))
    attention = np.array([[0.2, 0.5, 0.3]], "float32")
    vectors = np.array(model.news_vectors(world.features))
    scores = (attention @ np.array(model.private_attention.basis) @ vectors.T)[0]
    candidates = np.array([[4, 9, 2]], "int32")
    ranked = server.signatures["rank"](attention=tf.constant(attention), candidates=tf.constant(candidates))
    order = sorted([4, 9, 2], key=lambda row: -scores[row])
    assert [n.decode() for n in ranked["news"].numpy()[0]] == [catalogue.ids[row] for row in order]
    top = server.signatures["top"](attention=tf.constant(attention), k=tf.constant(12))
    assert [n.decode() for n in top["news"].numpy()[0]] == [
        catalogue.ids[row] for row in sorted(range(1, 13), key=lambda row: -scores[row])
    ]


def test_asking_again_gives_the_same_draw_and_costs_nothing(served, tmp_path):
    phone = make(served, tmp_path)
    phone.record("N3")
    first, cost = phone.attention(), phone.spent()
    assert cost == pytest.approx(2.0, rel=1e-3)
    assert all(np.array_equal(phone.attention(), first) for _ in range(5)) and phone.spent() == cost
    phone.close()
    again = make(served, tmp_path)
    assert np.array_equal(again.attention(), first) and again.spent() == cost
    again.record("N3")
    assert not np.array_equal(again.attention(), first) and again.spent() > cost
    again.close()


def test_answers_of_a_seed_have_no_bound(served, tmp_path):
    phone = make(served, tmp_path, source=words.seeded(4))
    assert phone.spent() == 0.0
    phone.record("N3")
    phone.attention()
    assert phone.spent() == np.inf
    phone.close()


def test_new_draws_follow_the_number_of_clicks_not_their_content(served, tmp_path):
    """Two neighbouring logs, windows that repeat in one of them: fresh draws at the same moments."""
    patterns = []
    for name, clicks in (("a", ["N1"] * 8), ("b", ["N1"] * 6 + ["N2", "N1"])):
        (tmp_path / name).mkdir()
        phone, answers = make(served, tmp_path / name, budget_epsilon=100.0), []
        for news in clicks:
            phone.record(news)
            answers.append(phone.query())
        patterns.append([x == y for x, y in zip(answers, answers[1:])])
        phone.close()
    assert patterns[0] == patterns[1] == [False] * 7


def test_every_answer_pads_anew(served, tmp_path, monkeypatch):
    """One padding under two answers would tell of itself, and the second answer would not be amplified."""
    phone, seen = make(served, tmp_path, budget_epsilon=100.0, source=words.os_entropy), []
    encode, anonymous = phone._encode, phone._vectors[0]
    monkeypatch.setattr(phone, "_encode", lambda vectors, mask: (seen.append(vectors[0]), encode(vectors, mask))[1])
    monkeypatch.setattr(phone, "mechanism", dataclasses.replace(MECHANISM, padding=0.5))
    for _ in range(65):
        phone.record("N3")
        phone.attention()
    padded = np.array([[np.array_equal(row, anonymous) for row in vectors] for vectors in seen[5:]])
    assert len(np.unique(padded, axis=0)) > 5
    # 60 answers of 5 positions; all alike would be 0 or 60 in every column
    assert ((padded.sum(0) > 5) & (padded.sum(0) < 55)).all()
    phone.close()


def answers_that_fit(budget):
    """How many answers one click may be in, by composition alone."""
    count = 0
    while epsilon_of_releases({MECHANISM.event: count + 1}, 1e-5) <= budget:
        count += 1
    return count


def seen_by(phone, monkeypatch):
    """The windows that the encoder is given."""
    seen, encode = [], phone._encode
    monkeypatch.setattr(phone, "_encode", lambda vectors, mask: (seen.append(vectors[0]), encode(vectors, mask))[1])
    return seen


def test_a_click_is_in_as_many_answers_as_its_budget_holds_and_then_left_out(served, tmp_path, monkeypatch):
    """The policy: there is always an answer, with the same noise; a spent click counts as the anonymous news."""
    budget = 4.0
    fits = answers_that_fit(budget)
    assert 2 <= fits <= 4
    phone = make(served, tmp_path, budget_epsilon=budget)
    monkeypatch.setattr(type(phone.mechanism), "padding_mask", lambda self, length, source: np.zeros(length, bool))
    seen = seen_by(phone, monkeypatch)
    for number in range(1, 31):
        phone.record(f"N{number % 12 + 1}")
        assert phone.attention().shape == (3,)
        window = min(number, 5)
        anonymous = [np.array_equal(row, phone._vectors[0]) for row in seen[-1][:window]]
        assert anonymous == [place < window - fits for place in range(window)]
    assert phone.spent() <= budget
    assert (
        read(tmp_path / "ledger.jsonl").epsilon(1e-5)
        == phone.spent()
        == pytest.approx(epsilon_of_releases({MECHANISM.event: fits}, 1e-5))
    )
    phone.close()


def test_a_budget_is_spent_over_the_window_a_click_is_in_not_over_a_life(served, tmp_path):
    """Once it was 55 answers and then refused for ever."""
    phone = make(served, tmp_path, budget_epsilon=20.0)
    for _ in range(80):
        phone.record("N1")
        phone.query()
    assert phone.spent() == pytest.approx(epsilon_of_releases({MECHANISM.event: 5}, 1e-5))
    phone.close()


def test_who_is_left_out_depends_on_counts_never_on_what_was_clicked(served, tmp_path):
    paid = []
    for name, clicks in (("a", ["N1"] * 9), ("b", ["N7", "gone", "N7", "N2"] + ["N3"] * 5)):
        (tmp_path / name).mkdir()
        phone = make(served, tmp_path / name, budget_epsilon=4.0)
        for news in clicks:
            phone.record(news)
            phone.query()
        entries, place = read(tmp_path / name / "ledger.jsonl").paid, places(tmp_path / name).index
        paid.append([(entry.attempts, [*map(place, entry.about)], entry.event) for entry in entries])
        phone.close()
    assert paid[0] == paid[1] and len(paid[0]) == 9


def test_what_was_paid_is_not_priced_anew_by_another_bundle(served, tmp_path):
    phone = make(served, tmp_path, budget_epsilon=50.0)
    phone.record("N1")
    phone.attention()
    loud = AttentionMechanism(3, 9.0, 1e-5, padding=0.2)
    phone.mechanism, phone._about = loud, {**phone._about, "model": "another"}
    phone.attention()
    both = epsilon_of_releases({MECHANISM.event: 1, loud.event: 1}, 1e-5)
    assert phone.spent() == pytest.approx(both) and both > 9
    phone.close()
    again = make(served, tmp_path, budget_epsilon=50.0)
    assert again.spent() == pytest.approx(both)
    again.close()


@pytest.mark.slow
def test_the_answers_noise_has_the_mechanisms_scale(served, tmp_path, monkeypatch):
    """End to end against an oracle: kills a serving noise of half or a tenth."""
    phone = make(served, tmp_path)
    clipped = np.array([[0.2, 0.5, 0.3]])
    monkeypatch.setattr(phone, "_encode", lambda vectors, mask: clipped)
    protected = np.array([True, True])
    answers = np.array([phone._release([3, 4], protected) for _ in range(8000)])
    rng = np.random.default_rng(5)

    def oracle(scale):
        positive = np.logaddexp(0.0, clipped + scale * MECHANISM.noise_scale * rng.standard_normal((40_000, 3)))
        return positive / positive.sum(1, keepdims=True)

    for place in range(3):
        assert stats.ks_2samp(answers[:, place], oracle(1.0)[:, place]).pvalue > 1e-6
        for wrong in (0.1, 0.5, 0.8, 1.25):
            assert stats.ks_2samp(answers[:, place], oracle(wrong)[:, place]).pvalue < 1e-6
    phone.close()


def test_news_that_expired_or_are_no_numbers_are_served_as_the_anonymous_news(served, tmp_path, monkeypatch):
    phone = make(served, tmp_path, budget_epsilon=100.0)
    monkeypatch.setattr(type(phone.mechanism), "padding_mask", lambda self, length, source: np.zeros(length, bool))
    vectors = phone._vectors.copy()
    vectors[4] = np.nan
    monkeypatch.setattr(phone, "_vectors", client._finite(vectors))
    seen = seen_by(phone, monkeypatch)
    for news in ("N2", "expired long ago", "N4"):
        phone.record(news)
        assert np.isfinite(phone.attention()).all()
    window = seen[-1][:3]
    assert [np.array_equal(row, vectors[0]) for row in window] == [False, True, True]
    assert len(read(tmp_path / "ledger.jsonl").paid) == 3, "it is noised, and paid for, as ever"
    nothing = np.full_like(vectors, np.nan)
    assert not client._finite(nothing).any()
    monkeypatch.setattr(phone, "_encode", lambda vectors, mask: np.full((1, 3), np.nan))
    phone.record("N1")
    assert np.isfinite(phone.attention()).all()
    phone.close()


def test_news_that_are_not_in_the_bundle_are_never_free(served, tmp_path):
    phone = make(served, tmp_path, non_sensitive=("politics", ""))
    phone.record("expired")  # in no category that the phone showed
    phone.attention()
    assert phone.spent() == pytest.approx(2.0, rel=1e-3)
    phone.close()


def test_declared_categories_are_sent_exact_and_booked_without_bound(served, world, tmp_path):
    """`spent` is of what is protected; the ledger holds all, and a withdrawn declaration shows it."""
    phone = make(served, tmp_path, non_sensitive=("politics",))
    phone.record("N1", "politics")
    model = served[1]
    vectors = np.array(model.news_vectors(world.features))
    exact = np.array(model.encode_history(vectors, np.array([[1, 0, 0, 0, 0]], "int32"))[0])[0]
    np.testing.assert_allclose(phone.attention(), MECHANISM.finish(exact, np.zeros(3)), atol=1e-5)
    assert phone.spent() == 0.0
    phone.record("N9", "sport")
    phone.attention()
    assert phone.spent() == pytest.approx(2.0, rel=1e-3)
    phone.close()
    assert read(tmp_path / "ledger.jsonl").epsilon(1e-5) == np.inf
    booked = [(paid.label, paid.about) for paid in read(tmp_path / "ledger.jsonl").paid]
    first, second = places(tmp_path)
    assert booked == [("declared", (first,)), ("answer", (second,))], "exact is unbounded, and once is enough"
    withdrawn = make(served, tmp_path)
    assert withdrawn.spent() == np.inf
    seen = []
    withdrawn._encode = lambda vectors, mask: (seen.append(vectors[0]), np.full((1, 3), 1 / 3))[1]
    withdrawn.mechanism = dataclasses.replace(MECHANISM, padding=0.0)
    withdrawn.attention()
    assert np.array_equal(seen[0][0], withdrawn._vectors[0]), "it is never used again"
    assert np.array_equal(seen[0][1], withdrawn._vectors[9])
    withdrawn.close()


def test_a_bundle_has_no_say_in_which_clicks_are_protected(served, tmp_path):
    """All news of a declared category, says the bundle: the phone showed N1 as politics."""
    bundle = tmp_path / "lying"
    shutil.copytree(served[0] / "client", bundle)
    news = dict(np.load(bundle / "news.npz"))
    np.savez(bundle / "news.npz", **news, category=np.array(["sport"] * 13))
    phone = client.PrivateClient(bundle, tmp_path / "ledger.jsonl", 20.0, non_sensitive=("sport",))
    record = functools.partial(phone.record, "N1")
    record("politics") if "category" in inspect.signature(phone.record).parameters else record()
    answers = [np.array(phone.attention())]
    assert phone.spent() == pytest.approx(2.0, rel=1e-3)
    phone._about["model"] = "another"
    answers.append(np.array(phone.attention()))
    assert not np.allclose(*answers, atol=1e-3), "noise was added"
    phone.close()


def test_the_ledger_is_on_disk_before_the_click_is_looked_at(served, tmp_path, monkeypatch):
    phone = make(served, tmp_path)
    phone.record("N1")
    calls, encode, sync = [], phone._encode, os.fsync
    monkeypatch.setattr(phone, "_encode", lambda *a: (calls.append("encode"), encode(*a))[1])
    monkeypatch.setattr(os, "fsync", lambda *a: (calls.append("sync"), sync(*a))[1])
    phone.attention()
    assert calls[:2] == ["sync", "encode"]
    phone.record("N2")
    calls.clear()
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError("power cut")))
    with pytest.raises(OSError, match="power cut"):
        phone.attention()
    assert calls == []
    phone.close()


def test_an_older_ledger_and_a_second_phone_are_refused(served, tmp_path):
    phone = make(served, tmp_path)
    phone.record("N1")
    path, older = tmp_path / "ledger.jsonl", (tmp_path / "ledger.jsonl").read_bytes()
    phone.attention()
    with pytest.raises(ValueError, match="in use"):
        make(served, tmp_path)
    phone.close()
    assert path.stat().st_mode & 0o777 == (tmp_path / "ledger.jsonl.clicks").stat().st_mode & 0o777 == 0o600
    whole = path.read_bytes()
    path.write_bytes(older)
    with pytest.raises(BrokenLedger, match="older backup"):
        make(served, tmp_path)
    path.unlink()
    with pytest.raises(BrokenLedger, match="is gone"):
        make(served, tmp_path)
    assert not path.exists(), "nothing is begun in its place"
    path.write_text('{"format": 1, "clicks": ["N1"], "releases": [], "draw_key": "", "draw": []}')  # as 0.1 kept it
    with pytest.raises(BrokenLedger):
        make(served, tmp_path)
    path.write_bytes(whole)
    (tmp_path / "ledger.jsonl.clicks").write_text('{"clicks": ["N1"], "draw_key": "", "draw": [], "mark": []}')
    with pytest.raises(ValueError, match="does not hold clicks"):
        make(served, tmp_path)
    (tmp_path / "ledger.jsonl.clicks").write_text("{")
    with pytest.raises(ValueError, match="does not hold clicks"):
        make(served, tmp_path)


def test_a_click_is_paid_for_by_itself_also_where_an_older_copy_of_the_clicks_was_put_back(served, tmp_path):
    """By its place in the list, N4 and N6 were one click, and what N4 had spent was left out with the declared N6."""
    kept, clicks = tmp_path / "kept", tmp_path / "ledger.jsonl.clicks"
    phone = make(served, tmp_path, non_sensitive=("sport",))
    phone.record("N3", "sport")
    shutil.copy(clicks, kept)
    phone.record("N4")
    phone.attention()
    true = phone.spent()
    phone.close()
    shutil.copy(kept, clicks)
    phone = make(served, tmp_path, non_sensitive=("sport",))
    phone.record("N6", "sport")
    phone.attention()
    assert phone.spent() == true == pytest.approx(2.0, rel=1e-3)
    phone.close()


def test_payments_whose_clicks_are_gone_are_refused(served, tmp_path):
    """A ledger without the memory of it may be an older backup."""
    phone = make(served, tmp_path)
    phone.record("N3")
    phone.attention()
    phone.close()
    (tmp_path / "ledger.jsonl.clicks").unlink()
    with pytest.raises(BrokenLedger, match="gone from beside it"):
        make(served, tmp_path)


def test_a_click_recorded_while_an_answer_is_computed_is_kept(served, tmp_path, monkeypatch):
    """The answer wrote the clicks back as it had read them, without the new one."""
    phone = make(served, tmp_path)
    phone.record("N1")
    encode = phone._encode
    monkeypatch.setattr(phone, "_encode", lambda *given: (phone.record("N2"), encode(*given))[1])
    first = phone.attention()
    monkeypatch.setattr(phone, "_encode", encode)
    clicks = client.State.read(str(tmp_path / "ledger.jsonl.clicks")).clicks
    assert [news for news, _, _ in clicks] == ["N1", "N2"]
    assert not np.array_equal(phone.attention(), first), "the stored answer is that of one click"
    phone.close()


def test_bytes_on_the_wire_grow_with_the_basis_alone(served, tmp_path):
    """A query through a real socket: 2 + 4 B bytes, whatever the width of the user embedding."""
    phone = make(served, tmp_path)
    phone.record("N1")
    listener = socket.create_server(("127.0.0.1", 0))
    received = []

    def serve():
        connection, _ = listener.accept()
        with connection:
            while part := connection.recv(1 << 16):
                received.append(part)

    thread = threading.Thread(target=serve)
    thread.start()
    with socket.create_connection(listener.getsockname()) as connection:
        connection.sendall(phone.query())
    thread.join()
    listener.close()
    message = b"".join(received)
    assert len(message) == 2 + 4 * 3
    np.testing.assert_allclose(client.unpack_query(message), phone.attention(), atol=1e-6)
    assert [len(client.pack_query(np.ones(b))) for b in (3, 5, 50)] == [14, 22, 202]
    phone.close()


def test_a_bundle_that_cannot_be_written_whole_is_not_there(served, tmp_path, monkeypatch):
    from tfdp_rec.federated import serving

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        serving.export_client(*served[1:], tmp_path / "client", MECHANISM, history_length=5, tflite=False)
    assert not (tmp_path / "client").exists()


def test_no_random_state_is_exported(served):
    for path in served[0].rglob("*"):
        if path.is_file() and path.parent.name == "client":
            assert b"seed" not in path.read_bytes().lower() and b"Random" not in path.read_bytes(), path


def test_no_folder_of_this_machine_is_exported(served):
    assert not [n for n in of_this_machine(served[0]) for held in bytes_in(served[0]) if n.encode() in held]


def test_what_does_not_fit_is_refused(served, tmp_path):
    from tfdp_rec.federated import serving

    folder, model, catalogue = served
    for settings, name in (
        ({"budget_epsilon": 0.0}, "budget_epsilon"),
        ({"budget_delta": 1.0}, "budget_delta"),
        ({"runtime": "onnx"}, "runtime"),
        ({"budget_epsilon": 1.9}, "no click could ever be used"),
    ):
        with pytest.raises(ValueError, match=name):
            make(served, tmp_path, **settings)
    published = AttentionMechanism(3, 2.0, calibration=PublishedGaussian())
    with pytest.raises(ValueError, match="does not give"):
        serving.export_client(model, catalogue, tmp_path / "bundle", published)
    with pytest.raises(ValueError, match="num_basis"):
        serving.export_client(model, catalogue, tmp_path / "bundle", AttentionMechanism(4, 2.0))
    with pytest.raises(FileExistsError):
        serving.export_server(model, catalogue, folder / "server")
    phone = make(served, tmp_path)
    with pytest.raises(ValueError, match="news_id"):
        phone.record("")
    phone.close()
    for message in (b"", b"\x03\x00abc"):
        with pytest.raises(ValueError, match="not a query"):
            client.unpack_query(message)
    assert json.loads((folder / "client" / "bundle.json").read_text())["history_length"] == 5
