"""The local update: what a client computes from its clicks and sends.

Each form gives the gradients of a cohort's mean loss (a cohort of one is a client), in the order of
`model.trainable_variables`, zeros for what it does not train:

* `PrivateUpdate`, the corrected PrivateRec. The history ends in the private attention vector, which leaves the
  graph, gets its noise, and comes back as a constant; the gradients are a function of it and of the private
  samples. With `user_gradient` the user encoder gets a clipped and noised gradient of its own, whose budget is
  added.
* `PublishedUpdate`, as published: the gradient goes on through the noise into both encoders. No ε bounds
  what it reveals of the history. It is for readers whose clicks are public, on whom the encoders are prepared.
* `GradientUpdate`, DP-FedRec: the whole local gradient, clipped, plus noise; with infinite ε, plain
  federated learning.

Loss of a client: mean over its samples of -log softmax(scores)[label].

A client encodes the news that it needs, not the catalogue: the anonymous one, and one for every position of its history
and samples, empty positions and repetitions included. So what is computed, and how long it takes, depends on the
positions' number alone.

Reference:
    Liu et al., "PrivateRec", 2022, Algorithm 3; docs/privacy-privaterec.md, Theorem 4.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from tfdp_rec.core.claim.events import DpEvent, NonPrivateDpEvent
from tfdp_rec.core.mechanism.noise import words
from tfdp_rec.datasets.mind.files import NewsCatalogue
from tfdp_rec.federated import accounting
from tfdp_rec.federated.cohort import Client, Draws, draw
from tfdp_rec.federated.labels import LabelPermutation
from tfdp_rec.federated.mechanism import AttentionMechanism
from tfdp_rec.federated.vector import ClippedVector

Gradients = list[NDArray[np.float32]]
MOST_HISTORY, MOST_ENCODED = 1_000, 10_000
SLACK = 1.0 + 1e-6  # of norms, for their rounding


class LocalUpdate(abc.ABC):
    """A client's update of one model on today's public catalogue.

    Args:
        model: A model with the parts of `tfdp_rec.models.news.NewsRecommender`, built.
        catalogue: Today's news. Clicked news that it lacks count as the anonymous news.
        mechanism: Padding and noise of the attention vector.
        labels: Permutation of labels.
        history_length: Number of positions that every history is brought to.
        samples_per_client: Number of training clicks used of each client.

    Raises:
        ValueError: If the mechanism is not of the model's sizes, features hold ids that the model cannot read, or a
            client would encode too many news.
    """

    def __init__(
        self,
        model: Any,
        catalogue: NewsCatalogue,
        mechanism: AttentionMechanism,
        labels: LabelPermutation,
        history_length: int = 20,
        samples_per_client: int = 4,
    ) -> None:
        if mechanism.num_basis != model.num_basis or mechanism.clip_norm != model.clip_norm:
            raise ValueError(
                f"mechanism must have the model's num_basis and clip_norm {model.num_basis}, "
                f"{model.clip_norm}, got {mechanism.num_basis}, {mechanism.clip_norm}."
            )
        _refuse_unreadable(model, catalogue.features)
        _refuse_large(history_length, samples_per_client, labels.num_negatives)
        self.model, self.mechanism, self.labels, self.catalogue = model, mechanism, labels, catalogue
        # The anonymous news once more, behind the last: the row of what the catalogue lacks. 0 is an empty position.
        self._unknown = len(catalogue)
        self.features = {name: tf.concat([value, value[:1]], axis=0) for name, value in catalogue.features.items()}
        self.history_length, self.samples_per_client = history_length, samples_per_client

    def rows(self, ids: Sequence[str]) -> list[int]:
        """Today's rows of news, none of them 0: what the catalogue lacks is a second anonymous news."""
        return [row or self._unknown for row in self.catalogue.rows(ids)]

    def draw(self, clients: list[Client], source: words.WordSource = words.os_entropy) -> Draws:
        """What the clients draw for one update."""
        sizes = (self.history_length, self.samples_per_client)
        return draw(clients, self.rows, self.mechanism, self.labels, *sizes, source)

    @abc.abstractmethod
    def gradients(self, draws: Draws, source: words.WordSource = words.os_entropy) -> tuple[Gradients, float]:
        """The cohort's mean gradients and loss (the loss is for the client's own eyes)."""

    # What it costs.

    @abc.abstractmethod
    def round_events(self, client: Client) -> tuple[DpEvent, ...]:
        """The cost of one round for any click, but for the labels."""

    @property
    def label_event(self) -> DpEvent | None:
        """The cost of one label's draw for its click; None where the round's own events cover the labels."""
        return self.labels.event

    def settings(self) -> dict[str, Any]:
        """Mechanism and noise as plain values, for a ledger."""
        return {
            "update": type(self).__name__,
            "attention": self.mechanism.settings(),
            "label_epsilon": self.labels.epsilon,
            "negatives": self.labels.num_negatives,
        }

    def charge(self, client: Client, accountant: accounting.ClientAccountant, rounds: int = 1) -> None:
        """Record all that this client releases in so many updates, and the labels that it drew once and for all."""
        if rounds and client.label_epsilon:
            accountant.spend_labels(LabelPermutation(client.label_epsilon, self.labels.num_negatives).event)
        for event in self.round_events(client):
            accountant.spend_history(event, rounds)
        if client.spends_on_labels and self.label_event is not None:
            accountant.spend_labels(self.label_event, rounds)

    def _news_of(self, *rows: Any) -> tuple[tf.Tensor, tuple[Any, ...]]:
        """Vectors of the anonymous news and of those in the rows, and the rows' places among them; 0 stays 0."""
        # Nothing that occurs twice is left out: shapes and time must not depend on what was clicked. A smaller
        # catalogue, which the sizes alone decide, is encoded whole.
        wanted = tf.concat([[0], *(tf.reshape(each, (-1,)) for each in rows)], axis=0)
        if _count(self.features) <= wanted.shape[0]:
            return self.model.news_vectors(self.features), rows
        news = self.model.news_vectors({name: tf.gather(value, wanted) for name, value in self.features.items()})
        places, first = [], 1
        for each in rows:
            places.append(tf.where(tf.equal(each, 0), 0, tf.reshape(tf.range(tf.size(each)) + first, tf.shape(each))))
            first += tf.size(each)
        return news, tuple(places)

    def _client_losses(self, news: tf.Tensor, users: tf.Tensor, samples: Any, counted: Any) -> tf.Tensor:
        candidates = tf.gather(news, samples)
        losses = -tf.nn.log_softmax(tf.einsum("md,mskd->msk", users, candidates))[..., 0]
        return tf.reduce_sum(losses * counted, axis=1) / tf.maximum(tf.reduce_sum(counted, axis=1), 1.0)

    def _align(self, variables: list[Any], gradients: list[Any]) -> Gradients:
        """Gradients in the order of the model's trainable variables, zeros elsewhere."""
        known = {id(variable): gradient for variable, gradient in zip(variables, gradients)}
        return [
            np.asarray(_dense(known.get(id(variable)), variable), dtype=np.float32)
            for variable in self.model.trainable_variables
        ]


