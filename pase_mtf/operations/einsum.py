"""Einsums and reductions."""

from __future__ import annotations

import itertools
import math
import numbers
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence

import opt_einsum

from pase_mtf.compat import mtf, tf
from pase_mtf.graph.layer_operation import SUM
from pase_mtf.graph.looked_up import LookedUp
from pase_mtf.operations.nodes import Nodes, broadcast_runs
from pase_mtf.operations.protocols import Dims, LaidOut, Lowering, Mesh, StockDemands, SummedRows, dims_of
from pase_mtf.operations.registry import Rule, add_rules, always, dim_sizes, names_of, tensors_of
from pase_mtf.operations.stock_sums import PendingSum, ReducedSum

_ops = mtf.ops


def union_space(operation: mtf.Operation) -> list[list[mtf.Dimension]]:
    """One iteration space: the union of all dims."""
    return [list(dict.fromkeys(itertools.chain(*(tensor.shape.dims for tensor in tensors_of(operation)))))]


def contracted_away(operation: mtf.Operation) -> tuple[tuple[str, ...]]:
    """The dims of the inputs that the output does not have."""
    kept = set(operation.outputs[0].shape.dimension_names)
    return (tuple(name for name in dim_sizes(operation.inputs) if name not in kept),)


def _space(operation: mtf.Operation) -> set[mtf.Dimension]:
    """The dims of the inputs; one name may stand for several, of other sizes."""
    return {dim for tensor in operation.inputs for dim in tensor.shape.dims}


def _size(operation: mtf.Operation) -> int:
    return math.prod(dim.size for dim in _space(operation))


def _kind(operation: mtf.Operation) -> str:
    everything = _space(operation)
    if everything <= set(operation.outputs[0].shape.dims):
        return "pointwise"
    # Mesh-TF multiplies and reduces, without a matrix product, where one operand already has every dim, and integers.
    if not operation.outputs[0].dtype.is_floating or any(
            tensor.shape.ndims == len(everything) for tensor in operation.inputs):
        return "reduction"
    return "matmul"


def _broadcast_after(operation: mtf.Operation) -> tuple[int, ...]:
    """The dims of the output that no input has: what is summed over the others is broadcast at the end."""
    given = _space(operation)
    return tuple(number for number, dim in enumerate(operation.outputs[0].shape.dims) if dim not in given)


def product_of(operation: mtf.Operation) -> int:
    """The number of the input that is as large as a product which the operation makes besides its output; -1: none."""
    # One tensor alone is multiplied by nothing.
    if (not isinstance(operation, _ops.EinsumOperation) or len(operation.inputs) < 2
            or _kind(operation) != "reduction"):
        return -1
    count = len(_space(operation))
    return next((number for number, tensor in enumerate(operation.inputs) if tensor.shape.ndims == count), -1)


def largest_besides(operation: mtf.Operation) -> int:
    """The elements of the largest product that the operation makes besides its output, where no input is as large
    (`product_of`): of integers over all dims, of several tensors of the first two and so on. 0: none."""
    if not isinstance(operation, _ops.EinsumOperation) or len(operation.inputs) < 2 or product_of(operation) >= 0:
        return 0
    kind = _kind(operation)
    if kind == "reduction":
        return _size(operation)
    if kind == "pointwise" or len(operation.inputs) < 3:
        return 0
    largest = int(_path(operation).largest_intermediate)
    return largest if largest > operation.outputs[0].size else 0


def _flops(operation: mtf.Operation) -> float:
    if _kind(operation) == "matmul" and len(operation.inputs) > 2:
        return float(_path(operation).opt_cost)
    # What is not summed is multiplied only; one tensor alone is copied.
    kind, count = _kind(operation), len(operation.inputs)
    times = 2 if kind == "matmul" else max(1, count - 1) if kind == "pointwise" else count
    # Over dims that only the output has, what was found is broadcast.
    return float(times * _size(operation))


def _path(operation: mtf.Operation) -> opt_einsum.contract.PathInfo:
    """Of a product of several tensors: TensorFlow multiplies two at a time, in the order that is found here, too."""
    shapes, output = [tensor.shape for tensor in operation.inputs], operation.outputs[0].shape
    used = {dim for shape in shapes for dim in shape.dims}
    equation = _ops._einsum_equation(shapes, mtf.Shape([dim for dim in output.dims if dim in used]))
    _, found = opt_einsum.contract_path(equation, *(shape.to_integer_list for shape in shapes), shapes=True,
                                        optimize="greedy")
    return found


