"""What measuring gives and fitting takes: operations, all-reduces and training steps with their seconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.graph.configurations import Configuration

__all__ = ["CollectiveSample", "OperationSample", "Samples", "Step"]


@dataclasses.dataclass(frozen=True)
class OperationSample:
    """One kind of operation at one size.

    Attributes:
      flops, nbytes: work of one node, tensors it reads and writes.
      read: of these bytes, those it reads.
      seconds: that each node took while all devices were busy (of shared cores: its share).
      channels: of a convolution, those it makes.
      image_ratio: of the gradient of a convolution's image, image size / output size.
      taps: of a convolution, the pixels that it makes times those of its window.
      broadcast_runs: of an elementwise operation, the broadcast runs of a smaller tensor.
    """

    flops: float
    nbytes: float
    read: float
    seconds: float
    channels: int = 0
    image_ratio: float = 1.0
    taps: float = 0.0
    broadcast_runs: float = 0.0


@dataclasses.dataclass(frozen=True)
class CollectiveSample:
    """An all-reduce: group size, bytes per device, seconds of all groups together."""

    group: int
    nbytes: float
    seconds: float


@dataclasses.dataclass
class Samples:
    """Everything that was measured of single operations and collectives, by name.

    Attributes:
      operations: kinds of operation that have a rate, "traffic" (elementwise operations in a row), "node" (operations
        of next to no work), "broadcast" (of a smaller tensor over a larger), "read" and "cached read" (products that
        take what reading their weights takes, for the first time and again).
      collectives: "all-reduce" (of our lowering) and "ring" (Mesh-TF's own).
    """

    operations: dict[str, list[OperationSample]] = dataclasses.field(default_factory=dict)
    collectives: dict[str, list[CollectiveSample]] = dataclasses.field(default_factory=dict)

    def add(self, name: str, sample: OperationSample | CollectiveSample) -> None:
        """Adds a sample."""
        if isinstance(sample, CollectiveSample):
            self.collectives.setdefault(name, []).append(sample)
        else:
            self.operations.setdefault(name, []).append(sample)

    def update(self, other: Samples) -> None:
        """Adds all samples of another measurement."""
        for name, operations in other.operations.items():
            self.operations.setdefault(name, []).extend(operations)
        for name, collectives in other.collectives.items():
            self.collectives.setdefault(name, []).extend(collectives)

    def to_json(self) -> dict[str, list[dict[str, Any]]]:
        """Name -> the samples' fields."""
        named: dict[str, Sequence[OperationSample | CollectiveSample]] = {**self.operations, **self.collectives}
        return {name: [dataclasses.asdict(sample) for sample in found] for name, found in named.items()}

    @classmethod
    def from_json(cls, data: dict[str, list[dict[str, Any]]]) -> Samples:
        """The reverse of `to_json`."""
        result = cls()
        for name, found in data.items():
            for fields in found:
                result.add(name, CollectiveSample(**fields) if "group" in fields else OperationSample(**fields))
        return result


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step: what was trained, how it was split, and how long it took."""

    graph: ComputationGraph
    configurations: tuple[Configuration, ...]
    seconds: float
