"""Sums of rows that were looked up: devices that hold such a sum in part may give each other the rows instead.

The gradient of a table is the product of one-hot vectors, a vector per index, and of the gradients of the rows at these
indices. Devices that have the indices among them each hold a part of it, as large as the table however few rows there
are. Instead of their parts they can give each other indices and rows, and add all of these up themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from pase_mtf.graph.partition import Partition, scattered_sum

__all__ = ["LookedUp", "fewer_as_rows", "summed_as_rows", "together"]


class LookedUp(NamedTuple):
    """What a sum consists of: a row of a table for each of many indices.

    Attributes:
      indices: how many, unsplit.
      dim: the dim of the sum that they are positions along; a row has the others.
      itemsize: bytes of an index.
    """

    indices: int
    dim: int
    itemsize: int


def together(one: LookedUp, other: LookedUp) -> LookedUp | None:
    """What the sum of two sums of one shape consists of: the rows of both; None where these are of different dims."""
    if one.dim != other.dim:
        return None
    return LookedUp(one.indices + other.indices, one.dim, max(one.itemsize, other.itemsize))


def fewer_as_rows(rows: Any, parts: Any, block: Any, piece: Any = None, wanted: Any = None) -> Any:
    """Whether fewer elements travel to a device as indices and rows than as parts of the sum.

    Elements and not bytes, so that a program sends the same in float64, by which its float32 is judged.

    Args, each an int or an array of int64:
      rows: elements of the indices and rows that a device has.
      parts: of the sum; as many devices hold one each.
      block: elements of a part.
      piece, wanted: where parts would be summed by a reduce-scatter, the elements that a device sums, and those that it
        has afterwards; None: all-reduced.

    Returns:
      A bool, or an array of them.
    """
    if piece is None:
        return (parts > 1) & (rows * parts < 2 * block)
    return (parts > 1) & ((parts - 1) * rows < (parts - 2) * piece + wanted)


def summed_as_rows(looked_up: LookedUp, source: Partition, axes: Sequence[tuple[int, int]], target: Partition,
                   shape: Sequence[int]) -> bool:
    """Whether devices give each other indices and rows: `fewer_as_rows`, of one sum.

    Args:
      looked_up: what it consists of.
      source: of its parts.
      axes: (size, stride) of the mesh axes over which the parts are to be summed.
      target: where the sum is wanted.
      shape: its unsplit shape.
    """
    parts, block = math.prod(size for size, _ in axes), source.block_shape(shape)
    rows = looked_up.indices // parts * (math.prod(block) // block[looked_up.dim] + 1)
    sums = scattered_sum(source, target, shape)
    if sums is None:
        return bool(fewer_as_rows(rows, parts, math.prod(block)))
    return bool(fewer_as_rows(rows, parts, math.prod(block), math.prod(sums.block_shape(shape)),
                              math.prod(target.block_shape(shape))))