def _splittable(operation: mtf.Operation) -> set[str]:
    """The iteration space is the union of all dims: one name with two sizes would stand in it twice."""
    counts = Counter(dim.name for dim in _space(operation))
    return names_of(operation) - {name for name, count in counts.items() if count > 1}


def _nodes(operation: mtf.Operation, _: dict[Hashable, Nodes]) -> Nodes:
    if _kind(operation) == "pointwise":
        return Nodes(broadcast_runs=broadcast_runs(operation.outputs[0], operation.inputs))
    ends = sum(tensor.size for tensor in tensors_of(operation))
    whole, besides = product_of(operation), largest_besides(operation)
    if whole < 0 and not besides:
        return Nodes()
    # A product, which is written and read again by the next or the sum.
    size = besides or _size(operation)
    nodes, runs = (len(operation.inputs), 0.0) if besides else (
        2, broadcast_runs(operation.inputs[whole], operation.inputs))
    return Nodes(nodes, (ends + 2.0 * size) / max(ends, 1), runs)


def _reduction(impl: Mesh, old: mtf.Shape, new: mtf.Shape, kind: str) -> tuple[Callable, list[int]]:
    """A function (device, slice) that reduces from one shape to another, and the mesh axes left to be reduced."""
    axes = [k for k, dim in enumerate(old.dims) if dim not in new.dims]
    kept = [dim for dim in old.dims if dim in new.dims]
    perm = [kept.index(dim) for dim in new.dims]
    layout = impl.tensor_layout(old)

    def tf_fn(device: str, x: tf.Tensor) -> tf.Tensor:
        return impl.emitter.transpose(device, impl.emitter.reduce(device, x, axes, kind), perm)

    return tf_fn, [layout[k] for k in axes if layout[k] is not None]


def _lower_reduce(op: mtf.ops.ReduceOperation, lowering: Lowering) -> None:
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


def _lower_einsum(op: mtf.ops.EinsumOperation, lowering: Lowering) -> None:
    impl, output = lowering.mesh_impl(op), op.outputs[0]
    shapes = [x.shape for x in op.inputs]
    used = {dim for shape in shapes for dim in shape.dims}
    # The output may have dims that no input has: they are broadcast at the end.
    inner = mtf.Shape([dim for dim in output.shape.dims if dim in used])
    full = next((shape for shape in [*shapes, inner] if len(shape) == len(used)), None)
    space = full or mtf.Shape(sorted(used))
    reduce_fn, axes = _reduction(impl, space, inner, "SUM")

    def make_parts() -> LaidOut:
        columns = [lowering.read(x, impl).to_laid_out_tensor().tensor_list for x in op.inputs]
        if full is None and op.inputs[0].dtype.is_floating:
            tf_fn, columns = _matrix_product(shapes, columns, inner)
        else:
            # One tensor spans the whole iteration space: multiply and reduce.
            tf_fn = _product_and_sum(impl, shapes, space, reduce_fn)
        return impl.per_device(tf_fn, *columns)

    def count() -> None:
        lowering.add_counter(f"allreduce/{axes}/einsum_op", impl.laid_out_size(inner))

    rows = _summed_rows(op) if axes else None
    y = lowering.sum_of_rows(rows, axes, make_parts, count) if rows is not None else None
    if y is None:
        y = make_parts()
        if axes:
            y = _ops.LazyAllreduceSum(impl, y, axes, add_counter_fn=count)
    if inner != output.shape:
        y = impl.broadcast_impl(y, inner, output.shape)
    lowering.set_tensor_lowering(output, y)
    lowering.add_counter("einsum", impl.laid_out_size(space))
    lowering.add_counter("einsum_unique", space.size)


def _matrix_product(shapes: list[mtf.Shape], columns: list[Sequence[tf.Tensor]], inner: mtf.Shape,
                    ) -> tuple[Callable, list[Sequence[tf.Tensor]]]:
    """A function (device, slices...) that calls TensorFlow's einsum, and the slices in the order in which it takes
    them.

    The operand that has the output's leading dim comes first: otherwise TensorFlow's einsum makes the product the other
    way round and transposes it, which for a weight gradient takes several times as long as the product.
    """
    lead = next((dim for dim in inner.dims if sum(dim in shape.dims for shape in shapes) == 1), None)
    if len(shapes) == 2 and lead in shapes[1].dims:
        shapes, columns = shapes[::-1], columns[::-1]
    equation = _ops._einsum_equation(shapes, inner)

    def tf_fn(_: str, *xs: tf.Tensor) -> tf.Tensor:
        if len(xs) > 2:
            return tf.einsum(equation, *xs)
        return tf.raw_ops.Einsum(inputs=list(xs), equation=equation)

    return tf_fn, columns


