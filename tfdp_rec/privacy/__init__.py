"""What a guarantee costs, and what can be said where there is none.

These are the names for users. They live in the rooms that make them: `core/claim` keeps the record of what was spent.
"""

from typing import TYPE_CHECKING

from tfdp_rec.core.ground.lazy_imports import lazy_getattr

if TYPE_CHECKING:
    from tfdp_rec.core.claim.accountant import Accountant as Accountant
    from tfdp_rec.core.claim.attack_rates import attack_limit as attack_limit
    from tfdp_rec.core.claim.calibration import calibrate_noise as calibrate_noise
    from tfdp_rec.core.claim.composition import epsilon_of as epsilon_of
    from tfdp_rec.core.claim.entries import Use as Use
    from tfdp_rec.core.claim.filters import GaussianFilter as GaussianFilter
    from tfdp_rec.core.claim.filters import RenyiFilter as RenyiFilter
    from tfdp_rec.core.claim.gaussian_release import noise_of_one_release as noise_of_one_release
    from tfdp_rec.core.claim.ledger import BrokenLedger as BrokenLedger
    from tfdp_rec.core.claim.ledger import Ledger as Ledger
    from tfdp_rec.core.claim.ledger import Payment as Payment
    from tfdp_rec.core.claim.ledger import Snapshot as Snapshot
    from tfdp_rec.core.claim.orders import FixedOrder as FixedOrder
    from tfdp_rec.core.claim.schemes import PoissonSampling as PoissonSampling
    from tfdp_rec.core.claim.schemes import RandomAllocation as RandomAllocation
    from tfdp_rec.core.claim.schemes import Sampling as Sampling
    from tfdp_rec.core.claim.spending import Unaccounted as Unaccounted
    from tfdp_rec.core.mechanism.correlated_noise import BufferedToeplitz as BufferedToeplitz
    from tfdp_rec.core.mechanism.correlated_noise import Correlation as Correlation
    from tfdp_rec.core.mechanism.correlated_noise import optimised_correlation as optimised_correlation
    from tfdp_rec.correlated.bounded_stream import BoundedStream as BoundedStream
    from tfdp_rec.sparse.eana_bound import eana_epsilon as eana_epsilon
    from tfdp_rec.sparse.eana_bound import eana_instance_epsilon as eana_instance_epsilon
    from tfdp_rec.sparse.eana_bound import eana_rdp as eana_rdp
    from tfdp_rec.sparse.eana_bound import eana_rdp_coordinate as eana_rdp_coordinate
    from tfdp_rec.sparse.eana_bound import eana_rdp_instance as eana_rdp_instance
    from tfdp_rec.sparse.eana_bound import eana_rdp_published as eana_rdp_published
    from tfdp_rec.sums.counts import private_counts as private_counts
    from tfdp_rec.sums.moments import private_moments as private_moments
    from tfdp_rec.sums.private_comparison import Comparison as Comparison
    from tfdp_rec.sums.private_comparison import private_comparison as private_comparison
    from tfdp_rec.sums.private_labels import private_labels as private_labels
    from tfdp_rec.sums.private_metrics import Figure as Figure
    from tfdp_rec.sums.private_metrics import PublicGroups as PublicGroups
    from tfdp_rec.sums.private_metrics import RecommendedLists as RecommendedLists
    from tfdp_rec.sums.private_metrics import ScoredRows as ScoredRows
    from tfdp_rec.sums.private_metrics import noise_of_metrics as noise_of_metrics
    from tfdp_rec.sums.private_metrics import private_metrics as private_metrics
    from tfdp_rec.sums.reliability import private_reliability as private_reliability
    from tfdp_rec.sums.set_union import private_items as private_items
    from tfdp_rec.sums.set_union import private_terms as private_terms
else:
    __getattr__, __all__ = lazy_getattr(__name__)
