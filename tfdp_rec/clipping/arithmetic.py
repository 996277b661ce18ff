"""What the processor is asked for: products of float32 numbers as float32 numbers.

Some hardware multiplies matrices of float32 numbers after dropping bits of them: TensorFloat-32 on GPUs (10 of 23 bits
kept; on by default in TensorFlow), bfloat16 in oneDNN if an environment variable allows it. A norm that is
exact and a sum
of products that is not are two different gradients, and the second one is not clipped. So both are off, or refused.
"""

from __future__ import annotations

import os

import tensorflow as tf

from tfdp_rec.clipping.rules import NotPrivate

_COARSE_MODES = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "TF_SET_ONEDNN_FPMATH_MODE")


def ask_for_float32_products() -> None:
    """Turns TensorFloat-32 off, for this process: what compiling a private model does."""
    tf.config.experimental.enable_tensor_float_32_execution(False)


def refuse_coarse_products() -> None:
    """Raises if matrix products of float32 numbers may be made of fewer bits.

    Raises:
        NotPrivate: with the switch that says so.
    """
    if tf.config.experimental.tensor_float_32_execution_enabled() and tf.config.list_physical_devices("GPU"):
        raise NotPrivate(
            "TensorFloat-32 is on: a GPU would drop bits of the gradients between their norms and their sum. Call "
            "tf.config.experimental.enable_tensor_float_32_execution(False); compiling a private model does so."
        )
    for name in _COARSE_MODES:
        if os.environ.get(name, "STRICT").upper() not in ("STRICT", ""):
            raise NotPrivate(
                f"The environment variable {name}={os.environ[name]} lets matrix products drop bits of the gradients "
                "between their norms and their sum; unset it."
            )
