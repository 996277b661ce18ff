"""`python -m experiments.bench noise`: what unit Gaussians cost, by sampler, and whether drawing them ahead helps.

  python -m experiments.bench noise                          one step of the DLRM shape, 6.8 million values
  python -m experiments.bench noise --rows 1024 --width 32

The default shape is one step of the DLRM benchmark: 26 tables, 2,048 rows each, 128 wide.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.bench import timing

if TYPE_CHECKING:
    import tensorflow as tf

Draw = Callable[[], object]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `bench noise`."""
    parser.add_argument("--rows", type=int, default=26 * 2048, help="rows drawn (default: %(default)s)")
    parser.add_argument("--width", type=int, default=128, help="values a row (default: %(default)s)")
    parser.add_argument("--tables", type=int, default=26, help="also in so many calls (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="rounds that count (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")


def run(args: argparse.Namespace) -> int:
    """Measures and prints a table."""
    for name in ("rows", "width", "tables", "repeats"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}.")
    timings = timing.alternate(_samplers(args.rows, args.width, args.tables), args.repeats)
    timings |= timing.alternate(_steps(args.rows, args.width), args.repeats)
    values = args.rows * args.width
    print(f"{values:,} unit Gaussians [{args.rows:,} x {args.width}], {args.repeats} alternating rounds, ms")
    print(f"{'sampler':<44} {'median':>8} {'lowest':>8} {'highest':>8} {'cpu':>8} {'ns/value':>9}")
    for name, t in timings.items():
        each = 1e6 * t.median / values
        print(f"{name:<44} {t.median:8.1f} {t.lowest:8.1f} {t.highest:8.1f} {t.processor:8.1f} {each:9.2f}")
    if args.json:
        figures = {name: dataclasses.asdict(timing) for name, timing in timings.items()}
        args.json.write_text(json.dumps({"rows": args.rows, "width": args.width, "milliseconds": figures}, indent=2))
    return 0


def _samplers(rows: int, width: int, tables: int) -> dict[str, Draw]:
    """The sources, and what they are to be compared with."""
    import numpy as np
    import tensorflow as tf

    from tfdp_rec import noise

    entropy, uncompiled = noise.EntropyNoise(), noise.EntropyNoise(jit_compile=False)
    secure, keyed = noise.SecureNoise(), noise.KeyedNoise(1)
    generator = tf.random.Generator.from_non_deterministic_state(alg="philox")
    one_thread = np.random.Generator(np.random.SFC64())
    return {
        "numpy SFC64 ziggurat, one thread": lambda: one_thread.standard_normal((rows, width), np.float32),
        "tf.random.Generator.normal": _traced(lambda: generator.normal([rows, width])),
        "Box-Muller in TensorFlow operations": _traced(lambda: _operations(generator, rows * width)),
        "EntropyNoise": _traced(lambda: _draw(entropy, rows, width)),
        f"EntropyNoise, {tables} calls": _traced(
            lambda: [_draw(entropy, (rows + table) // tables, width) for table in range(tables)]
        ),
        "EntropyNoise(jit_compile=False)": _traced(lambda: _draw(uncompiled, rows, width)),
        "SecureNoise": _traced(lambda: _draw(secure, rows, width)),
        "KeyedNoise (tests)": _traced(lambda: _draw(keyed, rows, width)),
    }


def _steps(rows: int, width: int) -> dict[str, Draw]:
    """A step of matrix products (as long as four of EntropyNoise), alone and with the noise of that step."""
    import tensorflow as tf

    from tfdp_rec import noise

    source = noise.EntropyNoise()
    matrix = tf.random.normal([1024, 1024])
    products = max(1, rows * width // 2_000_000)

    def work() -> tf.Tensor:
        product = matrix
        for _ in range(products):
            product = tf.matmul(product, matrix) / 32.0
        return product

    alone, draw = _traced(work), _traced(lambda: _draw(source, rows, width))
    pool = ThreadPoolExecutor(max_workers=1)
    ahead = [pool.submit(draw)]

    def with_noise_ahead() -> None:
        ready = ahead.pop()
        ahead.append(pool.submit(draw))
        alone()
        ready.result()

    return {
        "step without noise": alone,
        "step with noise in its graph": _traced(lambda: (work(), _draw(source, rows, width))),
        "step with noise drawn ahead in a thread": with_noise_ahead,
    }


def _draw(source: object, rows: int, width: int) -> tf.Tensor:
    import tensorflow as tf

    return source.normal(0, tf.range(rows, dtype=tf.int64), tf.constant(0, tf.int64), width)  # type: ignore[attr-defined]


def _operations(generator: tf.random.Generator, values: int) -> tf.Tensor:
    """Box-Muller written plainly, each operation over the whole array: 64 bits of radius, 32 of angle."""
    import tensorflow as tf

    bits = generator.uniform_full_int([3, (values + 1) // 2], dtype=tf.uint32)
    high, low, angle = (tf.cast(word, tf.float32) for word in tf.unstack(bits))
    uniform = high * ((1.0 - 2.0**-24) * 2.0**-32) + (low + 0.5) * 2.0**-64
    radius, angle = tf.sqrt(-2.0 * tf.math.log(uniform)), angle * (2.0 * math.pi * 2.0**-32)
    return tf.concat([radius * tf.cos(angle), radius * tf.sin(angle)], axis=0)


def _traced(function: Callable[[], object]) -> Draw:
    import tensorflow as tf

    return tf.function(function, autograph=False)
