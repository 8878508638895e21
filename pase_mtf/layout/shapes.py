"""A mesh implementation that computes the shapes of slices and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from pase_mtf.compat import mtf, tf
from pase_mtf.operations.protocols import HasDims, dims_in

__all__ = ["ShapeMeshImpl", "ShapeVariable", "Slices"]


class Slices:
    """One slice that stands for those of all devices.

    Attributes:
      tensor_list: the one slice.
    """

    def __init__(self, tensor_list: list[tf.Tensor]) -> None:
        self.tensor_list = tensor_list

    @classmethod
    def from_tensor_list(cls, tensor_list: list[tf.Tensor]) -> Slices:
        """As mtf's LaidOutTensor."""
        return cls(tensor_list)

    @property
    def all_slices(self) -> list[tf.Tensor]:
        """The one slice."""
        return self.tensor_list

    @property
    def slice_shape(self) -> list[int]:
        """Its shape."""
        return self.tensor_list[0].shape.as_list()

    def to_laid_out_tensor(self) -> Slices:
        """Itself."""
        return self


class ShapeVariable:
    """A variable's slice: a placeholder, never a variable."""

    def __init__(self, variable: mtf.Variable, mesh_impl: ShapeMeshImpl) -> None:
        self._shape = mesh_impl.slice_shape(variable.outputs[0].shape)
        self._done = mesh_impl.done
        self.laid_out_tensor = mesh_impl.slices(variable.slice_dtype, self._shape)
        self.copy_master_to_slices = self.copy_slices_to_master = None

    def assign_to_slices(self, assign_fn: Callable[..., tf.Operation], values: list[tf.Tensor]) -> tf.Operation:
        """Checks what would be assigned."""
        del assign_fn
        for value in values:
            if not value.shape.is_compatible_with(self._shape):
                raise ValueError(f"a slice of shape {value.shape} is assigned to one of {self._shape}")
        return self._done()


_LaidOut: TypeAlias = "Slices | mtf.ops.LazyAllreduceSum"
"""What a tensor is lowered to: its slices, or a partial sum of them."""


