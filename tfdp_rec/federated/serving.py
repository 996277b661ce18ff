"""Exporting a trained recommender for private serving: one folder for the server, one for every client.

    server/                 SavedModel with two signatures
        rank                attention [Q, B], candidates [Q, C] -> news ids and scores, best first
        top                 attention [Q, B], k -> the same over the whole catalogue
    client/
        attention.pb        a graph: vectors [1, H, d], mask [1, H] -> attention [1, B]; its weights are constants
        client.tflite       the same, where TensorFlow Lite can convert it
        news.npz            ids and vectors of the news; row 0 is the anonymous news
        bundle.json         the mechanism's settings, history length, a name for the model

Neither folder holds a random state: noise is drawn by the client outside the graph. Nor does the bundle say which news
are of which category: a click's category is what the phone showed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from tfdp_rec.datasets.mind.files import NewsCatalogue
from tfdp_rec.federated import graphs
from tfdp_rec.federated.client import FORMAT
from tfdp_rec.federated.mechanism import AttentionMechanism


def export_server(model: Any, catalogue: NewsCatalogue, folder: str | Path) -> None:
    """Write the server's SavedModel.

    Args:
        model: A trained `NewsRecommender`.
        catalogue: The news to rank; their vectors are computed once, here.
        folder: Folder to write.

    Raises:
        FileExistsError: If the folder is there already.
    """
    _refuse_existing(folder)
    server = _Server(
        model.catalogue_vectors(catalogue.features), np.array(model.private_attention.basis), catalogue.ids
    )
    signatures = {"rank": server.rank, "top": server.top}
    tf.saved_model.save(server, str(folder), signatures=signatures)


def export_client(
    model: Any,
    catalogue: NewsCatalogue,
    folder: str | Path,
    mechanism: AttentionMechanism,
    history_length: int = 20,
    tflite: bool = True,
) -> None:
    """Write the clients' bundle.

    Args:
        model: A trained `NewsRecommender`.
        catalogue: The news a client may click.
        folder: Folder to write.
        mechanism: Mechanism of every client; its guarantee must hold.
        history_length: Number of clicks that a client looks back.
        tflite: Whether to make client.tflite too.

    Raises:
        ValueError: If the mechanism does not fit the model or has no guarantee, or a phone would not run the graph.
        FileExistsError: If the folder is there already.
        RuntimeError: If TensorFlow Lite cannot convert the user encoder; pass tflite=False then.
    """
    mechanism.guarantee()
    if mechanism.num_basis != model.num_basis or mechanism.clip_norm != model.clip_norm:
        raise ValueError("mechanism must have the model's num_basis and clip_norm.")
    _refuse_existing(folder)
    vectors = model.catalogue_vectors(catalogue.features)
    sizes = (history_length, vectors.shape[1], mechanism.num_basis)
    attention = _attention(model, *sizes[:2])
    files = {"attention.pb": attention.graph.as_graph_def().SerializeToString()}
    graphs.encoder(files["attention.pb"], *sizes)
    if tflite:
        files["client.tflite"] = _convert(attention)
        graphs.lite_encoder(files["client.tflite"], *sizes)
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(w).tobytes() for w in model.get_weights()))
    about = {"mechanism": mechanism.settings(), "history_length": history_length, "model": digest.hexdigest()[:16]}
    files["bundle.json"] = json.dumps({"format": FORMAT, **about}, indent=1).encode()
    # Nothing is written before a phone would run the graphs, and nothing stays of what could not be written whole.
    path = Path(folder)
    path.mkdir(parents=True)
    try:
        np.savez(path / "news.npz", ids=np.array(catalogue.ids), vectors=vectors)
        for name, content in files.items():
            (path / name).write_bytes(content)
    except BaseException:
        shutil.rmtree(path)
        raise


def _attention(model: Any, length: int, width: int) -> Any:
    """The user encoder and the attention as a concrete function that holds its weights as constants."""
    layers = [
        (layer, [v.numpy() for v in layer.trainable_variables], [v.numpy() for v in layer.non_trainable_variables])
        for layer in (model.user_encoder, model.private_attention)
    ]
    signature = [tf.TensorSpec((1, length, width), tf.float32, "vectors"), tf.TensorSpec((1, length), tf.bool, "mask")]

    @tf.function(input_signature=signature, autograph=False)
    def attention(vectors: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
        value, more = vectors, {"mask": mask}
        for layer, *weights in layers:
            value, _ = layer.stateless_call(*([tf.constant(w) for w in part] for part in weights), value, **more)
            more = {}
        return tf.identity(value, name="attention")

    return attention.get_concrete_function()


def _convert(attention: Any) -> bytes:
    try:
        converted: bytes = tf.lite.TFLiteConverter.from_concrete_functions([attention]).convert()
    except Exception as error:
        raise RuntimeError(
            f"TensorFlow Lite cannot convert this user encoder ({type(error).__name__}); "
            "export with tflite=False and run the graph."
        ) from error
    return converted


class _Server(tf.Module):
    def __init__(self, vectors: NDArray[np.float32], basis: NDArray[np.float32], ids: tuple[str, ...]) -> None:
        super().__init__()
        self.vectors, self.basis = tf.constant(vectors), tf.constant(basis)
        self.ids = tf.Variable(list(ids), trainable=False, dtype=tf.string)

    @tf.function(
        input_signature=[
            tf.TensorSpec((None, None), tf.float32, "attention"),
            tf.TensorSpec((None, None), tf.int32, "candidates"),
        ]
    )
    def rank(self, attention: tf.Tensor, candidates: tf.Tensor) -> dict[str, tf.Tensor]:
        users = tf.matmul(attention, self.basis)
        scores = tf.einsum("qd,qcd->qc", users, tf.gather(self.vectors, candidates))
        order = tf.argsort(scores, direction="DESCENDING", stable=True)
        rows = tf.gather(candidates, order, batch_dims=1)
        return {"news": tf.gather(self.ids, rows), "scores": tf.gather(scores, order, batch_dims=1)}

    @tf.function(
        input_signature=[tf.TensorSpec((None, None), tf.float32, "attention"), tf.TensorSpec((), tf.int32, "k")]
    )
    def top(self, attention: tf.Tensor, k: tf.Tensor) -> dict[str, tf.Tensor]:
        scores = tf.matmul(tf.matmul(attention, self.basis), self.vectors[1:], transpose_b=True)
        best, rows = tf.math.top_k(scores, k)
        return {"news": tf.gather(self.ids, rows + 1), "scores": best}


def _refuse_existing(folder: str | Path) -> None:
    if Path(folder).exists():
        raise FileExistsError(f"{folder} exists already; choose a new folder.")
