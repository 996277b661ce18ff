"""TensorFlow for commands: without what it says of machines without a GPU, and with memory that it keeps.

Large temporaries, allocated anew at every step, cost more in the system than the step (docs/benchmarks-speed.md).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator


def import_tensorflow(of_a_cluster: bool = False) -> None:
    """Imports TensorFlow and has it look for devices, its standard error closed meanwhile; TFDP_REC_DEBUG=1 leaves it
    open. What fails raises as ever.

    Args:
        of_a_cluster: whether servers are going to be called. Of a lost one TensorFlow says so in a thousand lines, and
            raises it as well.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3" if of_a_cluster and not os.environ.get("TFDP_REC_DEBUG") else "2")
    os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "1")
    loud = os.environ.get("TFDP_REC_DEBUG") or "tensorflow" in sys.modules
    with contextlib.nullcontext() if loud else _silence():
        import tensorflow as tf

        tf.config.list_physical_devices()
    if not loud:  # it would warn of every model after the fifth that it must be traced
        tf.get_logger().setLevel("CRITICAL" if of_a_cluster else "ERROR")


def when_all_is_said() -> None:
    """Has the end of this process close standard error: TensorFlow's context tells every server of a cluster then, for
    every function that it compiled, that it is gone, and fills pages if they went first. TFDP_REC_DEBUG=1 leaves it
    open.
    """
    if not os.environ.get("TFDP_REC_DEBUG"):
        atexit.register(_to_nowhere)


def _to_nowhere() -> None:
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Standard error goes nowhere, what C++ writes there too."""
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
