"""The programs of benchmarks/programs in the training harness: reduced, for a few steps."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator

import harness
import numpy as np

from benchmarks import programs
from pase_mtf.compat import mtf, tf

DEVICES = 4
STEPS = 3
# float32 sums in another order; a wrong value differs in the third digit at the latest.
TOLERANCE = 2e-4


# As programs lower themselves.
stock = functools.partial(harness.stock, autostack=True)


def losses(program: programs.Program, lowering: mtf.Lowering) -> np.ndarray:
    """The losses of a few steps of a lowered program; every step's update is in the next step's loss."""
    return harness.train(program, lowering, itertools.islice(program.batches(), STEPS)).losses


def losses_of(name: str, rule: harness.LoweringRule, mesh_shape: str = "", layout: str = "") -> np.ndarray:
    """The losses of a reduced program, in a graph of its own."""
    with tf.Graph().as_default():
        program = programs.build(name, "reduced", mesh_shape, layout)
        return losses(program, rule(program))


@functools.cache
def one_device(name: str) -> np.ndarray:
    """What stock Mesh-TF makes of a reduced program on one device."""
    return losses_of(name, stock())


@contextlib.contextmanager
def built(name: str, size: str = "reduced") -> Iterator[programs.Program]:
    """A program in a graph of its own."""
    with tf.Graph().as_default():
        yield programs.build(name, size)
