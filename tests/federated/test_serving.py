"""Serving: bundles, the client's ledger, memoised draws, the budget, and bytes on the wire."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest

from tfdp_rec.federated import AttentionMechanism, PublishedGaussian, client, ledger
from tfdp_rec.noise import words

MECHANISM = AttentionMechanism(3, 2.0, 1e-5, padding=0.2)


@pytest.fixture(scope="module")
def served(world, tmp_path_factory):
    from tfdp_rec.datasets.mind.files import NewsCatalogue
    from tfdp_rec.federated import serving

    folder = tmp_path_factory.mktemp("served")
    ids = ("", *(f"N{i}" for i in range(1, 13)))
    features = world.features | {"subcategory": world.features["category"], "body": world.features["title"]}
    catalogue = NewsCatalogue(ids, features, (), ("", "politics", "sport"), ("", "a", "b"))
    model = world.model()
    serving.export_server(model, catalogue, folder / "server")
    serving.export_client(model, catalogue, folder / "client", MECHANISM, history_length=5)
    return folder, model, catalogue


def make(served, tmp_path, **settings):
    settings = {"budget_epsilon": 20.0, "source": words.seeded(4)} | settings
    return client.PrivateClient(served[0] / "client", tmp_path / "ledger.json", **settings)


@pytest.mark.parametrize("runtime", ("saved_model", "tflite"))
def test_the_exported_graphs_give_the_models_attention(served, world, runtime):
    folder, model, _ = served
    vectors = np.array(model.news_vectors(world.features))
    history = np.array([[3, 7, 1, 0, 0]], dtype="int32")
    expected, _ = model.encode_history(vectors, history)
    encode = client._encoder(folder / "client", runtime)
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
    phone, seen = make(served, tmp_path, source=words.os_entropy), []
    encode, anonymous = phone._encode, phone._vectors[0]
    monkeypatch.setattr(phone, "_encode", lambda vectors, mask: (seen.append(vectors[0]), encode(vectors, mask))[1])
    monkeypatch.setattr(phone, "mechanism", dataclasses.replace(MECHANISM, padding=0.5))
    monkeypatch.setattr(phone, "_spend", lambda state: None)  # 65 compositions take a minute
    for _ in range(65):
        phone.record("N3")
        phone.attention()
    padded = np.array([[np.array_equal(row, anonymous) for row in vectors] for vectors in seen[5:]])
    assert len(np.unique(padded, axis=0)) > 5
    # 60 answers of 5 positions; all alike would be 0 or 60 in every column
    assert ((padded.sum(0) > 5) & (padded.sum(0) < 55)).all()
    phone.close()


def test_a_query_beyond_the_budget_is_refused_and_leaves_the_ledger_as_it_was(served, tmp_path):
    phone = make(served, tmp_path, budget_epsilon=2.5)
    phone.record("N1")
    kept = phone.attention()
    phone.record("N2")
    before = (tmp_path / "ledger.json").read_bytes()
    for _ in range(2):
        with pytest.raises(client.BudgetSpent, match="budget of 2.5"):
            phone.attention()
    assert (tmp_path / "ledger.json").read_bytes() == before
    assert phone.spent() == pytest.approx(2.0, rel=1e-3) and kept.shape == (3,)
    phone.close()


def test_declared_categories_are_free_and_exact(served, world, tmp_path):
    phone = make(served, tmp_path, non_sensitive=("politics",))
    phone.record("N1")
    model = served[1]
    vectors = np.array(model.news_vectors(world.features))
    exact = np.array(model.encode_history(vectors, np.array([[1, 0, 0, 0, 0]], "int32"))[0])[0]
    np.testing.assert_allclose(phone.attention(), MECHANISM.finish(exact, np.zeros(3)), atol=1e-5)
    assert phone.spent() == 0.0
    phone.record("N9")
    phone.attention()
    assert phone.spent() == pytest.approx(2.0, rel=1e-3)
    phone.close()


def test_the_ledger_is_on_disk_before_the_answer_leaves(served, tmp_path, monkeypatch):
    phone = make(served, tmp_path)
    phone.record("N1")
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError("power cut")))
    with pytest.raises(OSError, match="power cut"):
        phone.attention()
    monkeypatch.undo()
    assert phone.spent() == 0.0, "no answer left, so nothing is spent"
    phone.close()


def test_a_ledger_killed_at_any_moment_is_the_old_or_the_new_one(tmp_path):
    path = tmp_path / "ledger.json"
    program = (
        "import sys; from tfdp_rec.federated.ledger import Ledger, State\n"
        "ledger = Ledger(sys.argv[1]); n = 0\n"
        "while True:\n    n += 1; ledger.save(State(clicks=['N1'] * (n % 400)))\n    print(n, flush=True)"
    )
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE)
        for _ in range(20):
            process.stdout.readline()
        process.kill()
        process.wait()
        process.stdout.close()
        with ledger.Ledger(path) as opened:
            assert set(opened.load().clicks) <= {"N1"}


def test_a_second_process_is_kept_out_and_a_broken_ledger_refused(tmp_path):
    path = tmp_path / "ledger.json"
    with ledger.Ledger(path), pytest.raises(BlockingIOError):
        ledger.Ledger(path)
    for broken in ("{", "[]", '{"format": 9}', '{"format": 1, "clocks": []}'):
        path.write_text(broken)
        with pytest.raises(ValueError, match="not a readable ledger"):
            ledger.Ledger(path)


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


def test_no_random_state_is_exported(served):
    for path in served[0].rglob("*"):
        if path.is_file():
            assert b"seed" not in path.read_bytes().lower() or path.suffix == ".pb", path
    import tensorflow as tf

    graph = tf.saved_model.load(str(served[0] / "client" / "saved_model")).signatures["attention"].graph
    assert not [op for op in graph.get_operations() if "Random" in op.type]


def test_what_does_not_fit_is_refused(served, tmp_path):
    from tfdp_rec.federated import serving

    folder, model, catalogue = served
    for settings, name in (
        ({"budget_epsilon": 0.0}, "budget_epsilon"),
        ({"budget_delta": 1.0}, "budget_delta"),
        ({"non_sensitive": ("sprot",)}, "sprot"),
        ({"runtime": "onnx"}, "runtime"),
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
    for bad in ("", "N99"):
        with pytest.raises(ValueError, match="news_id"):
            phone.record(bad)
    phone.close()
    for message in (b"", b"\x03\x00abc"):
        with pytest.raises(ValueError, match="not a query"):
            client.unpack_query(message)
    assert json.loads((folder / "client" / "bundle.json").read_text())["history_length"] == 5
