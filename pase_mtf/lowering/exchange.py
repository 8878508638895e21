"""What crosses devices, behind one interface: copies that TensorFlow makes by itself, or collectives between processes.

The rest of the lowering asks an `Exchange`, in the same order in every process, and does not know which of the two it
is. `Copies` is that of one process; `collectives.Collectives` that of many, each with a graph of its own devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pase_mtf.compat import tf

__all__ = ["Copies", "Exchange"]


class Exchange(Protocol):
    """Takes tensors from the devices that hold them to those that use them.

    Attributes:
      has_hubs: whether what many need is best made by one of them, from which the others read it; else all make it, of
        what they have gathered in one go.
    """

    has_hubs: bool

    def bring(self, device: str, x: tf.Tensor) -> tf.Tensor:
        """The tensor on a device: itself where it is there."""

    def all_gather(self, devices: Sequence[str], xs: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
        """Gives every device all tensors.

        Args:
          devices: of the group.
          xs: a tensor per device, of one shape.

        Returns:
          Per device: the tensors of all, in the order of the devices.
        """

    def all_to_all(self, devices: Sequence[str], rows: Sequence[Sequence[tf.Tensor]]) -> list[list[tf.Tensor]]:
        """Gives every device its piece of each.

        Args:
          devices: of the group.
          rows: per device, a piece for every device.

        Returns:
          Per device: its pieces, in the order of the devices that they come from.
        """

    def all_reduce(self, devices: Sequence[str], xs: Sequence[tf.Tensor], kind: str) -> list[tf.Tensor] | None:
        """The elementwise "SUM", "MAX" or "MIN" on every device, in an order that does not differ from step to step.

        Returns:
          None where it is to be made of the others.
        """


class Copies:
    """All devices belong to one process: TensorFlow copies a tensor to the device of its consumer by itself."""

    has_hubs = True

    def bring(self, device: str, x: tf.Tensor) -> tf.Tensor:
        """The tensor itself."""
        return x

    def all_gather(self, devices: Sequence[str], xs: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
        """The tensors themselves."""
        return [list(xs) for _ in devices]

    def all_to_all(self, devices: Sequence[str], rows: Sequence[Sequence[tf.Tensor]]) -> list[list[tf.Tensor]]:
        """The pieces themselves."""
        return [[row[number] for row in rows] for number in range(len(devices))]

    def all_reduce(self, devices: Sequence[str], xs: Sequence[tf.Tensor], kind: str) -> list[tf.Tensor] | None:
        """None: TensorFlow has nothing for devices of one graph."""
        return None
