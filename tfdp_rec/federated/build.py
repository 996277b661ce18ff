"""Models, local updates and participants of federated news recommendation, put together from settings."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfdp_rec.core.ground.files import open_atomically
from tfdp_rec.datasets.mind import files as mind
from tfdp_rec.federated import local
from tfdp_rec.federated import participant as participants
from tfdp_rec.federated.cohort import Client, client_of
from tfdp_rec.federated.labels import LabelPermutation
from tfdp_rec.federated.mechanism import AttentionMechanism
from tfdp_rec.federated.settings import FederatedSettings, refuse_more_than
from tfdp_rec.federated.vector import ClippedVector, VectorMechanism
from tfdp_rec.models import news


def news_model(
    catalogue: mind.NewsCatalogue, encoder: str, dim: int, num_basis: int, temperature: float, seed: int
) -> news.NewsRecommender:
    """An untrained recommender, built."""
    keras.utils.set_random_seed(seed)
    model = news.NewsRecommender(
        _news_encoder(catalogue, encoder, dim), news.user_encoder(encoder, dim, 4, 16), num_basis,
        temperature=temperature,
    )  # fmt: skip
    few = {name: value[:2] for name, value in catalogue.features.items()}
    model({"news": few, "history": np.zeros((1, 2), "int32"), "candidates": np.zeros((1, 2), "int32")})
    return model


def _news_encoder(catalogue: mind.NewsCatalogue, encoder: str, dim: int) -> keras.layers.Layer:
    words, length = len(catalogue.vocabulary), catalogue.features["title"].shape[1]
    if encoder == "nrms":
        return news.NRMSEncoder(words, dim, dim, 4, 16, name="news_encoder")
    if encoder == "naml":
        sizes = len(catalogue.categories), len(catalogue.subcategories)
        return news.NAMLEncoder(words, *sizes, dim, dim, 8, 3, 16, name="news_encoder")
    return news.PLMEncoder(news.tiny_transformer(words, length, dim), dim, 16, name="news_encoder")


def local_update(
    method: str,
    model: news.NewsRecommender,
    catalogue: mind.NewsCatalogue,
    attention: AttentionMechanism,
    label_epsilon: float,
    *,
    negatives: int,
    history: int,
    samples: int,
    noise: ClippedVector | None = None,
) -> local.LocalUpdate:
    """What a client computes by a method: private, private+user, or gradient (DP-FedRec)."""
    if method == "gradient":
        attention, label_epsilon = dataclasses.replace(attention, epsilon=math.inf, padding=0.0), math.inf
    common = (model, catalogue, attention, LabelPermutation(label_epsilon, negatives), history, samples)
    if method == "gradient":
        if noise is None:
            raise ValueError("method gradient needs noise: the mechanism of the gradient.")
        return local.GradientUpdate(*common, noise=noise)
    return local.PrivateUpdate(*common, user_gradient=noise if method == "private+user" else None)


@functools.lru_cache(maxsize=2)  # the settings are a server's: no more models stay than two runs take
def world(settings: FederatedSettings) -> tuple[news.NewsRecommender, mind.NewsDataset]:
    """A run's model and data, once a process."""
    data = mind.read(settings.data, title_length=8, body_length=16)
    s = settings
    return news_model(data.catalogue, s.encoder, s.dim, s.num_basis, s.temperature, s.seed), data


@functools.lru_cache(maxsize=2)
def update(settings: FederatedSettings) -> local.LocalUpdate:
    """A run's local update, once a process."""
    s, (model, data) = settings, world(settings)
    attention = AttentionMechanism(s.num_basis, s.epsilon, s.delta, padding=s.padding, activation="relu")
    return local_update(
        s.method, model, data.catalogue, attention, s.label_epsilon, negatives=s.negatives, history=s.history,
        samples=s.samples, noise=VectorMechanism(s.l2_norm_clip, s.epsilon, s.delta),
    )  # fmt: skip


def participant(settings: FederatedSettings, node: Mapping[str, Any]) -> participants.Participant:
    """The participant of a node: the node's own data and terms, and the run's update."""
    terms, partition = participants.DeviceTerms.from_node(node), node["partition-id"]
    if not isinstance(partition, int) or partition < 0:
        raise ValueError(f"partition-id must be a whole number from 0, got {partition!r}: each user has one number.")
    if "data" not in node:
        raise ValueError("The node's configuration lacks data, the folder of its clicks: give --node-config it.")
    here = dataclasses.replace(settings, data=str(node["data"]))
    users = _users(here)
    refuse_more_than(len(users), partition + 1)
    person, client = users[partition]
    return participants.Participant(update(here), client, terms, settings.method, person=person)


@functools.lru_cache(maxsize=2)
def _users(settings: FederatedSettings) -> list[tuple[str, Client]]:
    return [(user, client_of(impressions)) for user, impressions in sorted(world(settings)[1].by_user().items())]


def write_initial(settings: FederatedSettings) -> FederatedSettings:
    """The settings, with a file of initial weights written if none was given."""
    # Keras draws initial weights from a state that all threads share, so that a server app's own would not repeat them.
    if settings.initial:
        return settings
    path = str(Path(settings.output).with_suffix(".initial.npz"))
    model, _ = world(settings)
    save(path, model, [np.array(variable) for variable in model.trainable_variables])
    return dataclasses.replace(settings, initial=path)


def load(path: str, model: keras.Model) -> list[np.ndarray]:
    """The trainable weights in a file, in the model's order."""
    stored = np.load(path)
    return [stored[name] for name in _names(model)]


def save(path: str, model: keras.Model, weights: list[np.ndarray]) -> None:
    """Writes trainable weights, whole or not at all."""
    with open_atomically(path, "wb") as file:
        np.savez(file, **dict(zip(_names(model), weights)))  # type: ignore[arg-type]


def _names(model: keras.Model) -> list[str]:
    """Of the trainable variables, without the model's own name, which differs from run to run."""
    return [variable.path.partition("/")[2] for variable in model.trainable_variables]
