"""What an operation's rule may ask of those that use it: the lowering, and the collector of stock Mesh-TF's demands.

Protocols, so that the rules know neither; `lowering.PlanLowering` and `layout.StockLegality` are what stands behind
them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Mapping, MutableMapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from pase_mtf.compat import mtf, placement_mesh_impl, tf
from pase_mtf.graph.looked_up import LookedUp
from pase_mtf.graph.partition import Partition

__all__ = ["Dims", "Emitter", "HasDims", "LaidOut", "Lowerable", "Lowering", "Mesh", "StockDemands",
           "SummedRows", "dims_in", "dims_of"]

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


class SummedRows(NamedTuple):
    """A sum of rows at indices, which an operation makes as a product of one-hot vectors.

    Attributes:
      output: the sum.
      one_hot: the operation that makes the vectors, of indices.
      rows: a row for every index: its tensor has the dims of the indices, and those of the output but `dim`.
      dim: of the output, along which the indices are positions.
      looked_up: the same without names.
    """

    output: mtf.Tensor
    one_hot: mtf.Operation
    rows: mtf.Tensor
    dim: mtf.Dimension
    looked_up: LookedUp

    @property
    def indices(self) -> mtf.Tensor:
        """Position of every row."""
        return self.one_hot.inputs[0]


class Lowerable(Protocol):
    """What Mesh-TF's own loop runs: an operation, or what stands for one.

    Attributes:
      name: of the operation.
    """

    name: str

    def lower(self, lowering: mtf.Lowering) -> None:
        """Sets what its outputs become."""


class Emitter(Protocol):
    """Makes TensorFlow nodes.

    Attributes:
      devices: names of all devices.
      shared: whether they share a memory.
      first_devices: of every process, where each has a graph of its own; None: there is one graph.
    """

    devices: tuple[str, ...]
    shared: bool

    @property
    def first_devices(self) -> tuple[int, ...] | None:
        """See the class."""

    def per_device(self, devices: Sequence[str], fn: Callable, columns: Sequence[Sequence[object]]) -> list[tf.Tensor]:
        """The results of fn(device, ...) on every device with its row of the columns."""

    def run_on(self, device: str, fn: Callable, *xs: object) -> tf.Tensor:
        """The result of fn(...) on one device."""

    def after(self, control: Iterable[object]) -> contextlib.AbstractContextManager:
        """What is made in this context waits for tensors and operations."""

    def use(self, xs: Iterable[tf.Tensor]) -> Sequence[tf.Operation]:
        """Tells that an assignment takes these as they are; what it has to wait for besides."""

    def group(self, operations: Sequence[tf.Operation]) -> tf.Operation:
        """One operation that runs all of them."""

    def while_loop(self, condition: Callable, body: Callable, starts: Sequence[Sequence[tf.Tensor]],
                   devices: Sequence[Sequence[str]], options: Mapping[str, object]) -> Sequence[Sequence[tf.Tensor]]:
        """A loop over lists of slices, that of a list on its devices."""

    def constant(self, device: str, value: float | tuple[float, ...], dtype: tf.DType = ...,
                 shape: Sequence[int] | None = None) -> tf.Tensor:
        """A constant on a device, made once."""

    def slice(self, device: str, x: tf.Tensor, begin: Sequence[int], size: Sequence[int]) -> tf.Tensor:
        """A region of x."""

    def reshape(self, device: str, x: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
        """x in another shape."""

    def transpose(self, device: str, x: tf.Tensor, perm: Sequence[int]) -> tf.Tensor:
        """x with its dims in another order."""

    def broadcast(self, device: str, x: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
        """x repeated to a shape."""

    def reduce(self, device: str, x: tf.Tensor, axes: Sequence[int], kind: str) -> tf.Tensor:
        """x without these dims: their "SUM", "MAX" or "MIN"."""


class Devices(Protocol):
    """Which devices a mesh is laid over.

    Attributes:
      devices: their numbers, in the order of the mesh's processors.
    """

    @property
    def devices(self) -> tuple[int, ...]:
        """See the class."""


class Mesh(Protocol):
    """The mesh implementation of an operation, which knows how its tensors are laid out, one slice per device.

    Attributes:
      emitter: makes its nodes.
      devices: their names.
      size: how many they are.
      spec: where they stand among all devices.
      LaidOutTensor, LaidOutVariable: as of mtf.MeshImpl.
    """

    emitter: Emitter
    spec: Devices
    LaidOutTensor: Callable[[list[tf.Tensor]], LaidOut]
    LaidOutVariable: Callable[..., SlicedVariable]

    @property
    def devices(self) -> list[str]:
        """See the class."""

    @property
    def size(self) -> int:
        """See the class."""

    def tensor_layout(self, arg: HasDims) -> mtf.TensorLayout:
        """The mesh axis of every dim, or None."""

    def slice_shape(self, tensor_shape: HasDims) -> list[int]:
        """The shape of every slice."""

    def slice_begin(self, tensor_shape: HasDims, pnum: int) -> list[int]:
        """Where the slice of a processor begins."""

    def laid_out_size(self, tensor_shape: mtf.Shape) -> int:
        """Elements on all processors together, copies counted."""

    def partition(self, shape: mtf.Shape) -> Partition:
        """Which block of a tensor of this shape each processor holds."""

    def strides(self, mesh_axes: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """(size, stride over the processors) of mesh axes."""

    def axes_with(self, strides: Sequence[tuple[int, int]]) -> list[int] | None:
        """The mesh axes with these (size, stride); None where the mesh has no such axis."""

    def slicewise(self, fn: Callable, *inputs: LaidOut | tf.Tensor) -> LaidOut:
        """Calls fn once per processor, on its device."""

    def per_device(self, fn: Callable, *columns: Sequence[object]) -> LaidOut:
        """Calls fn(device, ...) once per processor, on its device, with its row of the columns."""

    def slicewise_delay_allreduce(self, fn: Callable, *inputs: LaidOut) -> LaidOut:
        """Slicewise; of partial sums over the same axes the output is one."""

    def allreduce(self, x: LaidOut, mesh_axes: Sequence[int], reduction_fn_string: str) -> LaidOut:
        """What the processors along these axes hold, reduced."""

    def combine_slices(self, slices: Sequence[tf.Tensor], tensor_shape: mtf.Shape, device: str | None = None,
                       ) -> tf.Tensor:
        """All of a tensor on a device; in every process, where each has a graph of its own."""

    def broadcast_impl(self, old_slices: LaidOut, old_shape: mtf.Shape, new_shape: mtf.Shape) -> LaidOut:
        """Slices of one shape broadcast to another."""

    def expand(self, device: str, x: tf.Tensor, old_shape: mtf.Shape, new_shape: mtf.Shape) -> tf.Tensor:
        """A slice of one shape with the order and the number of dims of another."""

    def import_tf_tensor(self, x: mtf.Tensor, tf_x: tf.Tensor) -> LaidOut:
        """The slices of a whole tensor."""


class SlicedVariable(Protocol):
    """The slices of a variable."""

    def read(self) -> list[tf.Tensor]:
        """The value of every slice, read once."""

    def read_again(self) -> list[tf.Tensor]:
        """The value of every slice, read now."""

    def read_besides(self) -> list[tf.Tensor]:
        """The value of every slice, read once more; updates that are made later follow it."""

    def read_so_far(self) -> list[tf.Tensor]:
        """What `read_besides` has read in the current scope."""

    def is_updated(self) -> bool:
        """Whether an update was made before in the current scope, or in a loop within it."""

    def hold(self, values: list[tf.Tensor]) -> None:
        """Who reads it once more in the current scope reads these."""

    def held(self) -> list[tf.Tensor] | None:
        """What `hold` was given in the current scope, if it was."""

    def read_anew(self) -> list[tf.Tensor]:
        """The value of every slice at the beginning of the current scope."""

    def activation(self, values: Sequence[tf.Tensor]) -> LaidOut:
        """What was read, in the type that the model computes with."""

    def updates(self, assign_fn: Callable[..., tf.Operation], values: Sequence[tf.Tensor],
                idle: Container[str] = ()) -> list[tf.Operation]:
        """Assigns the slices."""


class Lowering(Protocol):
    """The lowering, as the rule of an operation sees it while that operation is lowered.

    Attributes:
      tensors: mtf.Tensor -> its slices in the layout of the operation that is being lowered.
      variables: variable -> its slices.
      operations: operation -> the TensorFlow operation that runs it.
      emitter: makes nodes; knows the devices.
    """

    tensors: MutableMapping[mtf.Tensor, LaidOut]
    variables: MutableMapping[mtf.Operation, SlicedVariable]
    operations: dict[mtf.Operation, tf.Operation]
    emitter: Emitter

    def mesh_impl(self, m: mtf.Mesh | mtf.Operation | mtf.Tensor) -> Mesh:
        """The mesh implementation of an operation, or of a tensor as `tensors` has it."""

    def producer_impl(self, tensor: mtf.Tensor) -> Mesh:
        """The mesh implementation of the operation that makes a tensor."""

    def lower_operation(self, operation: mtf.Operation) -> None:
        """Lowers an operation within this one."""

    def not_waited_for(self, assignment: mtf.Operation) -> Container[str]:
        """Names of the nodes that an assignment does not wait for, though they hold what it changes."""

    def set_tensor_lowering(self, tensor: mtf.Tensor, laid_out: LaidOut) -> None:
        """Sets what an output became."""

    def stored(self, tensor: mtf.Tensor) -> LaidOut:
        """A tensor as it was made, in the layout of the operation that made it."""

    def read(self, tensor: mtf.Tensor, impl: Mesh) -> LaidOut:
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

    def sum_of_rows(self, found: SummedRows, mesh_axes: Sequence[int], make_parts: Callable[[], LaidOut],
                    count: Callable[[], None]) -> mtf.ops.LazyAllreduceSum | None:
        """A pending sum for which devices give each other rows; None where parts of the sum are less."""

    def added_rows(self, one: LaidOut, other: LaidOut) -> mtf.ops.LazyAllreduceSum | None:
        """The sum of two such sums as one; None where they are others, or parts of it are less than rows of both."""

    def added_parts(self, addition: mtf.Operation, xs: Sequence[LaidOut]) -> mtf.ops.LazyAllreduceSum | None:
        """The sum of two tensors as a pending sum where only one of them is pending, or each over axes of its own; None
        where it does not stay pending."""

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

    def need_shards(self, operation: mtf.Operation, name: str, shards: int, stride: int | None = None) -> None:
        """This dim has to be split into so many shards, so many devices from one to the next (None: on any axis)."""

    def need_together(self, operation: mtf.Operation, names: tuple[str, str], shards: int) -> None:
        """These two dims have to be on one axis, of so many devices."""

    def reshape(self, operation: mtf.Operation, old: Dims, new: Dims) -> None:
        """A tensor of these dims is reshaped to those."""

    def is_used(self, tensor: mtf.Tensor) -> bool:
        """Whether anybody reads the tensor."""

    def ways(self, source: mtf.Tensor, targets: Iterable[mtf.Tensor]) -> list[tuple[mtf.Operation, mtf.Tensor]]:
        """The ways by which tensors are made of another one, as far as not told yet (`operations.flow.Ways`)."""

    def need_no_copies(self, operation: mtf.Operation, dims: Dims, reason: str) -> None:
        """No two devices may hold the same block of a tensor of these dims."""

    def counts_twice(self, operation: mtf.Operation, through: mtf.Operation | None) -> None:
        """The gradient of an operation by an input that another one is made of counts what comes through here twice,
        under no split, too; None: it has one input twice."""

    def scan(self, operation: mtf.Operation, inside: frozenset[mtf.Tensor]) -> None:
        """Looks at an operation within another, given all tensors that are made within."""
