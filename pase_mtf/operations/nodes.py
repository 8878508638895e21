"""What an operation becomes on a device, and the runs over which it broadcasts a smaller tensor."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from pase_mtf.compat import mtf

__all__ = ["Nodes", "broadcast_runs", "run_count"]


@dataclasses.dataclass(frozen=True, slots=True)
class Nodes:
    """What an operation becomes on a device.

    Attributes:
      count: TensorFlow nodes that are run.
      traffic: bytes that they read and write, as a multiple of the bytes of the operation's inputs and outputs.
      broadcast_runs: over how many runs of elements that lie side by side they broadcast a tensor of fewer dims:
        TensorFlow looks up anew for every run where in the smaller tensor it has to read.
      flops: of the matrix products and convolutions among those of a function of slices.
      multiplies: "matmul" or "convolution", whichever has most of these; "" where there are none.
      besides: unsplit bytes of the largest tensor that such a function makes besides what it returns, where that is
        larger than all of this, or of what a kernel needs for itself; else 0.
      is_stateful: whether such a function does something else every time (it draws random numbers, say), or nobody
        knows what it does.
      makes_anew: whether a node as large as its result writes over nothing that it reads.
    """

    count: int = 1
    traffic: float = 1.0
    broadcast_runs: float = 0.0
    flops: float = 0.0
    multiplies: str = ""
    besides: float = 0.0
    is_stateful: bool = False
    makes_anew: bool = False


def broadcast_runs(whole: mtf.Tensor, inputs: Sequence[mtf.Tensor]) -> float:
    """Over how many runs of the whole the inputs of fewer dims are broadcast, summed over the inputs."""
    names = whole.shape.dimension_names
    return float(sum(run_count(whole.shape.to_integer_list, [name in tensor.shape.dimension_names for name in names])
                     for tensor in inputs))


def run_count(shape: Sequence[int], held: Sequence[bool]) -> int:
    """How many runs a tensor has of elements that lie side by side and read one, or neighbouring, elements of another.

    Args:
      shape: of the larger tensor.
      held: per dim whether the smaller one has it.

    Returns:
      0 where the smaller one has all of its dims, or none.
    """
    dims = [(size, has) for size, has in zip(shape, held, strict=True) if size > 1]
    if len({has for _, has in dims}) < 2:
        return 0
    inner = list(itertools.takewhile(lambda dim: dim[1] == dims[-1][1], reversed(dims)))
    return math.prod(shape) // math.prod(size for size, _ in inner)