class ShapeMeshImpl(mtf.MeshImpl):
    """A mesh implementation that computes the shapes of slices, as strictly as PlacementMeshImpl does."""

    LaidOutTensor = Slices
    LaidOutVariable = ShapeVariable

    def __init__(self, shape: mtf.Shape, layout_rules: mtf.LayoutRules,
                 placeholders: dict[tuple[tf.DType, tuple[int, ...]], Slices] | None = None) -> None:
        """Knows the layout.

        Args:
          shape, layout_rules: as mtf.MeshImpl's.
          placeholders: slices that were made before in the current TensorFlow graph, by dtype and shape.
        """
        super().__init__(shape, layout_rules)
        self._shapes: dict[tuple[mtf.Dimension, ...], list[int]] = {}
        self._layouts: dict[tuple[mtf.Dimension, ...], mtf.TensorLayout] = {}
        self._axes: dict[str, tuple[int, int] | None] = {}
        self._placeholders = {} if placeholders is None else placeholders
        self._graph = tf.get_default_graph()
        self._done: dict[tf.Graph, tf.Operation] = {}

    def slices(self, dtype: tf.DType, shape: Sequence[int]) -> Slices:
        """Slices of a dtype and shape, of nothing in particular: the same for all that ask, in loops and outside."""
        key = dtype, tuple(shape)
        if key not in self._placeholders:
            with self._graph.as_default(), tf.control_dependencies(None):
                self._placeholders[key] = Slices([tf.placeholder(dtype, shape)])
        return self._placeholders[key]

    def done(self) -> tf.Operation:
        """An operation that does nothing: one for all assignments."""
        graph = tf.get_default_graph()
        if graph not in self._done:
            self._done[graph] = tf.no_op()
        return self._done[graph]

    def axis_number(self, name: str) -> int | None:
        """The number of the mesh axis that a dim is on."""
        return self.tensor_dimension_to_mesh_axis(mtf.Dimension(name, 0))

    def axis_of(self, name: str) -> tuple[int, int] | None:
        """The mesh axis that a dim is on: its number and its size."""
        if name not in self._axes:
            axis = self.axis_number(name)
            self._axes[name] = None if axis is None else (axis, self.shape[axis].size)
        return self._axes[name]

    def tensor_layout(self, arg: HasDims) -> mtf.TensorLayout:
        """As the parent's, remembered."""
        key = dims_in(arg)
        if key not in self._layouts:
            self._layouts[key] = super().tensor_layout(arg)
        return self._layouts[key]

    def slice_shape(self, tensor_shape: HasDims) -> list[int]:
        """As the parent's, remembered."""
        key = dims_in(tensor_shape)
        if key not in self._shapes:
            self._shapes[key] = super().slice_shape(tensor_shape)
        return list(self._shapes[key])

    def slicewise(self, fn: Callable[..., tf.Tensor | tuple[tf.Tensor, ...]],
                  *inputs: _LaidOut | tf.Tensor | float) -> Slices | tuple[Slices, ...]:
        """Calls the function on the one slice."""
        result = fn(*(x.tensor_list[0] if isinstance(x, Slices) else x
                      for x in mtf.ops.convert_args_to_laid_out_tensors(inputs)))
        if isinstance(result, tuple):
            return tuple(Slices([value]) for value in result)
        return Slices([result])

    def Print(self, x: _LaidOut, data: object, message: str, **kwargs: object) -> Slices:  # noqa: N802 (Mesh-TF's name)
        """Prints nothing."""
        del data, message, kwargs
        return x.to_laid_out_tensor()

    def allreduce(self, x: _LaidOut, mesh_axes: list[int], reduction_fn_string: str) -> _LaidOut:
        """The shape stays."""
        mtf.ops.binary_reduction_fn(reduction_fn_string)
        return Slices([tf.identity(x.to_laid_out_tensor().tensor_list[0])]) if mesh_axes else x

    def allconcat(self, x: _LaidOut, mesh_axis: int, concat_axis: int) -> Slices:
        """Joins as many slices as the axis has devices."""
        (tensor,) = x.to_laid_out_tensor().tensor_list
        return Slices([tf.concat([tensor] * self.shape[mesh_axis].size, concat_axis)])

    def alltoall(self, x: _LaidOut, mesh_axis: int, split_axis: int, concat_axis: int) -> Slices:
        """Splits, and joins as many."""
        (tensor,) = x.to_laid_out_tensor().tensor_list
        pieces = tf.split(tensor, self.shape[mesh_axis].size, axis=split_axis)
        return Slices([tf.concat(pieces, concat_axis)])

    def receive(self, x: _LaidOut, mesh_axis: int, source_pcoord: list[int | None]) -> Slices:
        """The shape stays."""
        del mesh_axis, source_pcoord
        return Slices([tf.identity(x.to_laid_out_tensor().tensor_list[0])])

    def laid_out_pnum(self) -> Slices:
        """The number of the device."""
        return Slices([tf.constant(0)])

    def random(self, shape: mtf.Shape, tf_fn: Callable[..., tf.Tensor], kwargs: Mapping[str, object]) -> Slices:
        """Random numbers for one slice."""
        return Slices([tf_fn(self.slice_shape(shape), seed=1, **kwargs)])

    def import_tf_tensor(self, x: mtf.Tensor, tf_x: tf.Tensor) -> Slices:
        """A slice of what would be imported."""
        tensor = tf.convert_to_tensor(tf_x)
        if not tensor.shape.is_fully_defined() and self.tensor_layout(x).is_fully_replicated:
            # Mesh-TF then takes it as it is; where a dim is split, it is cut to slices of known sizes.
            raise ValueError(f"a tensor of shape {tensor.shape} is imported with none of its dims split; split one, or "
                             "give it all of its sizes (tf.reshape)")
        return self.slices(tensor.dtype, self.slice_shape(x.shape))

    def export_to_tf_tensor(self, x: mtf.Tensor, laid_out_x: Slices) -> tf.Tensor:
        """A tensor of the whole shape."""
        (whole,) = self.slices(laid_out_x.tensor_list[0].dtype, x.shape.to_integer_list).tensor_list
        return whole
