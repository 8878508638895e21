"""The configurations of a layer: how its dims are split over the devices, and in which order.

A configuration is an ordered list of mesh axes, outermost first: devices 0..n-1 are numbered row-major over the axes,
as Mesh-TensorFlow numbers them. Every axis splits one dim, or none (then it replicates). With fewer than p devices in
all, the remaining ones idle.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence

from pase_mtf.errors import UsageError, shortened
from pase_mtf.graph.computation_graph import Layer
from pase_mtf.graph.partition import Partition

__all__ = ["Configuration", "enumerate_configurations"]


@dataclasses.dataclass(frozen=True, order=True)
class Configuration:
    """How one layer is split.

    Attributes:
      axes: (dim name, shards) per mesh axis, outermost first. The name "" is an axis
        that only replicates. No dim appears twice, no axis has size 1.
    """

    axes: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.axes, tuple) or not all(
                type(axis) is tuple and list(map(type, axis)) == [str, int] for axis in self.axes):
            raise UsageError(f"a configuration of {shortened(self.axes)}; give a tuple of (dim, shards), such as "
                             "((\"batch\", 8),)")
        names = [name for name, _ in self.axes if name]
        if len(set(names)) != len(names):
            raise UsageError(f"a dim appears twice in {shortened(self.axes)}; split it once")
        if any(size < 2 for _, size in self.axes):
            raise UsageError(f"an axis of a size below 2 in {shortened(self.axes)}; leave it out")

    @functools.cached_property
    def devices(self) -> int:
        """Number of devices the layer runs on: 0..devices-1."""
        return math.prod(size for _, size in self.axes)

    @functools.cached_property
    def splits(self) -> dict[str, int]:
        """Dim name -> number of shards, for the dims that are split."""
        return {name: size for name, size in self.axes if name}

    def shards(self, dim: str) -> int:
        """The number of shards of a dim (1 where it is not split)."""
        return self.splits.get(dim, 1)

    parts = shards
    """What `shards` was called before."""

    @functools.cached_property
    def strides(self) -> dict[str, int]:
        """Dim name -> how many consecutive devices hold the same shard: device d holds shard (d // stride) % number."""
        strides, stride = {}, 1
        for name, size in reversed(self.axes):
            if name:
                strides[name] = stride
            stride *= size
        return strides

    def partition(self, dims: Sequence[str]) -> tuple[int, tuple[tuple[int, int], ...]]:
        """Which block of a tensor with these dims each device holds, in canonical form.

        Two configurations with equal results place a tensor identically.

        Returns:
          (devices, ((number of shards, stride) per dim of the tensor)): device d < devices holds shard
          (d // stride) % number of every dim; (1, 1) where the dim is whole.
        """
        return self.devices, tuple(
            (self.splits[name], self.strides[name]) if name in self.splits else (1, 1) for name in dims)

    def placed(self, layer: Layer, dims: Sequence[str]) -> Partition:
        """Where the blocks of a tensor lie.

        Args:
          layer: that is split in this way.
          dims: of the tensor, by names of the layer, aliases too; others are whole.
        """
        devices, shards = self.partition([name if name in layer.dims else layer.aliases.get(name, "") for name in dims])
        return Partition(tuple(range(devices)), shards)

    def __str__(self) -> str:
        if not self.axes:
            return "one device"
        return " ".join(f"{name or '(replicated)'}:{size}" for name, size in self.axes)


def _ordered_factorizations(number: int, length: int) -> Iterator[tuple[int, ...]]:
    """Every way to write `number` as an ordered product of `length` factors of at least 2."""
    if length == 0:
        if number == 1:
            yield ()
        return
    if length == 1:
        if number >= 2:
            yield (number,)
        return
    for first in range(2, number // 2 + 1):
        if number % first == 0:
            for rest in _ordered_factorizations(number // first, length - 1):
                yield (first, *rest)


def _trusted(axes: tuple[tuple[str, int], ...]) -> Configuration:
    """A configuration of axes that need no checking: there are tens of thousands of them."""
    configuration = object.__new__(Configuration)
    object.__setattr__(configuration, "axes", axes)
    return configuration


@functools.lru_cache(maxsize=4096)
def _enumerate(dims: tuple[tuple[str, int], ...], totals: tuple[int, ...], replicate: bool,
               max_axes: int) -> tuple[Configuration, ...]:
    found: list[Configuration] = []
    for total in totals:
        # To replicate on some devices while others idle would be neither here nor there.
        choices = [*dims, ("", 0)] if replicate and total == totals[-1] else list(dims)
        # The axes that may have such a size; those of one dim are told apart by its name.
        offered = {shards: [(name, shards) for name, size in choices if size % shards == 0]
                   for shards in range(2, total + 1) if total % shards == 0}
        for length in range(min(max_axes, len(choices)) + 1):
            for factors in _ordered_factorizations(total, length):
                partial: list[tuple[tuple[str, int], ...]] = [()]
                for shards in factors:
                    partial = [(*axes, axis) for axes in partial for axis in offered[shards]
                               if axis[0] not in [name for name, _ in axes]]
                found.extend(map(_trusted, partial))
    return tuple(found)


def enumerate_configurations(layer: Layer, devices: int, *, replicate: bool = True, idle: bool = False,
                             max_axes: int = 3, only: Iterable[str] | None = None) -> tuple[Configuration, ...]:
    """The configurations of a layer that the lowering supports on this many devices.

    Args:
      layer: its splittable dims and their sizes decide what divides.
      devices: p, the number of devices.
      replicate: offer axes that only replicate, so that all p devices take part in every configuration.
      idle: offer configurations on fewer than p devices (a divisor of p; the rest idle). The unsplit layer on one
        device is always among them.
      max_axes: most mesh axes in one configuration.
      only: restrict the dims that may be split.

    Returns:
      Configurations without duplicates, in a fixed order; never empty (with neither `idle` nor `replicate`, only the
      complete splits are offered, and the unsplit configuration where there are none).
    """
    allowed = set(layer.splittable if only is None else only) & set(layer.splittable)
    dims = tuple((name, size) for name, size in layer.dims.items() if name in allowed)
    totals = tuple(n for n in range(1, devices + 1) if devices % n == 0) if idle else (devices,)
    return _enumerate(dims, totals, replicate, max_axes) or (Configuration(),)
