"""How single Mesh-TF operations are lowered where Mesh-TF's own `lower` would be wrong or makes many nodes.

Wrong under a plan: variables (read once per step), assignments (in the layout of their variable), reshapes (a dim that
moves between mesh axes), one-hot of int64 indices, generic gradients, loops, random numbers that depend on the slicing.
Wasteful: whatever expands dims or reduces.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pase_mtf.compat import mtf, tf
from pase_mtf.errors import UsageError
from pase_mtf.graph.partition import Partition, translate, volume
from pase_mtf.lowering.loop import lower_while
from pase_mtf.lowering.random import lower_random
from pase_mtf.lowering.reshard import move

if TYPE_CHECKING:
    from pase_mtf.lowering.lowering import PlanLowering

__all__ = ["rule_for"]

_ops = mtf.ops


def _variable(op: mtf.Variable, lowering: PlanLowering) -> None:
    impl = lowering.mesh_impl(op)
    laid_out = impl.LaidOutVariable(op, impl)
    lowering.variables[op] = laid_out
    lowering.set_tensor_lowering(op.outputs[0], laid_out.activation(laid_out.read()))
    kind = "trainable" if op.trainable else "untrainable"
    lowering.add_counter(f"variables/{kind}", op.outputs[0].size)


def _read_variable(op: mtf.ops.ReadVariable, lowering: PlanLowering) -> None:
    laid_out = lowering.variables[op._var]
    lowering.set_tensor_lowering(op.outputs[0], laid_out.activation(laid_out.read_again()))


def _assign(op: mtf.ops.Assign, lowering: PlanLowering) -> None:
    """Every pair in the layout of its variable: there the slices are."""
    updates = []
    for variable, value in zip(op.variables, op.inputs, strict=True):
        laid_out = lowering.read(value, lowering.mesh_impl(variable)).to_laid_out_tensor()
        updates += lowering.variables[variable].updates(op.assign_fn, laid_out.all_slices, lowering.idle_scopes)
    lowering.operations[op] = tf.group(updates)


def _depend(op: mtf.ops.Depend, lowering: PlanLowering) -> None:
    control = []
    for dependency in op._dependencies:
        if isinstance(dependency, mtf.Operation):
            control.append(lowering.operations[dependency])
        else:
            control.extend(lowering.stored(dependency).to_laid_out_tensor().tensor_list)
    # What is resharded for x is shared with others, who do not wait.
    x = lowering.tensors[op.inputs[0]].to_laid_out_tensor()
    with tf.control_dependencies(control):
        lowering.set_tensor_lowering(op.outputs[0], lowering.mesh_impl(op).slicewise(tf.identity, x))


def _generic_gradient(op: mtf.ops.GenericGradOperation, lowering: PlanLowering) -> None:
    """Differentiates the very tensors of the forward operation, whose mesh implementation it shares."""
    impl, forward = lowering.mesh_impl(op), op._forward_op

    def lists(tensors: list[mtf.Tensor]) -> list[tuple[tf.Tensor, ...]]:
        return list(zip(*(lowering.tensors[t].to_laid_out_tensor().tensor_list for t in tensors), strict=True))

    def gradient(_: str, ys: Any, xs: Any, grad_ys: Any) -> tuple[tf.Tensor, ...]:
        return tuple(tf.gradients(
            ys=list(ys), xs=list(xs), grad_ys=list(grad_ys), stop_gradients=list(xs),
            unconnected_gradients=tf.UnconnectedGradients.ZERO))

    gradients = impl.per_device(gradient, lists(forward.outputs), lists(forward.inputs), lists(op._grad_ys))
    split = {axis for y in forward.outputs for axis in impl.tensor_layout(y) if axis is not None}
    for x, output, laid_out in zip(forward.inputs, op.outputs, gradients, strict=True):
        # An input that all parts of a split dim have used receives a part of its gradient from each of them.
        partial = sorted(split - set(impl.tensor_layout(x)))
        if partial:
            laid_out = _ops.LazyAllreduceSum(impl, laid_out, partial)
        lowering.set_tensor_lowering(output, laid_out)


def _binary(op: mtf.ops.BinaryOpWithBroadcasting, lowering: PlanLowering) -> None:
    impl, output = lowering.mesh_impl(op), op.outputs[0]
    xs, whole = [], []
    for x in op.inputs:
        laid_out = lowering.tensors[x]
        if x.shape != output.shape:
            whole.append(x.shape)
            laid_out = impl.per_device(
                lambda device, value, shape=x.shape: impl.expand(device, value, shape, output.shape),
                laid_out.to_laid_out_tensor().tensor_list)
        xs.append(laid_out)
    if op._tf_fn is tf.add and not whole:
        result = impl.slicewise_delay_allreduce(op._tf_fn, *xs)
    else:
        result = impl.slicewise(op._tf_fn, *xs)
        if len(whole) == 2:
            # Neither had all dims: leading dims that were left out may still be lacking.
            sizes = impl.slice_shape(output.shape)
            result = impl.per_device(
                lambda device, value: lowering.emitter.broadcast(device, value, sizes), result.tensor_list)
    lowering.set_tensor_lowering(output, result)


def _scalar(op: Any, lowering: PlanLowering) -> None:
    """Multiplies by or adds a scalar."""
    impl, x = lowering.mesh_impl(op), lowering.tensors[op.inputs[0]].to_laid_out_tensor()
    dtype, scalar = op.inputs[0].dtype, op._scalar
    known = isinstance(scalar, numbers.Real) and dtype.is_floating
    emit = tf.multiply if isinstance(op, _ops.ScalarMultiplyOperation) else tf.add

    def tf_fn(device: str, value: tf.Tensor) -> tf.Tensor:
        return emit(value, lowering.emitter.constant(device, float(scalar), dtype) if known else scalar)

    lowering.set_tensor_lowering(op.outputs[0], impl.per_device(tf_fn, x.tensor_list))


def _constant(op: mtf.ops.Constant, lowering: PlanLowering) -> None:
    impl, output = lowering.mesh_impl(op), op.outputs[0]
    shape = tuple(impl.slice_shape(output.shape))
    if not isinstance(op._value, (numbers.Real, bool)):
        op.lower(lowering)
        return
    lowering.set_tensor_lowering(output, impl.per_device(
        lambda device: lowering.emitter.constant(device, op._value, output.dtype, shape)))


def _range(op: mtf.ops.RangeOperation, lowering: PlanLowering) -> None:
    impl, output = lowering.mesh_impl(op), op.outputs[0]
    partition = impl.partition(output.shape)
    (size,) = partition.block_shape(output.shape.to_integer_list)
    lowering.set_tensor_lowering(output, impl.LaidOutTensor([
        lowering.emitter.constant(
            device, tuple(range(size * partition.parts(position)[0], size * (partition.parts(position)[0] + 1))),
            output.dtype)
        for position, device in enumerate(impl.devices)]))


def _one_hot(op: mtf.ops.OneHotOperation, lowering: PlanLowering) -> None:
    """Mesh-TF subtracts an int32 offset, which fails for int64 indices; here the offset is a number."""
    impl, output, indices = lowering.mesh_impl(op), op.outputs[0], op.inputs[0]
    depth = impl.slice_shape(output.shape)[-1]
    partition = impl.partition(output.shape)
    offsets = [partition.parts(position)[-1] * depth for position in range(impl.size)]
    emitter = lowering.emitter

    def tf_fn(device: str, value: tf.Tensor, offset: int) -> tf.Tensor:
        if offset:
            value = tf.subtract(value, emitter.constant(device, offset, indices.dtype))
        return tf.raw_ops.OneHot(
            indices=value, depth=emitter.constant(device, depth), on_value=scalar(device, op._on_value),
            off_value=scalar(device, op._off_value), axis=-1)

    def scalar(device: str, value: Any) -> tf.Tensor:
        if isinstance(value, (numbers.Real, bool)):
            return emitter.constant(device, value, op._dtype)
        return tf.cast(value, op._dtype)

    laid_out = lowering.tensors[indices].to_laid_out_tensor()
    lowering.set_tensor_lowering(output, impl.per_device(tf_fn, laid_out.tensor_list, offsets))


def _reduction(impl: Any, old: mtf.Shape, new: mtf.Shape, kind: str) -> tuple[Callable, list[int]]:
    """A function (device, slice) that reduces from one shape to another, and the mesh axes left to be reduced."""
    axes = [k for k, dim in enumerate(old.dims) if dim not in new.dims]
    kept = [dim for dim in old.dims if dim in new.dims]
    perm = [kept.index(dim) for dim in new.dims]
    layout = impl.tensor_layout(old)

    def tf_fn(device: str, x: tf.Tensor) -> tf.Tensor:
        return impl.emitter.transpose(device, impl.emitter.reduce(device, x, axes, kind), perm)

    return tf_fn, [layout[k] for k in axes if layout[k] is not None]


def _reduce(op: mtf.ops.ReduceOperation, lowering: PlanLowering) -> None:
    impl, output, kind = lowering.mesh_impl(op), op.outputs[0], op._reduction_fn_string
    tf_fn, axes = _reduction(impl, op.inputs[0].shape, output.shape, kind)
    y = impl.per_device(tf_fn, lowering.tensors[op.inputs[0]].to_laid_out_tensor().tensor_list)
    if axes:
        def count() -> None:
            lowering.add_counter(f"allreduce/{axes}/reduce_op", lowering.laid_out_size(output))
        if kind == "SUM":
            y = _ops.LazyAllreduceSum(impl, y, axes, add_counter_fn=count)
        else:
            y = impl.allreduce(y, axes, kind)
            count()
    lowering.set_tensor_lowering(output, y)


def _einsum(op: mtf.ops.EinsumOperation, lowering: PlanLowering) -> None:
    impl, output = lowering.mesh_impl(op), op.outputs[0]
    shapes = [x.shape for x in op.inputs]
    used = {dim for shape in shapes for dim in shape.dims}
    # The output may have dims that no input has: they are broadcast at the end.
    inner = mtf.Shape([dim for dim in output.shape.dims if dim in used])
    full = next((shape for shape in [*shapes, inner] if len(shape) == len(used)), None)
    space = full or mtf.Shape(sorted(used))
    reduce_fn, axes = _reduction(impl, space, inner, "SUM")
    columns = [lowering.tensors[x].to_laid_out_tensor().tensor_list for x in op.inputs]
    if full is None and op.inputs[0].dtype.is_floating:
        # The operand that has the output's leading dim comes first: otherwise TensorFlow's einsum makes the product
        # the other way round and transposes it, which for a weight gradient takes several times as long as the product.
        lead = next((dim for dim in inner.dims if sum(dim in shape.dims for shape in shapes) == 1), None)
        if len(shapes) == 2 and lead in shapes[1].dims:
            shapes, columns = shapes[::-1], columns[::-1]
        equation = _ops._einsum_equation(shapes, inner)

        def tf_fn(device: str, *xs: tf.Tensor) -> tf.Tensor:
            if len(xs) > 2:
                return tf.einsum(equation, *xs)
            return tf.raw_ops.Einsum(inputs=list(xs), equation=equation)
    else:
        # One tensor spans the whole iteration space: multiply and reduce.
        sizes = impl.slice_shape(space)

        def tf_fn(device: str, *xs: tf.Tensor) -> tf.Tensor:
            product = None
            for x, shape in zip(xs, shapes, strict=True):
                x = impl.expand(device, x, shape, space)
                product = x if product is None else tf.multiply(product, x)
            return reduce_fn(device, lowering.emitter.broadcast(device, product, sizes))
    y = impl.per_device(tf_fn, *columns)
    if axes:
        def count() -> None:
            lowering.add_counter(f"allreduce/{axes}/einsum_op", impl.laid_out_size(inner))
        y = _ops.LazyAllreduceSum(impl, y, axes, add_counter_fn=count)
    if inner != output.shape:
        y = impl.broadcast_impl(y, inner, output.shape)
    lowering.set_tensor_lowering(output, y)
    lowering.add_counter("einsum", impl.laid_out_size(space))
    lowering.add_counter("einsum_unique", space.size)


def _pool_backward(op: mtf.ops.PoolBackPropOperation, lowering: PlanLowering) -> None:
    """The gradient of a pooling whose windows do not overlap, by broadcasting over the windows.

    As in Mesh-TF, every element of a window that equals its maximum receives the whole gradient.
    """
    if len(op._ksize) == 3:
        # TensorFlow broadcasts over five dims at most.
        op.lower(lowering)
        return
    impl, (x, _, _), window = lowering.mesh_impl(op), op.inputs, op._ksize
    shape, emitter, rank = impl.slice_shape(x.shape), lowering.emitter, len(op._ksize)
    lead, spatial, channels = shape[:-1 - rank], shape[-1 - rank:-1], shape[-1:]
    if any(size % extent for size, extent in zip(spatial, window, strict=True)):
        raise UsageError(f"{op.name}: pooling windows {tuple(window)} do not divide {x.shape}; pad the image")
    fine, coarse = list(lead), list(lead)
    for size, extent in zip(spatial, window, strict=True):
        fine += [size // extent, extent]
        coarse += [size // extent, 1]
    fine, coarse = fine + channels, coarse + channels

    def tf_fn(device: str, x: tf.Tensor, y: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
        dy = emitter.reshape(device, dy, coarse)
        if op._pool_fn_string.startswith("MAX"):
            chosen = tf.equal(emitter.reshape(device, x, fine), emitter.reshape(device, y, coarse))
            dx = tf.multiply(tf.cast(chosen, dy.dtype), dy)
        else:
            scale = emitter.constant(device, 1.0 / math.prod(window), dy.dtype)
            dx = emitter.broadcast(device, tf.multiply(dy, scale), fine)
        return emitter.reshape(device, dx, shape)

    columns = [lowering.tensors[t].to_laid_out_tensor().tensor_list for t in op.inputs]
    lowering.set_tensor_lowering(op.outputs[0], impl.per_device(tf_fn, *columns))


def _reshape(op: mtf.ops.ReshapeOperation, lowering: PlanLowering) -> None:
    """Moves to cuts that exist on both sides, reshapes locally, cuts further.

    Mesh-TF's own lowering gives wrong values where a rename moves a dim from one mesh axis to another.
    """
    x, y = op.inputs[0], op.outputs[0]
    source_impl, impl, emitter = lowering.mesh_impl(x), lowering.mesh_impl(op), lowering.emitter
    old, new = tuple(x.shape.to_integer_list), tuple(y.shape.to_integer_list)
    source, target = source_impl.partition(x.shape), impl.partition(y.shape)

    def local(tensors: list[tf.Tensor], partition: Partition) -> list[tf.Tensor]:
        shape, made = partition.block_shape(new), {}
        result = []
        for tensor, number in zip(tensors, partition.devices, strict=True):
            key = tensor.ref() if emitter.shared else (tensor.ref(), number)
            if key not in made:
                made[key] = emitter.reshape(emitter.devices[number], tensor, shape)
            result.append(made[key])
        return result

    kept, moved = translate(source, old, new)
    stored = lowering.stored(x)
    if isinstance(stored, _ops.LazyAllreduceSum) and stored._reduced is None and kept == source and moved == target:
        axes = impl.axes_with(source_impl.strides(stored.mesh_axes))
        if axes is not None:
            parts = local(stored.laid_out_input.tensor_list, target)
            lowering.set_tensor_lowering(y, _ops.LazyAllreduceSum(
                impl, impl.LaidOutTensor(parts), axes, stored.add_counter_fn))
            return
    wanted, there = translate(target, new, old)
    if wanted == target or (
            volume(source, there, old) <= volume(source, kept, old) + volume(moved, target, new)):
        between, tensors = wanted, lowering.read_partition(x, there)
    else:
        between, tensors = moved, lowering.read_partition(x, kept)
    tensors = move(local(tensors, between), between, target, new, emitter)
    lowering.set_tensor_lowering(y, impl.LaidOutTensor(tensors))


def _import_laid_out(op: mtf.ops.ImportLaidOutTensorOperation, lowering: PlanLowering) -> None:
    """Somebody else's slices: only whole copies can be laid out otherwise."""
    impl, output = lowering.mesh_impl(op), op.outputs[0]
    tensors = op._laid_out_tensor.to_laid_out_tensor().tensor_list
    if tensors[0].shape.as_list() != output.shape.to_integer_list:
        raise UsageError(f"{op.name}: slices of a layout of their own cannot follow a plan; use mtf.import_tf_tensor")
    if len(tensors) != impl.size:
        tensors = [tensors[0]] * impl.size
    lowering.set_tensor_lowering(output, impl.LaidOutTensor(list(tensors)))


_RULES: dict[type, Callable] = {
    _ops.Variable: _variable,
    _ops.ReadVariable: _read_variable,
    _ops.Assign: _assign,
    _ops.Depend: _depend,
    _ops.GenericGradOperation: _generic_gradient,
    _ops.BinaryOpWithBroadcasting: _binary,
    _ops.ScalarMultiplyOperation: _scalar,
    _ops.ScalarAddOperation: _scalar,
    _ops.Constant: _constant,
    _ops.RangeOperation: _range,
    _ops.OneHotOperation: _one_hot,
    _ops.ReduceOperation: _reduce,
    _ops.EinsumOperation: _einsum,
    _ops.PoolBackPropOperation: _pool_backward,
    _ops.ReshapeOperation: _reshape,
    _ops.RandomOperation: lower_random,
    _ops.ImportLaidOutTensorOperation: _import_laid_out,
    _ops.WhileLoopOperation: lower_while,
}


def rule_for(operation_class: type) -> Callable | None:
    """The rule (operation, lowering) for a class, or None where its own `lower` is to be called."""
    for cls in operation_class.__mro__:
        if cls in _RULES:
            return _RULES[cls] if operation_class.lower is cls.lower else None
    return None
