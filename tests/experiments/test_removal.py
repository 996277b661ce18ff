"""An example whose row becomes empty moves the clipped sum by a clip at most, however wide the layers are."""

import pytest

from experiments.removal.__main__ import wide_removals


@pytest.mark.fast_cases("800-128-False-161-float32", "1024-1024-True-97-float32")
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize(
    "terms, width, kink, size",
    [(800, 128, False, 161), (1280, 128, False, 65), (1792, 128, False, 17), (1024, 1024, True, 97)],
)
def test_an_empty_row_moves_the_sum_by_a_clip_at_most(terms, width, kink, size, dtype):
    """All examples are rounding error alone, at sizes where kernels switch: with one row less removal was 130 clips."""
    empty, _, _ = wide_removals(terms, width, kink, dtype, [size])
    assert 0.9 < empty <= 1
