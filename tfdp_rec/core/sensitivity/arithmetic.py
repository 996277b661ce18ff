"""Exact float32 products: refused switches, and canaries in the graph that runs.

Some hardware multiplies matrices of float32 numbers after dropping bits of them: TensorFloat-32 on GPUs (10 of 23 bits
kept; on by default in TensorFlow), bfloat16 in oneDNN if an environment variable allows it. TensorFlow's graph
optimizer has options that make such products, or drop the checks, after the step was traced and read. If the norm is
exact and the sum of products is not, they belong to two different gradients, and the second one is not clipped.

The known switches are refused when a step is traced. A switch can be turned later, and there may be unknown ones:
therefore every step's own graph contains `canaries`, products with known results.
"""

from __future__ import annotations

import os

import tensorflow as tf

from tfdp_rec.core.ground.graph_checks import Check
from tfdp_rec.core.ground.keras_internals import is_compiled_with_xla
from tfdp_rec.core.ground.refused import NotPrivate

_COARSE_MODES = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "TF_SET_ONEDNN_FPMATH_MODE")
_REWRITES = "TF_AUTO_MIXED_PRECISION", "TF_ENABLE_AUTO_MIXED_PRECISION"  # what such variables' names begin with
_OPTIONS = (
    "auto_mixed_precision", "auto_mixed_precision_onednn_bfloat16", "auto_mixed_precision_mkl", "debug_stripper",
)  # fmt: skip


def ask_for_float32_products() -> None:
    """Turns TensorFloat-32 off for this process; compiling a private model calls it."""
    tf.config.experimental.enable_tensor_float_32_execution(False)


def refuse_other_arithmetic() -> None:
    """Raises `NotPrivate` if a known switch lets the graph be computed with fewer bits, or without its checks."""
    # In the order of the head of this file: products of fewer bits first, then rewritings of the graph.
    if tf.config.experimental.tensor_float_32_execution_enabled() and tf.config.list_physical_devices("GPU"):
        raise NotPrivate(
            "TensorFloat-32 is on: a GPU would drop bits of the gradients between their norms and their sum. Call "
            "tf.config.experimental.enable_tensor_float_32_execution(False); compiling a private model does so."
        )
    for name, value in os.environ.items():
        coarse = name in _COARSE_MODES and value.upper() not in ("STRICT", "")
        if coarse or name.startswith(_REWRITES) and value not in ("0", ""):
            raise NotPrivate(
                f"The environment variable {name}={value} lets matrix products drop bits of the gradients between "
                "their norms and their sum; unset it."
            )
    options = tf.config.optimizer.get_experimental_options()
    for name in _OPTIONS:
        if options.get(name):
            raise NotPrivate(
                f"TensorFlow's graph optimizer would rewrite the step ({name}): its products would lose bits, or its "
                f'checks would go. Call tf.config.optimizer.set_experimental_options({{"{name}": False}}).'
            )
    clustering = tf.config.optimizer.get_jit() or _clusters(os.environ.get("TF_XLA_FLAGS", ""))
    if clustering or is_compiled_with_xla():
        raise NotPrivate(
            "XLA would compile the private step: it drops checks and rounds otherwise than TensorFlow. Leave out "
            "jit_compile=True, tf.config.optimizer.set_jit and --tf_xla_auto_jit of TF_XLA_FLAGS."
        )


def _clusters(flags: str) -> bool:
    settings = (flag.lstrip("-").partition("=") for flag in flags.split())
    return any(name == "tf_xla_auto_jit" and level not in ("0", "-1") for name, _, level in settings)


_FINE = 1 + 2.0**-19  # 20 bits; bfloat16 and a bfloat16 for the rest have 16, TensorFloat-32 has 11
_WIDTH = 16  # as many of them add up to 24 bits, all that float32 has


def canaries(norms: tf.Tensor) -> dict[str, tf.Tensor]:
    """Whether each kind of product in a clipped sum gives the right bits in this graph as it runs."""
    # No norm is negative, but only the run shows it: so no optimizer computes the canaries beforehand.
    zero = tf.reduce_sum(tf.cast(norms < 0, tf.float32))
    fine, ones = tf.fill([_WIDTH, _WIDTH], _FINE + zero), tf.fill([_WIDTH, _WIDTH], 1 + zero)
    one = [tf.expand_dims(each, 0) for each in (ones, fine)]
    # All partial sums are float32 numbers, so the order of additions does not matter.
    sums = {
        "MatMul": tf.matmul(fine, ones, transpose_a=True),
        "BatchMatMulV2": tf.matmul(one[0], one[1], transpose_b=True),
        "Einsum": tf.einsum("bti,bto->bio", one[1], one[0]),
        "AddN": tf.add_n([fine * ones] * _WIDTH),
    }
    coarse = tf.cast(1 + 2.0**-7 + zero, tf.bfloat16)
    square = tf.cast(coarse * coarse, tf.float32)  # XLA keeps the 2⁻¹⁴ that bfloat16 drops
    # The bits are compared: a comparison of float32 numbers may itself be made with fewer bits.
    right = {kind: tf.reduce_all(_bits(found) == _bits(tf.constant(_WIDTH * _FINE))) for kind, found in sums.items()}
    return {**right, "Cast": tf.reduce_all(_bits(square) == _bits(tf.constant(1 + 2.0**-6)))}


def _bits(tensor: tf.Tensor) -> tf.Tensor:
    return tf.bitcast(tensor, tf.uint8)  # which a GPU compares; int32 numbers go to its host


_NOT_EXACT = (
    "This step's products of float32 numbers drop bits between the norms and the sum: TensorFlow's graph optimizer, "
    "TensorFloat-32 or XLA was turned on after the step was compiled. Turn it off and compile the model again."
)


def check_exactness(norms: tf.Tensor) -> Check:
    """A check, made once the examples' norms are there, that products are exact."""
    return tf.reduce_all(tf.stack(list(canaries(norms).values()))), _NOT_EXACT
