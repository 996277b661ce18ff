"""TensorFlow for commands: without its messages about machines without a GPU, and with settings for speed.

An allocator keeps memory: large temporaries that are allocated anew at every step cost more time than the step. And
noise is drawn in vectors of 512 bits where the processor has them (docs/benchmarks-speed.md). TFDP_REC_DEBUG=1 shows
all messages.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator

_WIDE_VECTORS = "--xla_cpu_prefer_vector_width=512"
_KNOWN_IN = "2.21."  # XLA ends the process over a flag that it does not know


def import_tensorflow(of_a_cluster: bool = False) -> None:
    """Imports TensorFlow and has it look for devices, its standard error closed meanwhile."""
    # For a lost server of a cluster TensorFlow writes a thousand lines, and raises an error as well.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3" if of_a_cluster and not os.environ.get("TFDP_REC_DEBUG") else "2")
    os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "1")
    loud = os.environ.get("TFDP_REC_DEBUG") or "tensorflow" in sys.modules
    with contextlib.nullcontext() if loud else _silence():
        import tensorflow as tf

        tf.config.list_physical_devices()
    if tf.__version__.startswith(_KNOWN_IN):  # XLA reads its flags when it first compiles
        os.environ.setdefault("XLA_FLAGS", _WIDE_VECTORS)
    if not loud:  # it would warn of every model after the fifth that it must be traced
        tf.get_logger().setLevel("CRITICAL" if of_a_cluster else "ERROR")


def silence_stderr_at_exit() -> None:
    """Closes standard error at the end of this process."""
    # TensorFlow's context then calls every server of a cluster for every compiled function, and writes pages if the
    # servers ended first.
    if not os.environ.get("TFDP_REC_DEBUG"):
        atexit.register(_close_stderr)


def _close_stderr() -> None:
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    # The file itself, since C++ writes there too.
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