def _summed_rows(operation: mtf.Operation) -> SummedRows | None:
    """What an einsum sums, where it is the gradient of a gather: rows, by one-hot vectors of all their indices."""
    output = operation.outputs[0]
    if len(operation.inputs) != 2 or not output.dtype.is_floating:
        return None
    for vectors, rows in (operation.inputs, operation.inputs[::-1]):
        made = vectors.operation
        if type(made).lower is not _ops.OneHotOperation.lower or not (
                _is(made._on_value, 1) and _is(made._off_value, 0)):
            continue
        indices, dim = made.inputs[0], made._output_dim
        row = [other for other in rows.shape.dims if other not in indices.shape.dims]
        if (indices.shape.dims and set(indices.shape.dims) <= set(rows.shape.dims)
                and set(output.shape.dims) == {dim, *row} and len(output.shape.dims) == len(row) + 1
                and len(set(rows.shape.dims)) == len(rows.shape.dims) and not set(indices.shape.dims) & {dim, *row}):
            place = output.shape.dims.index(dim)
            return SummedRows(output, made, rows, dim, LookedUp(indices.shape.size, place, indices.dtype.size))
    return None


def _is(value: object, number: int) -> bool:
    return isinstance(value, (numbers.Real, bool)) and float(value) == number


def _product_and_sum(impl: Mesh, shapes: Sequence[mtf.Shape], space: mtf.Shape, reduce_fn: Callable) -> Callable:
    sizes = impl.slice_shape(space)

    def tf_fn(device: str, *xs: tf.Tensor) -> tf.Tensor:
        product = None
        for x, shape in zip(xs, shapes, strict=True):
            x = impl.expand(device, x, shape, space)
            product = x if product is None else tf.multiply(product, x)
        return reduce_fn(device, impl.emitter.broadcast(device, product, sizes))

    return tf_fn


def _einsum_demands(operation: mtf.Operation, demands: StockDemands) -> None:
    dims = dict.fromkeys(dim for tensor in operation.inputs for dim in dims_of(tensor.shape))
    demands.keep_apart(operation, tuple(dims), "one einsum")


def _einsum_order(operation: mtf.ops.EinsumOperation) -> Dims:
    """The iteration space in the order in which Mesh-TF finds it, which decides whether two sums can be added."""
    shapes = [tensor.shape for tensor in operation.inputs]
    union = sorted({dim for shape in shapes for dim in shape.dims})
    full = next((shape for shape in (*shapes, operation.outputs[0].shape) if shape.ndims == len(union)), None)
    return dims_of(full) if full is not None else tuple((dim.name, dim.size) for dim in union)


def _einsum_sums(operation: mtf.Operation, _: Mapping[mtf.Tensor, PendingSum]) -> dict[mtf.Tensor, PendingSum]:
    output = operation.outputs[0]
    if _broadcast_after(operation):
        return {}  # which reduces the sum
    made = set(output.shape.dimension_names)
    return {output: ReducedSum(tuple(name for name, _ in _einsum_order(operation) if name not in made))}


def _reduce_sums(operation: mtf.Operation, _: Mapping[mtf.Tensor, PendingSum]) -> dict[mtf.Tensor, PendingSum]:
    if operation._reduction_fn_string != "SUM":
        return {}
    output = operation.outputs[0]
    return {output: ReducedSum(tuple(
        dim.name for dim in operation.inputs[0].shape.dims if dim not in output.shape.dims))}


add_rules({
    _ops.EinsumOperation: Rule(
        kind=_kind, flops=_flops, contracted=contracted_away, broadcast_after=_broadcast_after,
        role=lambda operation: SUM if len(operation.inputs) == 1 and _kind(operation) == "reduction" else "",
        sum_is_pending=lambda operation: not _broadcast_after(operation), looks_up=_summed_rows,
        splittable=_splittable, spaces=union_space, nodes=_nodes, lower=_lower_einsum,
        stock_demands=_einsum_demands, stock_sums=_einsum_sums),
    _ops.ReduceOperation: Rule(
        role=always(SUM),
        kind=always("reduction"), contracted=contracted_away,
        sum_is_pending=lambda operation: operation._reduction_fn_string == "SUM",
        lower=_lower_reduce, stock_sums=_reduce_sums),
})
