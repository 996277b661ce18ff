"""The package's losses, norms and clipped sum are those of examples that were kept apart by construction."""

import numpy as np
import pytest
from alone import clipped_alone, gradients_alone
from helpers import dense_gradients, double_precision, evaluated
from zoo import built

CLIP = 0.7
VECTORISED = ("mlp", "dlrm")
IN_A_LOOP = ("two_tower", "gru")  # gathers from a table by shared ids; lists of a loop: neither converts


@pytest.fixture(autouse=True, scope="module")
def float64():
    with double_precision():
        yield


def agrees(name, vectorised):
    model, batch = built(name)
    losses, gradients = gradients_alone(model, batch, vectorised)
    norms, sums = clipped_alone(gradients, CLIP)
    found = evaluated(model, batch, CLIP)
    np.testing.assert_allclose(found.losses, losses, rtol=1e-9)
    np.testing.assert_allclose(found.norms, norms, rtol=1e-6)
    for path, gradient in dense_gradients(model, found).items():
        np.testing.assert_allclose(gradient, sums[path], rtol=1e-6, atol=1e-6 * CLIP, err_msg=path)


@pytest.mark.parametrize("name", VECTORISED)
def test_a_vectorised_loss_of_single_examples_is_clipped_alike(name):
    agrees(name, True)


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_A_LOOP)
def test_examples_in_a_loop_are_clipped_alike(name):
    agrees(name, False)


@pytest.mark.parametrize("name", IN_A_LOOP)
def test_what_does_not_convert_says_so(name):
    with pytest.raises((ValueError, TypeError)):
        gradients_alone(*built(name), vectorised=True)
