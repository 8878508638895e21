"""What an operation's rule may ask of those that use it: the lowering, and the collector of stock Mesh-TF's demands.

Protocols, so that the rules know neither; `lowering.PlanLowering` and `layout.StockLegality` are what stands behind
them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, MutableMapping, Sequence
from typing import Any, Protocol, TypeAlias

from pase_mtf.compat import mtf, placement_mesh_impl, tf
from pase_mtf.graph.partition import Partition

__all__ = ["Dims", "HasDims", "LaidOut", "Lowerable", "Lowering", "StockDemands", "dims_in", "dims_of"]

Dims = tuple[tuple[str, int], ...]
"""(name, size) of the dims of a tensor."""

LaidOut: TypeAlias = placement_mesh_impl.PlacementMeshImpl.LaidOutTensor | mtf.ops.LazyAllreduceSum
"""What a tensor is lowered to: a slice per device, or a partial sum per device that nobody has needed the sum of."""


def dims_of(shape: mtf.Shape) -> Dims:
    """A shape as names and sizes."""
    return tuple(shape.dims)


HasDims: TypeAlias = mtf.Tensor | mtf.Shape | Sequence[mtf.Dimension]
"""What the methods of a mesh implementation take for a shape, as stock Mesh-TF's do."""


def dims_in(arg: HasDims) -> tuple[mtf.Dimension, ...]:
    """The dims of a tensor or a shape, or those given one by one."""
    if isinstance(arg, mtf.Tensor):
        arg = arg.shape
    return tuple(arg.dims if isinstance(arg, mtf.Shape) else arg)


class Lowerable(Protocol):
    """What Mesh-TF's own loop runs: an operation, or what stands for one.

    Attributes:
      name: of the operation.
    """

    name: str

    def lower(self, lowering: Any) -> None:
        """Sets what its outputs become."""


class Lowering(Protocol):
    """The lowering, as the rule of an operation sees it while that operation is lowered.

    Attributes:
      tensors: mtf.Tensor -> its slices in the layout of the operation that is being lowered.
      variables: variable -> its slices.
      operations: operation -> the TensorFlow operation that runs it.
      emitter: makes nodes; knows the devices.
      idle_scopes: name scopes of the nodes that nothing should wait for.
    """

    tensors: MutableMapping[mtf.Tensor, LaidOut]
    variables: dict[mtf.Operation, Any]
    operations: dict[mtf.Operation, tf.Operation]
    emitter: Any
    idle_scopes: Collection[str]

    def mesh_impl(self, m: mtf.Mesh | mtf.Operation | mtf.Tensor) -> Any:
        """The mesh implementation of an operation, or of the operation that makes a tensor."""

    def lower_operation(self, operation: mtf.Operation) -> None:
        """Lowers an operation within this one."""

    def set_tensor_lowering(self, tensor: mtf.Tensor, laid_out: LaidOut) -> None:
        """Sets what an output became."""

    def stored(self, tensor: mtf.Tensor) -> LaidOut:
        """A tensor as it was made, in the layout of the operation that made it."""

    def read(self, tensor: mtf.Tensor, impl: Any) -> LaidOut:
        """A tensor in the layout of a mesh implementation."""

    def new_value(self, variable: mtf.Variable, value: mtf.Tensor, assign_fn: Callable[..., tf.Operation],
                  ) -> tuple[Callable[..., tf.Operation], Sequence[tf.Tensor]]:
        """How the slices of a variable are assigned, and to what."""

    def read_partition(self, tensor: mtf.Tensor, target: Partition) -> list[tf.Tensor]:
        """A tensor moved to a partition: the block at every position."""

    def move(self, tensors: Sequence[tf.Tensor], source: Partition, target: Partition, shape: Sequence[int],
             ) -> list[tf.Tensor]:
        """Blocks of a tensor of this unsplit shape moved from one partition to another."""

    def assemble(self, cells: Sequence[tf.Tensor], counts: Sequence[int], device: str) -> tf.Tensor:
        """A row-major grid of cells put together on a device."""

    def random_seed(self) -> tf.Tensor:
        """Two int32 numbers that differ from step to step."""

    def add_counter(self, key: str, value: float) -> None:
        """Counts for mtf.Lowering.counters."""

    def laid_out_size(self, tensor: mtf.Tensor) -> int:
        """Elements of a tensor on all devices together, copies counted."""


class StockDemands(Protocol):
    """Collects what the operations of a graph demand of a layout under stock mtf.Lowering.

    Attributes:
      devices: p, 0 where it is not known.
      rebuilt: the graph will be built anew for the layout that is found.
    """

    devices: int
    rebuilt: bool

    def keep_whole(self, operation: mtf.Operation, names: Iterable[str], reason: str, *, known: bool = True) -> None:
        """These dims may not be split, or (not `known`) nobody knows whether they may."""

    def keep_apart(self, operation: mtf.Operation, dims: Dims, what: str) -> None:
        """No two of these dims may share a mesh axis."""

    def need_reduced(self, operation: mtf.Operation, tensor: mtf.Tensor, reason: str) -> None:
        """This tensor may not be a pending sum."""

    def refuse(self, operation: mtf.Operation, names: Iterable[str], reason: str) -> None:
        """No layout at all lowers."""

    def need_parts(self, operation: mtf.Operation, name: str, parts: int, stride: int | None = None) -> None:
        """This dim has to be split into so many parts, so many devices from one to the next (None: on any axis)."""

    def need_together(self, operation: mtf.Operation, names: tuple[str, str], parts: int) -> None:
        """These two dims have to be on one axis, of so many devices."""

    def reshape(self, operation: mtf.Operation, old: Dims, new: Dims) -> None:
        """A tensor of these dims is reshaped to those."""

    def is_used(self, tensor: mtf.Tensor) -> bool:
        """Whether anybody reads the tensor."""

    def scan(self, operation: mtf.Operation, inside: frozenset[mtf.Tensor]) -> None:
        """Looks at an operation within another, given all tensors that are made within."""
