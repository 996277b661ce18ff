"""The page's way from a published checkpoint to a client's gradients, run as it stands."""

import json
import pathlib
import re

import bert_files
import numpy as np
import pytest

from experiments.generated.news_readers import SyntheticNews
from tfdp_rec.core.mechanism.noise import words

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "federated.md").read_text(encoding="utf-8")
(BLOCK,) = (block for block in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "pretrained_bert" in block)
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "t", "c", *(f"##{sign}" for sign in "0123456789tcwsomn")]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """What the block leaves behind."""
    place = tmp_path_factory.mktemp("page")
    checkpoint = place / "bert-mini"
    longer = {"max_position_embeddings": 32, "vocab_size": len(PIECES)}
    named = bert_files.tensors()
    rng = np.random.default_rng(1)
    for name, rows in (("position", 32), ("word", len(PIECES))):
        named[f"embeddings.{name}_embeddings.weight"] = rng.normal(size=(rows, bert_files.WIDTH)).astype("float32")
    bert_files.save(checkpoint, bert_files.CONFIG | longer, named)
    (checkpoint / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True}))
    SyntheticNews(num_users=3, num_news=60, num_days=2).write(place / "MINDsmall_train")
    names: dict = {}
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(place)
        exec(compile(BLOCK, "docs/federated.md", "exec"), names)
    return names


def test_titles_are_the_checkpoints_pieces(ran):
    title = ran["data"].catalogue.features["title"]
    assert title.shape == (61, 30) and not title[0].any()
    assert (title[1:, 0] == PIECES.index("[CLS]")).all() and ((title[1:] == PIECES.index("[SEP]")).sum(1) == 1).all()
    assert PIECES.index("[UNK]") not in title


def test_the_last_layer_the_pooling_and_the_basis_get_gradients_and_nothing_frozen_does(ran):
    variables, gradients = ran["model"].trainable_variables, ran["gradients"]
    assert len(variables) == len(gradients)
    known = {id(v) for v in variables}
    backbone = ran["backbone"]
    frozen = [v for layer in ("embeddings", "layer_0", "layer_1") for v in backbone.get_layer(layer).variables]
    assert frozen and not any(id(v) in known for v in frozen)
    user = {id(v) for v in ran["model"].user_encoder.variables}
    trained = {v.path: g for v, g in zip(variables, gradients) if id(v) not in user}
    silent = {path for path, gradient in trained.items() if not gradient.any()}
    assert len(trained) == 16 + 3 + 2 + 1 and all("key/bias" in path for path in silent), silent
    assert all(not g.any() for v, g in zip(variables, gradients) if id(v) in user)


def test_the_gradient_is_the_slope_of_the_loss(ran):
    """Along the gradient of the last layer, at a fixed attention."""
    update, layer = ran["update"], ran["backbone"].get_layer("layer_2")
    draws = update.draw(ran["clients"][:1], words.seeded(2))
    attention = np.array([[0.1, 0.4, 0.2, 0.2, 0.1]], "float32")
    found = dict(zip((id(v) for v in update._public), update._after(attention, draws.samples, draws.counted)[0]))
    slopes = [np.asarray(found[id(v)]) for v in layer.trainable_variables]
    length = np.sqrt(sum((slope**2).sum() for slope in slopes))
    before, losses = layer.get_weights(), []
    for step in (0.01, -0.01):
        layer.set_weights([w + step / length * slope for w, slope in zip(before, slopes)])
        losses.append(float(update._after(attention, draws.samples, draws.counted)[1]))
    layer.set_weights(before)
    assert (losses[0] - losses[1]) / 0.02 == pytest.approx(length, rel=0.03)
