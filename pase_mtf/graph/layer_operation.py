"""One operation of a layer, as costs and searches know it: its tensors by the layer's dims, and what it sums."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from pase_mtf.graph.looked_up import LookedUp
from pase_mtf.graph.spans import Held

__all__ = ["DRAWN", "PHASES", "REPEAT", "ROLES", "SUM", "TOP_K", "LayerOperation", "Operand"]

PHASES = ("forward", "backward", "update")
"""Of a training step, in their order."""
TOP_K = "top-k"
"""The role of what finds the largest elements along a dim: where that is split every device gets what all have found,
and chooses among it."""
SUM, REPEAT = "sum", "repeat"
"""The roles of what sums (or takes the maximum, say) along dims, and of what repeats a tensor along dims: of a single
element along these, and once, that is what is given."""
DRAWN = "drawn"
"""The role of random numbers: devices that share a memory share in drawing them."""
ROLES = ("", "convolution", "filter gradient", "image gradient", "transposed convolution", "rename", "shift", TOP_K,
         SUM, REPEAT, DRAWN)
"""What an operation does that others of its kind do not (`LayerOperation.role`); "" for most."""


@dataclasses.dataclass(frozen=True, slots=True)
class Operand:
    """A tensor as one operation (or edge end) of a layer sees it.

    Attributes:
      dims: the layer's dim name for every dim of the tensor; "" where that dim is never split.
      shape: the size of every dim, unsplit.
      itemsize: bytes per element.
    """

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    itemsize: int = 4

    def without(self, numbers: Collection[int]) -> Operand:
        """It without those of its dims that have these numbers."""
        kept = [number for number in range(len(self.dims)) if number not in numbers]
        return Operand(tuple(self.dims[number] for number in kept), tuple(self.shape[number] for number in kept),
                       self.itemsize)


@dataclasses.dataclass(frozen=True, slots=True)
class LayerOperation:
    """One Mesh-TF operation of a layer.

    Attributes:
      index: position of the operation in `operations.flow.all_operations`: as in `mtf.Graph.operations`, with those in
        a loop before the loop.
      name: its Mesh-TF name (not unique: recompute repeats names).
      type: its class name.
      phase: "forward", "backward" or "update".
      kind: what it is on the device: "matmul", "convolution", "reduction", "pointwise", "gather", or "none" (costs
        nothing: variables, constants, the import of a feed).
      flops: floating point operations of the whole, unsplit operation.
      dims: the dims whose split divides the work (the operation's iteration space, restricted to the layer's dims).
      inputs, outputs: its tensors.
      reduced: the dims whose split leaves every device with a partial sum, to be combined by an all-reduce of the
        outputs over the devices that differ in these dims; of a top-k, by giving each of them the outputs of all; of a
        reshape that makes one of these dims, by summing what it reads, of which every device then needs a part.
        Charged where the all-reduce really happens: a chain of pending sums counts once, at its end.
      shift: (dim, by how many elements) of a shift along a dim that may be split; else empty.
      nodes: how many nodes it becomes on a device.
      traffic: bytes that these read and write, as a multiple of the bytes of the inputs and outputs.
      broadcast_runs: over how many runs of elements that lie side by side these broadcast a tensor of fewer dims,
        unsplit and summed over the nodes.
      role: one of `ROLES`: what a cost model has to know besides the kind. A convolution, the gradient of its filter or
        of its image, a transposed convolution; a reshape ("rename"); a shift along a dim; and others. Follows from the
        class of the operation, as the other facts do, and is no part of the graph's hash.
      partial_sums: `reduced` of every output, where they differ (then `reduced` is empty); else empty. No part of the
        graph's hash either.
      trips: how often a step runs it, in a loop. Its other numbers are of once. Files leave it out where it is 1.
      held: when the outputs, and what is made besides, are there. Empty where nothing is made. No part of the graph's
        hash.
      pending_outputs: the numbers of the outputs whose partial sums go as they are over the one edge that takes them
        (`Edge.pending`). No part of the graph's hash.
      added_outputs: those of them that are added to partial sums there (`Edge.added_to`). No part of the graph's hash.
      looked_up: of a product of one-hot vectors whose only output is held in part where these are split, and of an
        addition of such, what the sum consists of (`graph.looked_up`); where it is not summed but added into another
        that is (`reduced` is empty), what that one does. Else empty. No part of the graph's hash.
      broadcast_after: where the outputs are held in part, the numbers of their dims that they get after the sum, which
        is of fewer. No part of the graph's hash.
      summed_again: how often stock Mesh-TensorFlow makes the sums of the outputs again, of views of their parts; -1:
        it never makes them, but adds the parts to others. No part of the graph's hash.
      repeats: whether it does the same to the same tensors as one before it in its layer: TensorFlow runs the first for
        both. No part of the graph's hash.
    """

    index: int
    name: str
    type: str
    phase: str
    kind: str
    flops: float
    dims: tuple[str, ...]
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    reduced: tuple[str, ...] = ()
    shift: tuple[str, int] | tuple[()] = ()
    nodes: int = 1
    traffic: float = 1.0
    broadcast_runs: float = dataclasses.field(default=0.0, metadata={"key": "rows"})
    role: str = dataclasses.field(default="", metadata={"hashed": False})
    partial_sums: tuple[tuple[str, ...], ...] = dataclasses.field(default=(), metadata={"hashed": False})
    trips: int = dataclasses.field(default=1, metadata={"optional": True})
    held: tuple[Held, ...] = dataclasses.field(default=(), metadata={"optional": True, "hashed": False})
    pending_outputs: tuple[int, ...] = dataclasses.field(
        default=(), metadata={"optional": True, "hashed": False, "key": "handed_on"})
    added_outputs: tuple[int, ...] = dataclasses.field(
        default=(), metadata={"optional": True, "hashed": False, "key": "added_on"})
    looked_up: LookedUp | tuple[()] = dataclasses.field(default=(), metadata={"optional": True, "hashed": False})
    broadcast_after: tuple[int, ...] = dataclasses.field(default=(), metadata={"optional": True, "hashed": False})
    summed_again: int = dataclasses.field(default=0, metadata={"optional": True, "hashed": False})
    repeats: bool = dataclasses.field(default=False, metadata={"optional": True, "hashed": False})

    @property
    def sums(self) -> tuple[tuple[tuple[str, ...], tuple[Operand, ...]], ...]:
        """(dims whose split leaves partial sums, tensors of which) for every all-reduce that may be due."""
        if self.partial_sums:
            each = zip(self.partial_sums, self.summed, strict=True)
            return tuple((dims, (tensor,)) for dims, tensor in each if dims)
        if self.sums_inputs:
            return ((self.reduced, self.inputs),)
        return tuple((self.reduced, outputs) for outputs in self._outputs_by_way.values()) if self.reduced else ()

    @property
    def summed(self) -> tuple[Operand, ...]:
        """What is summed for its outputs, where a split leaves them in part."""
        if self.sums_inputs:
            return self.inputs
        if not self.broadcast_after:
            return self.outputs
        return tuple(output.without(self.broadcast_after) for output in self.outputs)

    @property
    def sums_inputs(self) -> bool:
        """Whether it is a reshape that makes a dim whose split leaves what it reads as partial sums: its output is
        split along that, and no partial sum."""
        return self.role == "rename" and any(name in self.reduced for output in self.outputs for name in output.dims)

    @property
    def sums_pending(self) -> tuple[bool, ...]:
        """Of every entry of `sums`, whether it stays pending."""
        return tuple(pending for pending, _ in self._ways)

    @property
    def sums_added(self) -> tuple[bool, ...]:
        """Of every entry of `sums`, whether it is added to partial sums of another layer."""
        return tuple(added for _, added in self._ways)

    def _way(self, output: int) -> tuple[bool, bool]:
        return output in self.pending_outputs, output in self.added_outputs

    @property
    def _ways(self) -> tuple[tuple[bool, bool], ...]:
        """Of every entry of `sums`: whether it stays pending, and whether it is added to partial sums elsewhere."""
        if self.partial_sums:
            return tuple(self._way(number) for number, dims in enumerate(self.partial_sums) if dims)
        return tuple(self._outputs_by_way) if self.reduced else ()

    @property
    def _outputs_by_way(self) -> dict[tuple[bool, bool], tuple[Operand, ...]]:
        """Whether they stay pending, and are added to partial sums elsewhere -> what is summed for the outputs of which
        that is so, where there are such."""
        found: dict[tuple[bool, bool], tuple[Operand, ...]] = {}
        for number, tensor in enumerate(self.summed):
            found[self._way(number)] = (*found.get(self._way(number), ()), tensor)
        return found
