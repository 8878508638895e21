"""When a tensor is a pending sum (mtf.ops.LazyAllreduceSum) under stock mtf.Lowering, as a function of the layout."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence

from pase_mtf.operations.protocols import Dims
from pase_mtf.operations.stock_reshape import reshape_problem

__all__ = ["AddedSum", "PendingSum", "ReducedSum", "ReshapedSum"]


class PendingSum(abc.ABC):
    """A tensor that may be a pending sum."""

    @abc.abstractmethod
    def names(self) -> frozenset[str]:
        """Dims without whose splits it never is."""

    @abc.abstractmethod
    def axes(self, axis_of: Mapping[str, int], sizes: Sequence[int]) -> tuple[int, ...]:
        """The mesh axes it is still to be summed over; () if it is no pending sum.

        Args:
          axis_of: dim name -> index of its mesh axis.
          sizes: of the mesh axes.
        """


@dataclasses.dataclass(frozen=True)
class ReducedSum(PendingSum):
    """Made by an operation that sums over dims."""

    dims: tuple[str, ...]

    def names(self) -> frozenset[str]:
        """Of `PendingSum`."""
        return frozenset(self.dims)

    def axes(self, axis_of: Mapping[str, int], sizes: Sequence[int]) -> tuple[int, ...]:
        """Of `PendingSum`."""
        return tuple(axis_of[name] for name in self.dims if name in axis_of)


@dataclasses.dataclass(frozen=True)
class AddedSum(PendingSum):
    """The sum of two tensors stays pending where both are, over the same axes."""

    first: PendingSum
    second: PendingSum

    def names(self) -> frozenset[str]:
        """Of `PendingSum`."""
        return self.first.names() | self.second.names()

    def axes(self, axis_of: Mapping[str, int], sizes: Sequence[int]) -> tuple[int, ...]:
        """Of `PendingSum`."""
        one = self.first.axes(axis_of, sizes)
        return one if one == self.second.axes(axis_of, sizes) else ()


@dataclasses.dataclass(frozen=True)
class ReshapedSum(PendingSum):
    """A reshape that moves no slices passes a pending sum on."""

    source: PendingSum
    old: Dims
    new: Dims

    def names(self) -> frozenset[str]:
        """Of `PendingSum`."""
        return self.source.names()

    def axes(self, axis_of: Mapping[str, int], sizes: Sequence[int]) -> tuple[int, ...]:
        """Of `PendingSum`."""
        axes = self.source.axes(axis_of, sizes)
        return () if not axes or reshape_problem(self.old, self.new, axis_of, sizes)[1] else axes
