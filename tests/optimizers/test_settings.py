"""Settings keep every bit they were given: the accountant reads them back."""

import tfdp_rec


def test_settings_are_not_rounded():
    optimizer = tfdp_rec.DPSGD(0.1, l2_norm_clip=0.3, noise_multiplier=0.9233898, expected_batch_size=1000.1)
    assert optimizer.noise_multiplier == 0.9233898
    assert optimizer.l2_norm_clip == 0.3
    assert optimizer.expected_batch_size == 1000.1
    assert optimizer.dp_event().noise_multiplier == 0.9233898