class PrivateUpdate(LocalUpdate):
    """PrivateRec's local update, corrected: the gradient stops at the noise.

    Args:
        *args, **kwargs: Arguments of `LocalUpdate`.
        user_gradient: Mechanism of the user encoder's own gradient; None trains no user encoder.
    """

    def __init__(self, *args: Any, user_gradient: ClippedVector | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.user_gradient = user_gradient
        model = self.model
        self._public = model.private_attention.trainable_variables + model.news_encoder.trainable_variables
        self._encode = tf.function(self._attention)
        self._after = tf.function(self._public_gradients)
        self._users = tf.function(self._user_gradients)

    def _attention(self, history: Any, padded: Any) -> tf.Tensor:
        news, (places,) = self._news_of(history)
        return self.model.encode_history(finite_news(news), places, padded)[0]

    def _public_gradients(self, attention: Any, samples: Any, counted: Any) -> tuple[list[Any], tf.Tensor]:
        """Sees the released attention and the private samples; nothing else of the clients."""
        variables = [v.value for v in self._public]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(variables)  # and no frozen layer of a text encoder
            # the samples' news in a call of their own: no gradient, rounding or NaN of the history's gets in here
            news, (places,) = self._news_of(samples)
            users = self.model.private_attention.reconstruct(attention)
            loss = tf.reduce_mean(self._client_losses(news, users, places, counted))
        return tape.gradient(loss, variables), loss

    def _user_gradients(self, history: Any, samples: Any, counted: Any) -> list[Any]:
        assert self.user_gradient is not None
        news, places = self._news_of(history, samples)
        news = tf.stop_gradient(news)

        def losses(rows: Any, sampled: Any, weights: Any) -> tf.Tensor:
            attention, _ = self.model.encode_history(news, rows)
            return self._client_losses(news, self.model.private_attention.reconstruct(attention), sampled, weights)

        variables = self.model.user_encoder.trainable_variables
        return clip_and_sum(losses, (*places, counted), variables, self.user_gradient)[0]

    def gradients(self, draws: Draws, source: words.WordSource = words.os_entropy) -> tuple[Gradients, float]:
        """As in `LocalUpdate`; basis vectors, candidate side of the news encoder, and what `user_gradient` adds."""
        clipped = self._encode(draws.history, draws.padded).numpy()
        attention = self.mechanism.finish(clipped, draws.noise).astype(np.float32)
        public, loss = self._after(attention, draws.samples, draws.counted)
        variables, gradients = list(self._public), list(public)
        if self.user_gradient is not None:
            sums = self._users(draws.history, draws.samples, draws.counted)
            variables += self.model.user_encoder.trainable_variables
            gradients += average_with_noise(self.user_gradient, sums, len(draws.history), source)
        return self._align(variables, gradients), float(loss)

    def round_events(self, client: Client) -> tuple[DpEvent, ...]:
        """One attention release, and the user gradient where there is one."""
        if not client.spends_on_history:
            return ()
        return (self.mechanism.event, *([self.user_gradient.event] if self.user_gradient is not None else []))

    def settings(self) -> dict[str, Any]:
        """As in `LocalUpdate`, with the noise of the user gradient."""
        return super().settings() | {"user_gradient": repr(self.user_gradient)}


class PublishedUpdate(LocalUpdate):
    """PrivateRec's local update as published: it protects no history, and is for readers whose clicks are public."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._through = tf.function(self._all_gradients)

    def _all_gradients(
        self, history: Any, padded: Any, noise: Any, samples: Any, counted: Any
    ) -> tuple[list[Any], tf.Tensor]:
        variables = [v.value for v in self.model.trainable_variables]
        with tf.GradientTape() as tape:
            news, (clicked, sampled) = self._news_of(history, samples)
            clipped, _ = self.model.encode_history(news, clicked, padded)
            attention = _normalise(clipped + noise, self.mechanism.activation)
            users = self.model.private_attention.reconstruct(attention)
            loss = tf.reduce_mean(self._client_losses(news, users, sampled, counted))
        return tape.gradient(loss, variables), loss

    def gradients(self, draws: Draws, source: words.WordSource = words.os_entropy) -> tuple[Gradients, float]:
        """As in `LocalUpdate`, through the noise into every variable."""
        noise = draws.noise.astype(np.float32)
        found, loss = self._through(draws.history, draws.padded, noise, draws.samples, draws.counted)
        return self._align(self.model.trainable_variables, list(found)), float(loss)

    def round_events(self, client: Client) -> tuple[DpEvent, ...]:
        """Unbounded: the gradient shows the raw history."""
        return (NonPrivateDpEvent(),) if client.spends_on_history else ()


class GradientUpdate(LocalUpdate):
    """DP-FedRec: the whole local gradient of the undecomposed model, clipped and noised.

    Args:
        *args, **kwargs: Arguments of `LocalUpdate`.
        noise: Mechanism of the gradient; infinite ε is plain federated learning.
    """

    def __init__(self, *args: Any, noise: ClippedVector, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.noise = noise
        self._singly = tf.function(self._sum_clipped)
        self._jointly = tf.function(self._plain)

    def _loss(self, history: Any, samples: Any, counted: Any) -> tf.Tensor:
        news, (clicked, sampled) = self._news_of(history, samples)
        _, users = self.model.encode_history(news, clicked)
        return self._client_losses(news, users, sampled, counted)

    def _plain(self, history: Any, samples: Any, counted: Any) -> tuple[list[Any], tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self._loss(history, samples, counted))
        return tape.gradient(loss, [v.value for v in self.model.trainable_variables]), loss

    def _sum_clipped(self, history: Any, samples: Any, counted: Any) -> tuple[list[Any], Any]:
        return clip_and_sum(self._loss, (history, samples, counted), self.model.trainable_variables, self.noise)

    def gradients(self, draws: Draws, source: words.WordSource = words.os_entropy) -> tuple[Gradients, float]:
        """As in `LocalUpdate`; the basis vectors are not used and get zeros (plus noise, as all do)."""
        data = (draws.history, draws.samples, draws.counted)
        if self.noise.noiseless:
            found, loss = self._jointly(*data)
            return self._align(self.model.trainable_variables, list(found)), float(loss)
        sums, loss = self._singly(*data)
        return average_with_noise(self.noise, sums, len(draws.history), source), float(loss)

    label_event = None

    def round_events(self, client: Client) -> tuple[DpEvent, ...]:
        """One gradient, which covers a click of the history and a training click alike."""
        return (self.noise.event,) if client.spends_on_history or client.spends_on_labels else ()

    def settings(self) -> dict[str, Any]:
        """As in `LocalUpdate`, with the noise of the gradient."""
        return super().settings() | {"gradient": repr(self.noise)}


def finite_news(vectors: tf.Tensor) -> tf.Tensor:
    """News vectors, with those that are not finite as the anonymous news (row 0), and that as zeros if it is none."""
    # What a model makes of one news must not decide whether the clients that clicked it answer.
    whole = tf.reduce_all(tf.math.is_finite(vectors), axis=-1, keepdims=True)
    anonymous = tf.where(whole[:1], vectors[:1], tf.zeros_like(vectors[:1]))
    return tf.where(whole, vectors, anonymous)


def clip_and_sum(
    losses_of: Callable[..., tf.Tensor], clients: tuple[Any, ...], variables: list[Any], noise: ClippedVector
) -> tuple[list[Any], Any]:
    """Sum over clients of each one's gradient scaled to norm at most C, on the noise's grid; 0 if it is not finite."""
    values = [variable.value for variable in variables]
    totals, loss = [tf.zeros_like(value, tf.float64) for value in values], 0.0
    for index in tf.range(tf.shape(clients[0])[0]):
        with tf.GradientTape() as tape:
            client_loss = losses_of(*[tf.gather(value, [index]) for value in clients])[0]
        found = [_dense(g, v) for g, v in zip(tape.gradient(client_loss, values), values)]
        # In float64: in float32 the squares of the small gradients that a server's weights can make would vanish from
        # the norm, and the weights of large ones be rounded up.
        wide = [tf.cast(g, tf.float64) for g in found]
        norm = _norm(wide, noise.order)
        weight = tf.minimum(tf.constant(1.0, tf.float64), noise.clip / (norm * SLACK + 1e-300))
        clipped = [_on_grid(tf.where(tf.math.is_finite(norm), weight * g, 0.0), noise.grid) for g in wide]
        totals = [total + g for total, g in zip(totals, clipped)]
        loss += client_loss
    return totals, loss / tf.cast(tf.shape(clients[0])[0], tf.float32)


def average_with_noise(
    noise: ClippedVector, sums: list[Any], count: int, source: words.WordSource = words.os_entropy
) -> Gradients:
    """The mean of `count` clients' clipped gradients, each with its own noise."""
    # All of the division and of the rounding to float32 comes after data and noise have met.
    return [((np.asarray(g) + noise.sum_noise(count, tuple(g.shape), source)) / count).astype(np.float32) for g in sums]


def _on_grid(values: tf.Tensor, grid: float) -> tf.Tensor:
    """float64 values rounded towards zero, so that no norm grows."""
    return tf.sign(values) * tf.floor(tf.abs(values) / grid) * grid if grid else values


def _count(features: dict[str, Any]) -> int:
    return int(next(iter(features.values())).shape[0])


def _refuse_large(history: int, samples: int, negatives: int) -> None:
    """What a server asks for is refused before anything is paid, or takes a device's memory."""
    if history < 1 or samples < 1:
        raise ValueError(f"history and samples must be at least 1, got {history} and {samples}.")
    encoded = history + samples * (1 + negatives)
    if history > MOST_HISTORY or encoded > MOST_ENCODED:
        raise ValueError(
            f"A client encodes at most {MOST_ENCODED:,} news and {MOST_HISTORY:,} of its history, and history = "
            f"{history}, samples = {samples}, negatives = {negatives} ask for {encoded:,}. Ask for less."
        )


def _refuse_unreadable(model: Any, features: dict[str, NDArray[np.int32]]) -> None:
    """Refuses news that the model cannot read: only the clients that clicked them would fail."""
    if len({len(value) for value in features.values()}) > 1:
        raise ValueError("The features must have one row for each news, all of them as many.")
    extremes = {
        name: np.stack([np.full_like(value[0], bound) for bound in (value.min(), value.max())])
        for name, value in features.items()
    }
    try:
        model.news_vectors(extremes)
    except tf.errors.InvalidArgumentError as problem:
        raise ValueError(
            "The features hold ids that the model's news encoder has no row for: make both from one vocabulary."
        ) from problem


def _norm(gradients: list[Any], order: int) -> tf.Tensor:
    if order == 1:
        return tf.add_n([tf.reduce_sum(tf.abs(g)) for g in gradients])
    return tf.linalg.global_norm(gradients)


def _normalise(noisy: tf.Tensor, activation: str) -> tf.Tensor:
    """The same as `mechanism.normalise`, differentiable."""
    positive = tf.nn.relu(noisy) if activation == "relu" else tf.nn.softplus(noisy)
    total = tf.reduce_sum(positive, axis=-1, keepdims=True)
    uniform = tf.ones_like(positive) / tf.cast(tf.shape(positive)[-1], positive.dtype)
    return tf.where(total > 0, tf.math.divide_no_nan(positive, total), uniform)


def _dense(gradient: Any, variable: Any) -> Any:
    if gradient is None:
        return tf.zeros(variable.shape)
    return tf.convert_to_tensor(gradient)
