"""Configurations of a layer as arrays, so that all of them are priced at once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import numpy as np

from pase_mtf.errors import UsageError
from pase_mtf.graph.computation_graph import Layer
from pase_mtf.graph.configurations import Configuration

__all__ = ["ConfigurationTable", "DistinctShardings", "dim_positions", "positions_of"]


def dim_positions(layer: Layer) -> dict[str, int]:
    """Every dim name the layer knows (aliases too) -> its column in the layer's `ConfigurationTable`."""
    position = {name: number for number, name in enumerate(layer.dims)}
    for alias, name in layer.aliases.items():
        if name in position:
            position.setdefault(alias, position[name])
    return position


def positions_of(dims: Iterable[str], position: dict[str, int]) -> tuple[int, ...]:
    """The column of every dim of a tensor; -1, the column of ones, where the layer never splits it."""
    return tuple(position.get(name, -1) for name in dims)


@dataclasses.dataclass(frozen=True)
class DistinctShardings:
    """The different ways in which the configurations of a layer shard one tensor.

    Attributes:
      devices: int64 [R], how many devices hold a block.
      shards, strides: int64 [R, T] for a tensor of T dims: of each dim, device d holds shard (d // stride) % shards.
      index: int32 [K], the sharding of every configuration.
    """

    devices: np.ndarray
    shards: np.ndarray
    strides: np.ndarray
    index: np.ndarray

    @property
    def key(self) -> tuple[bytes, bytes, bytes, tuple[int, ...]]:
        """Equal where the shardings are the same, whichever configurations make them."""
        return self.devices.tobytes(), self.shards.tobytes(), self.strides.tobytes(), self.shards.shape


@dataclasses.dataclass(frozen=True, eq=False)
class ConfigurationTable:
    """K configurations of a layer with D dims. The last column of both arrays is that of a dim which is never split.

    Attributes:
      devices: int64 [K].
      shards: int64 [K, D + 1], into how many shards each dim is split.
      strides: int64 [K, D + 1], how many consecutive devices hold the same shard; 1 where the dim is not split.
    """

    devices: np.ndarray
    shards: np.ndarray
    strides: np.ndarray

    @classmethod
    def build(cls, configurations: Sequence[Configuration], position: dict[str, int], dims: int) -> ConfigurationTable:
        """Puts configurations of one layer into arrays.

        Args:
          configurations: of one layer.
          position: column of every dim name (`dim_positions`).
          dims: D, the number of dims of the layer.

        Raises:
          ValueError: a configuration splits a dim that the layer does not have.
        """
        devices = np.ones(len(configurations), np.int64)
        shards = np.ones((len(configurations), dims + 1), np.int64)
        strides = np.ones((len(configurations), dims + 1), np.int64)
        for row, configuration in enumerate(configurations):
            stride = 1
            for name, count in reversed(configuration.axes):
                if name:
                    if name not in position:
                        raise ValueError(f"configuration {configuration}: the layer has no dim {name!r}")
                    shards[row, position[name]] = count
                    strides[row, position[name]] = stride
                stride *= count
            devices[row] = stride
        return cls(devices, shards, strides)

    @functools.cached_property
    def key(self) -> tuple[bytes, bytes, tuple[int, ...]]:
        """Equal for tables with the same contents."""
        return self.shards.tobytes() + self.strides.tobytes(), self.devices.tobytes(), self.shards.shape

    def share(self, positions: Sequence[int]) -> np.ndarray:
        """float64 [K]: what fraction of a tensor with dims at these columns one device holds."""
        product = np.ones(len(self.devices))
        for position in positions:
            if position >= 0:
                product *= self.shards[:, position]
        share: np.ndarray = 1.0 / product
        return share

    def shardings(self, positions: Sequence[int]) -> DistinctShardings:
        """The different shardings that the configurations make of a tensor whose dims are at these columns.

        Raises:
          UsageError: two dims of the tensor are at one column.
        """
        split = [position for position in positions if position >= 0]
        if len(set(split)) < len(split):  # some of its blocks would be on no device
            raise UsageError(f"a tensor has one of its layer's dims twice (numbers {split}); split it once")
        columns: list[np.ndarray] = [self.devices]
        for position in split:
            columns += [self.shards[:, position], self.strides[:, position]]
        code = np.zeros(len(self.devices), np.int64)
        for column in columns:
            _, dense = np.unique(column, return_inverse=True)
            code = code * (int(dense.max(initial=0)) + 1) + dense
            _, code = np.unique(code, return_inverse=True)
        _, first, index = np.unique(code, return_index=True, return_inverse=True)
        rows = np.ix_(first, np.array(positions, np.int64))
        return DistinctShardings(self.devices[first], self.shards[rows], self.strides[rows], index.astype(np.int32))
