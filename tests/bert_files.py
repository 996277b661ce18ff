"""A small checkpoint with random weights, in the very format that BERT's are published in."""

import json
import struct

import numpy as np

VOCABULARY, WIDTH, LAYERS, HEADS, INNER, PLACES, LENGTH = 30, 8, 3, 2, 12, 10, 6
CONFIG = {
    "model_type": "bert", "architectures": ["BertModel"], "vocab_size": VOCABULARY, "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": INNER,
    "max_position_embeddings": PLACES, "type_vocab_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-3,
    "position_embedding_type": "absolute", "pad_token_id": 0, "attention_probs_dropout_prob": 0.1,
}  # fmt: skip


def shapes():
    """Names and shapes as BERT's checkpoints have them: kernels [outputs, inputs]."""
    embeddings = {"word": VOCABULARY, "position": PLACES, "token_type": 2}
    found = {f"embeddings.{kind}_embeddings.weight": (rows, WIDTH) for kind, rows in embeddings.items()}
    linear = {f"attention.self.{part}": (WIDTH, WIDTH) for part in ("query", "key", "value")}
    linear |= {"attention.output.dense": (WIDTH, WIDTH)}
    linear |= {"intermediate.dense": (INNER, WIDTH), "output.dense": (WIDTH, INNER)}
    norms = ["embeddings.LayerNorm"]
    for layer in (f"encoder.layer.{index}" for index in range(LAYERS)):
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
        for name, shape in linear.items():
            found |= {f"{layer}.{name}.weight": shape, f"{layer}.{name}.bias": shape[:1]}
    return found | {f"{norm}.{part}": (WIDTH,) for norm in norms for part in ("weight", "bias")}


def tensors(seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, 0.7, shape).astype("float32") for name, shape in shapes().items()}


def stored(values, kind):
    if kind == "BF16":
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return values.astype({"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8"}[kind]).tobytes()


def written(named, kind="F32"):
    """The bytes of a file; a header, padded with spaces as published ones are, then the tensors."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, values in named.items():
        raw = stored(values, kind)
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def save(folder, config=CONFIG, named=None, kind="F32"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(written(tensors() if named is None else named, kind))
    return folder
