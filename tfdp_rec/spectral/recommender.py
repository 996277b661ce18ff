"""Recommendations from two sums over users, each released once: counts of items, and counts of pairs of items.

    histories -> DP counts -> head: the items whose rows stand out of the noise -> DP Gram matrix of the head
              -> denoised -> ridge regression: scores = βμ + history · B - o

Nothing is trained. The private part is `counting.py`, by `sums/counts.py` and `pair_sums.py`, which bound what one user
gives, and `sums/fixed_point.py`, which adds the noise; everything after that is arithmetic on releases (`scores.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zipfile
from collections.abc import Iterable, Sequence, Sized
from typing import IO, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tfdp_rec.core.claim.composition import epsilon_of
from tfdp_rec.core.claim.entries import Use, id_of_use
from tfdp_rec.core.claim.events import ComposedDpEvent, DpEvent, GaussianDpEvent, NonPrivateDpEvent
from tfdp_rec.core.claim.gaussian_release import noise_of_one_release
from tfdp_rec.core.claim.statement import Statement, round_up
from tfdp_rec.core.ground.files import Path, open_atomically
from tfdp_rec.core.mechanism.noise.words import WordSource, os_entropy
from tfdp_rec.datasets.log import Catalogue, log_of
from tfdp_rec.spectral import order, rules
from tfdp_rec.spectral.counting import Counting
from tfdp_rec.spectral.features import arrays_of, item_vectors, vectors_of
from tfdp_rec.spectral.pair_sums import WINDOW
from tfdp_rec.spectral.release import Release
from tfdp_rec.spectral.scores import Estimates, Scores
from tfdp_rec.sums.fixed_point import check_noise

_PAIRS = {False: "of any two items of a user", True: f"at most {WINDOW} places apart in a user's order"}
_COMPUTED = tuple(field.name for field in dataclasses.fields(Estimates))  # from the release
_KEPT = ("delta", "noise_multiplier", "recency", "num_users", "users_private", "_private")


class SpectralRecommender:
    """A private recommender in seconds: DP counts, one DP Gram matrix, and a ridge regression on them.

    The privacy unit is a user with their whole history, however long. The number of users is public, unless
    `users_private` says otherwise. What answers, states or saves raises `RuntimeError` before `fit`.

    Args:
        item_ids: Raw ids of the public catalogue.
        epsilon: ε of the whole; or give `noise_multiplier`.
        delta: δ of the whole.
        noise_multiplier: σ of the one Gaussian that the whole costs; or give `epsilon`.
        head: Number of items with a row in the matrix; by default the rule of `tfdp_rec.spectral.rules`. "wide" for
            its wide one, of any pairs: larger where the noisy counts show that histories are long and the usual head
            holds little of them. It costs nothing, and gains on some data and loses on others (docs/spectral.md).
        features: Public features of each item of `item_ids`, such as `["Comedy", "1995"]`, of any hashable kind; an
            empty list for an item without. They are part of scores, and cost no ε (`tfdp_rec.spectral.features`).
        ordered: Whether histories are in order of time, the oldest item first, and the next item is to be predicted:
            then pairs are counted that are near each other in a history, the nearer the more. None decides it by a
            private vote of the users, within the same budget (`tfdp_rec.spectral.order`); a further fit keeps to
            what the first one decided.
        recency: g, the exponent of the weight (1 + j)⁻ᵍ of an item that j others follow; by default 1 for ordered
            histories, ½ if the vote leaves that in doubt, and 0 for others.
        users_private: Whether the number of users is private, too: then it is counted with noise, for a hundredth of
            the budget.
        before: Sum of the releases of earlier fits, of the items with which this catalogue begins; the release of
            `fit` is added to it.
        words: Source of random bits, for tests; the operating system's by default.

    Raises:
        TypeError: Both or neither of `epsilon` and `noise_multiplier` are given.
        ValueError: An argument is out of range.

    Example:
        >>> histories = [[10, 20]] * 200 + [[30, 40]] * 200 + [[10, 20, 30], []]
        >>> recommender = SpectralRecommender([10, 20, 30, 40], epsilon=8.0, delta=1e-4)
        >>> ids, scores = recommender.fit(histories, verbose=0).recommend([[10], [40]], k=1)
        >>> ids.tolist(), round(recommender.epsilon, 2)
        ([[20], [30]], 8.0)
    """

    def __init__(
        self,
        item_ids: ArrayLike,
        epsilon: float | None = None,
        delta: float = 1e-6,
        noise_multiplier: float | None = None,
        head: rules.Size = None,
        features: Sequence[Iterable[Any]] | None = None,
        ordered: bool | None = False,
        recency: float | None = None,
        users_private: bool = False,
        before: Release | None = None,
        words: WordSource = os_entropy,
    ):
        if (epsilon is None) == (noise_multiplier is None):
            raise TypeError("Give SpectralRecommender either epsilon= or noise_multiplier=: each decides the other.")
        self.catalogue = Catalogue(item_ids)
        if head == "wide" and ordered:
            raise ValueError('head="wide" is of any pairs, and near pairs were asked for: give head=None.')
        is_number = isinstance(head, (int, np.integer)) and 2 <= head <= len(self.catalogue)
        if head not in (None, "wide") and not is_number:
            raise ValueError(f'head must be between 2 and the {len(self.catalogue)} items, or "wide", got {head!r}.')
        if not 0 < delta < 1:
            raise ValueError(f"delta must be between 0 and 1, got {delta!r}.")
        if recency is not None and not 0 <= recency < math.inf:
            raise ValueError(f"recency must be at least 0, got {recency!r}.")
        self.delta, self.users_private, self._recency = float(delta), bool(users_private), recency
        self._vectors = None if features is None else item_vectors(features, len(self.catalogue))
        given = noise_multiplier if epsilon is None else noise_of_one_release(epsilon, delta)
        self.noise_multiplier = check_noise(given or 0.0)
        self._size: rules.Size = int(head) if isinstance(head, np.integer) else head
        self._words, self._begun, self._loaded = words, False, False
        self._before = before or Release()
        if ordered is None and self._before.fits:
            ordered = self._before.ordered
        self.ordered: bool | None = ordered  # None until `fit` has decided
        self.vote = order.OrderVote.of(self._before)
        if self._before.fits and self._before.ordered != ordered:
            raise ValueError(
                f"The earlier release counted pairs {_PAIRS[self._before.ordered]}, and this one would count pairs "
                f"{_PAIRS[bool(ordered)]}: give ordered={self._before.ordered}, or no earlier release."
            )
        self._private = words is os_entropy and self._before.private

    # What it costs.

    @property
    def event(self) -> DpEvent:
        """Event of `fit`, for `Accountant.spend`; without a guarantee if a test supplied the noise."""
        if self._loaded:
            self._refuse_of_run()
        return GaussianDpEvent(self.noise_multiplier) if self._private else NonPrivateDpEvent()

    @property
    def epsilon(self) -> float:
        """ε at δ of `fit` alone, by dp_accounting; infinite where a test supplied the noise."""
        return epsilon_of(self.event, self.delta)

    @property
    def uses(self) -> list[Use]:
        """The fits in its sums, for `PrivatePlan(spent=)`.

        Raises:
            RuntimeError: Nothing was released yet.
            ValueError: The sums are of a run, whose ledger knows the whole cost.
        """
        self._check_fitted()
        made = self.released
        self._refuse_of_run()
        if len(made.multipliers) != made.fits or not np.isfinite(made.multipliers).all():
            raise ValueError("Some of these sums do not tell their cost: give it as tfdp_rec.privacy.Use, spent=[...].")
        fits = zip(made.multipliers.tolist(), made.names.tolist(), strict=True)
        kind = GaussianDpEvent if made.private else lambda noise: NonPrivateDpEvent()
        several = [(kind(noise), f"private sums {name}") for noise, name in fits]
        return [Use(*each, id_of_use(*each)) for each in several]

    def _refuse_of_run(self) -> None:
        if self.released.of_run:
            raise ValueError(
                "These sums are a run's, which may have found its items privately, too: what all of it has cost is in "
                "its ledger.jsonl and statement.txt. Give that, spent=[tfdp_rec.privacy.Use(paid.whole, paid.label, "
                "f'{paid.id} {paid.number}') for paid in tfdp_rec.core.claim.ledger.read(path).paid]."
            )

    def statement(self) -> Statement:
        """The guarantee in words.

        Raises:
            RuntimeError: Nothing was released yet.
            ValueError: The sums are of a run, whose ledger and statement know the whole cost.
        """
        self._check_fitted()
        self._refuse_of_run()
        if math.isinf(self.epsilon):
            return Statement({"Guarantee": "none: the noise was supplied by a test, and can be subtracted"})
        spent = epsilon_of(ComposedDpEvent([event for event, _ in self.uses]), self.delta)  # of all fits in its sums
        return Statement({
            "Guarantee": f"(epsilon = {round_up(spent):g}, delta = {self.delta:g})-differential privacy",
            "Protected unit": "one user, with all of their history",
            "Adjacency": "zero-out: data sets that differ by one user, which contributes nothing in one of them",
            "Mechanism": f"{self.counted_users}counts of all items with Gaussian noise of multiplier "
            f"{self.split.counts:.4g}; pairs of the {len(self.released.head)} items that these put first, of "
            f"multiplier {self.split.gram:.4g}; together no more than one Gaussian of multiplier "
            f"{self.noise_multiplier:.4g}",
            "Pairs": self.pairs_words,
            "Public": ("" if self.users_private else f"the number of users, {self.num_users}, and ")
            + f"the catalogue of {len(self.catalogue)} items"
            + (", with their features" if self.has_features else ""),
            "Covers": "everything that this recommender holds, answers or exports"
            + (f", with the {self.released.fits - 1} earlier fits in its sums" if self.released.fits > 1 else ""),
            "Does not cover": "another fit on the same users, which costs as much again; users whose history comes in "
            "more than one piece; an observer of the memory of the counting",
        })  # fmt: skip

    @property
    def counted_users(self) -> str:
        """The mechanism that counts users, in words; empty where their number is public."""
        noise = self.noise_multiplier / rules.USERS**0.5
        return f"the number of users with Gaussian noise of multiplier {noise:.4g}; " if self.users_private else ""

    @property
    def pairs_words(self) -> str:
        """Which pairs were counted, and what the choice cost, in words."""
        said = _PAIRS[bool(self.ordered)]
        return said if self.vote is None else f"{said}, {self.vote}"

    @property
    def recency(self) -> float:
        """g, the exponent of the weights of a history; nothing is known of it before a vote."""
        usual = float(bool(self.ordered)) if self.vote is None else self.vote.recency
        return usual if self._recency is None else float(self._recency)

    # Fitting.

    def fit(self, histories: Any, verbose: int = 1) -> SpectralRecommender:
        """Reads the users twice, releases counts and pairs, and computes the rest from these. Once only.

        Args:
            histories: Raw ids of each user, every user once: `tfdp_rec.spectral.Histories` (flat arrays, also mapped
                files), `Timelines`, or an iterable over users that can be iterated twice. Ids outside the catalogue
                do not count, and repeats count once, in ordered histories where an item first occurs.
            verbose: 0 prints nothing, 1 a line for each task.

        Raises:
            RuntimeError: The recommender was fitted before.
            ValueError: There is no user, or δ is too large for so few users.
        """
        say = functools.partial(print, flush=True) if verbose else lambda task: None
        self.release_sums(histories, verbose)
        say("denoising")
        self.estimates = Estimates.of(self.released)
        say("done")
        return self

    def release_sums(self, histories: Any, verbose: int = 1) -> None:
        """The private part of `fit`, arguments as there: once it returns, `write` keeps all that was paid for.

        What is left is arithmetic on the release, which takes minutes for thousands of items: `load` does it, too.
        """
        if self._begun:
            raise RuntimeError(
                "This recommender was fitted already, and each fit spends its budget anew: make another one for other "
                "data, and account for both if users are in both."
            )
        source = log_of(histories)
        in_parts = source.parts(self.catalogue)
        users = len(source) if isinstance(source, Sized) else sum(part.num_users for part in in_parts)
        number = self._counting.number_of(users)
        self._begun, self.num_users = True, number
        self.split = self._counting.split_for(number)
        say = functools.partial(print, flush=True) if verbose else lambda task: None
        made, vote = self._counting.release(source, number, say)
        if vote is not None:
            self.vote, self.ordered = vote, vote.ordered
        self.released = made

    @property
    def _counting(self) -> Counting:
        return Counting(
            self.catalogue, self.noise_multiplier, self.delta, self._size, self.ordered, self.users_private,
            self._before, self._private, self._words,
        )  # fmt: skip

    # Answering.

    def scores(self, histories: Iterable[ArrayLike]) -> NDArray[np.float32]:
        """Scores of the whole catalogue, `[histories, items]`, for `histories` as in `recommend`."""
        return self._scores.of(histories)

    def recommend(self, histories: Sequence[ArrayLike], k: int = 10) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The k best items that are not in the history, best first.

        Args:
            histories: Raw ids of each history, the oldest first; unknown ids do not count, and an empty history gets
                the most popular items.
            k: Number of items in an answer.

        Returns:
            Raw ids and scores, `[histories, k]`. Where a history leaves fewer than k items, id 0 fills up; if 0 is an
            item, the first of −1, −2, ... that is none.

        Raises:
            ValueError: k is no whole number between 1 and the size of the catalogue.
        """
        if not isinstance(k, (int, np.integer)) or not 1 <= k <= len(self.catalogue):
            raise ValueError(
                f"k must be a whole number between 1 and the {len(self.catalogue)} items of the catalogue, got {k!r}."
            )
        return self._scores.find_best(histories, k)

    @property
    def _scores(self) -> Scores:
        self._check_fitted()
        return Scores(self.catalogue, self.released, self.estimates, self.recency, self._vectors)

    @property
    def item_ids(self) -> NDArray[np.int64]:
        """Raw ids of the catalogue."""
        return self.catalogue.ids

    @property
    def popularity(self) -> NDArray[np.float32]:
        """Share of the users who have each item, as far as the counts tell."""
        self._check_fitted()
        return self.estimates.prior / np.float32(rules.PRIOR)

    @property
    def has_features(self) -> bool:
        """Whether public features of items are part of the scores."""
        return self._vectors is not None

    def answers(self) -> Any:
        """A `tf.Module` that gives its answers, for `tfdp_rec.serving.export`."""
        return self._scores.make_module()

    def export(self, filepath: str, k: int = 10) -> None:
        """Writes a SavedModel: histories of raw ids in, the k best items not in the history out.

        The signatures are those of `tfdp_rec.serving.export`.

        Args:
            filepath: Folder that is made.
            k: Number of items in an answer.
        """
        from tfdp_rec.datasets.logs.items import Items
        from tfdp_rec.serving.own_ids import export

        export(filepath, self, Items(self.catalogue.ids), k=k)

    # Files.

    def save(self, filepath: Path) -> None:
        """Writes an .npz file of the release and what was computed from it, for `load`; its folder must exist."""
        self._check_fitted()
        with open_atomically(filepath, "wb") as file:
            self.write(file)

    def write(self, file: IO[bytes], **more: Any) -> None:
        """Writes what `save` does into an open file, with further arrays by name, which `load` leaves alone.

        After `release_sums` alone, what `load` computes is left out.
        """
        kept = {name: getattr(self, name) for name in _KEPT}
        if hasattr(self, "estimates"):
            kept |= vars(self.estimates)
        features = arrays_of(self._vectors)
        np.savez(file, item_ids=self.catalogue.ids, **kept, **features, **self.released.arrays(), **more)

    @classmethod
    def load(cls, filepath: Path) -> SpectralRecommender:
        """The recommender that `save` wrote. It answers, exports and states its guarantee; it is not fitted again."""
        try:
            with np.load(filepath, allow_pickle=False) as file:
                # Sums that were kept as soon as they were made lack what is computed from them.
                estimates = Estimates(*(file[name] for name in _COMPUTED)) if "weights" in file else None
                names = {*_KEPT, "item_ids"}
                kept = {name: file[name] if file[name].ndim else file[name].item() for name in names}
                released, kept["_vectors"] = Release.from_arrays(file), vectors_of(file)
                released = dataclasses.replace(released, of_run=released.of_run or "mark" in file)
        except (AttributeError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as problem:
            raise ValueError(f"{filepath} holds no recommender that `save` wrote: {problem}.") from problem
        arguments = ("item_ids", "noise_multiplier", "delta", "recency", "users_private")
        settings = {name: kept.pop(name) for name in arguments if name in kept}
        found = cls(**settings)
        vote = order.OrderVote.of(released)
        vars(found).update(kept, released=released, ordered=released.ordered, vote=vote, _begun=True, _loaded=True)
        found.split = found._counting.split_for(found.num_users)
        found.estimates = estimates or Estimates.of(released)
        return found

    def _check_fitted(self) -> None:
        if not hasattr(self, "estimates"):
            raise RuntimeError("Nothing was released yet: call fit(histories) first.")
