"""Displays of CriteoPrivateAd's schema, by day: users with a few displays each, and clicks of a planted truth.

A display shows a campaign c on the page of a publisher p to a user u; popularity of c and p follows a shifted Zipf law,
and tastes are standard Gaussians t_u and t_c in 6 dimensions. With a = t_u · t_c / √6,

    logit = b + 0.5 e_p + 0.4 e_c + 0.8 a + 0.4 s_u − 0.2 log k,

e standard Gaussians, s_u how much the user clicks at all, k the display's number within the user's day. As in the real
log a user's id is new each day, so that a unit is a user's day. Columns are of the groups that its authors name by what
a browser would reveal, fewer of each than the real log has:

    features_kv_bits_constrained      what one site knows of the user: a, with noise, in 8 steps
    features_browser_bits_constrained what the browser tells: s_u, with noise, in 8 steps
    features_kv_not_constrained       the campaign's own
    features_ctx_not_constrained      the publisher's own, and the hour
    features_not_available            what only a user's id across sites would tell: directions of t_u in 16 steps
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pyarrow as pa
from scipy import special

from experiments.generated.drawing import GOLDEN, mixed, zipf_offset, zipf_ranks

_TASTES = 6
_COLUMNS = {"kv_bits_constrained": 8, "browser_bits_constrained": 3, "kv_not_constrained": 4,
            "ctx_not_constrained": 5, "not_available": 6}  # fmt: skip
_MOST = 20  # displays of a user's day


@dataclasses.dataclass(frozen=True)
class SyntheticPrivateAds:
    """A generator; equal arguments give equal days.

    Args:
        users: Number of users of a day.
        campaigns: Number of campaigns.
        publishers: Number of publishers.
        click_bias: Logit b of an average display.
        seed: Seed of everything that is random.

    Example:
        >>> table = SyntheticPrivateAds(users=100).day(1)
        >>> table.num_columns, table.num_rows > 100, table["day_int"][0].as_py()
        (32, True, 1)
    """

    users: int = 60_000
    campaigns: int = 3_000
    publishers: int = 10_000
    click_bias: float = -1.0
    seed: int = 0

    def day(self, day: int) -> pa.Table:
        """Displays of one day, a user's together and in order."""
        rng = np.random.default_rng([self.seed, day])
        count = np.minimum(rng.geometric(0.35, self.users), _MOST)
        user, place = np.repeat(np.arange(self.users), count), np.concatenate([np.arange(each) for each in count])
        taste, much = rng.normal(size=[self.users, _TASTES])[user], rng.normal(size=self.users)[user]
        campaign = self._popular(rng, self.campaigns, 0.02, len(user))
        publisher = self._popular(rng, self.publishers, 0.05, len(user))
        of_campaign, of_publisher = (self._gaussians(kind, each) for kind, each in ((1, campaign), (2, publisher)))
        fit = (taste * of_campaign[:, :_TASTES]).sum(1) / _TASTES**0.5
        logit = self.click_bias + 0.5 * of_publisher[:, -1] + 0.4 * of_campaign[:, -1] + 0.8 * fit + 0.4 * much
        clicked = rng.random(len(user)) < special.expit(logit - 0.2 * np.log1p(place))
        features = self._features(rng, taste, much, fit, campaign, publisher)
        columns = {
            "user_id": 1_000_000 * day + user, "day_int": np.full(len(user), day), "display_order": 1 + place,
            "publisher_id": publisher, "campaign_id": campaign, **features,
        }  # fmt: skip
        delays = pa.ListArray.from_arrays(
            np.concatenate([[0], np.cumsum(clicked)]).astype(np.int32), rng.exponential(30.0, int(clicked.sum()))
        )
        return pa.table({**columns, "click_delay_after_display_array": delays})

    def _features(
        self, rng: np.random.Generator, taste: Any, much: Any, fit: Any, campaign: Any, publisher: Any
    ) -> dict[str, Any]:
        def steps(values: Any, share: float, count: int) -> Any:
            seen = share * values + (1 - share**2) ** 0.5 * rng.normal(size=len(values))
            return np.floor(count * special.ndtr(seen)).astype(np.int64)

        hour = rng.integers(0, 24, len(fit))
        made = {
            "kv_bits_constrained": lambda k: steps(fit, (0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1)[k], 8),
            "browser_bits_constrained": lambda k: steps(much, (0.6, 0.4, 0.2)[k], 8),
            "kv_not_constrained": lambda k: campaign // (1, 4, 16, 64)[k] + 10_000 * k,
            "ctx_not_constrained": lambda k: hour if k == 4 else publisher // (1, 8, 64, 512)[k] + 10_000 * k,
            "not_available": lambda k: steps(taste[:, k], 0.9, 16),
        }
        return {f"features_{kind}_{k}": made[kind](k) for kind, count in _COLUMNS.items() for k in range(count)}

    def _popular(self, rng: np.random.Generator, size: int, head: float, count: int) -> Any:
        return zipf_ranks(rng.random(count), size, 1.2, zipf_offset(size, 1.2, head))

    def _gaussians(self, kind: int, numbers: Any) -> Any:
        """Standard Gaussians `[numbers, tastes + 1]` that are a function of the numbers."""
        keys = numbers.astype(np.uint64)[:, None] + np.uint64(kind << 32) + np.uint64(self.seed << 40)
        words = mixed(keys * np.uint64(16) + np.arange(_TASTES + 1, dtype=np.uint64) + np.uint64(GOLDEN))
        return special.ndtri((words >> np.uint64(11)).astype(np.float64) / 2**53 * (1 - 1e-12) + 5e-13)
