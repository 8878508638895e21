"""Functions of slices, and TensorFlow's gradients of them."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Hashable, Sequence

from pase_mtf.compat import mtf, tf
from pase_mtf.errors import UsageError
from pase_mtf.operations.joined import in_blocks, joined_dims
from pase_mtf.operations.nodes import Nodes, broadcast_runs
from pase_mtf.operations.protocols import LaidOut, Lowering, StockDemands, dims_of
from pase_mtf.operations.registry import Rule, add_rules, always, is_known, names_of, rule_of, splittable_dims
from pase_mtf.operations.tracing import draws_anew, traced_nodes

_ops = mtf.ops


def _kept(operation: mtf.Operation) -> set[str]:
    """The dims that an input has, and every output: of one that it makes or sums up no device computes its part by
    itself, whatever the program declares."""
    given = {name for tensor in operation.inputs for name in tensor.shape.dimension_names}
    return given.intersection(*(tensor.shape.dimension_names for tensor in operation.outputs))


def _paired(operation: mtf.Operation) -> set[str]:
    """The dims that have to share an axis with another one."""
    return {name for pair in joined_dims(operation) for name in (pair.given, pair.made)}


def _splittable(operation: mtf.Operation) -> set[str]:
    """Slicewise covers every component-wise function; the user declares what may be split. Dims that have to share an
    axis are none that a layer could split one by one: our lowering leaves them whole."""
    return (_kept(operation) & set(operation.splittable_dims)) - _paired(operation)


def _stock_splittable(operation: mtf.Operation) -> set[str]:
    """Of dims that share an axis stock Mesh-TF splits both."""
    return (_kept(operation) | _paired(operation)) & set(operation.splittable_dims)


def _together(operation: mtf.Operation) -> dict[str, str]:
    return {pair.given: pair.made for pair in joined_dims(operation)}


_GIVEN: weakref.WeakKeyDictionary[Lowering, dict[mtf.Operation, Sequence[LaidOut]]] = weakref.WeakKeyDictionary()
"""Of functions that are given a tensor twice, the tensors that they were called with."""


def _lower(operation: mtf.Operation, lowering: Lowering) -> None:
    joined = joined_dims(operation)
    slices = [lowering.tensors[x].to_laid_out_tensor().tensor_list for x in operation.inputs]
    # TensorFlow tells what comes of a tensor in all places together: what is there twice has to be two tensors.
    twice = any(len(set(map(id, row))) < len(row) for row in zip(*slices, strict=True))
    if not joined and not twice:
        operation.lower(lowering)
        return

    def function(_: str, *row: tf.Tensor) -> tuple[tf.Tensor, ...]:
        given = tuple(map(tf.identity, row)) if twice else ()
        return (*in_blocks(operation, joined, given or row), *given)

    made = lowering.mesh_impl(operation).per_device(function, *slices)
    for output, value in zip(operation.outputs, made, strict=False):
        lowering.set_tensor_lowering(output, value)
    if twice:
        _GIVEN.setdefault(lowering, {})[operation] = made[len(operation.outputs):]


def _nodes(operation: mtf.Operation, known: dict[Hashable, Nodes]) -> Nodes:
    return traced_nodes(operation, (), known)


_FIRST: weakref.WeakKeyDictionary[Lowering, dict[str, mtf.Operation]] = weakref.WeakKeyDictionary()
"""Of every name the function that was lowered first: only copies of an operation have its name."""

_STATEFUL: weakref.WeakKeyDictionary[mtf.Operation, bool] = weakref.WeakKeyDictionary()
"""Whether a function does something else every time. Each is asked by itself: of two of one text, that with a rate of 0
draws no random numbers."""


def _is_stateful(operation: mtf.Operation) -> bool:
    if operation not in _STATEFUL:
        _STATEFUL[operation] = _nodes(operation, {}).is_stateful
    return _STATEFUL[operation]


def _drawn_once(forward: mtf.Operation, lowering: Lowering, made: Sequence[LaidOut]) -> list[LaidOut]:
    """What a function makes, or its gradient: where it does something else every time (it draws random numbers, say)
    devices that hold the same block are given what the first of them has."""
    impl = lowering.mesh_impl(forward)
    holders = impl.partition(forward.outputs[0].shape).holders.values()
    if (not isinstance(forward, mtf.SlicewiseOperation) or all(len(positions) == 1 for positions in holders)
            or not _is_stateful(forward)):
        return list(made)
    first = {position: positions[0] for positions in holders for position in positions}
    return [impl.LaidOutTensor([
        x if first[position] == position else lowering.emitter.run_on(
            impl.devices[position], tf.identity, laid_out.tensor_list[first[position]])
        for position, x in enumerate(laid_out.tensor_list)]) for laid_out in made]


def _lower_once(operation: mtf.Operation, lowering: Lowering) -> None:
    """Lowers a function of slices; what is drawn at random is the same on all devices that hold the same block.

    Raises:
      UsageError: the backward pass computes it once more, and would draw other numbers than the loss has seen.
    """
    first = _FIRST.setdefault(lowering, {}).setdefault(operation.name, operation)
    if first is not operation and draws_anew(operation):
        raise UsageError(f"operation {operation.name}: draws random numbers, and mtf.recompute_grad computes it once "
                         "more, with others than the loss has seen; draw them by mtf.random_uniform or mtf.dropout, "
                         "which keep theirs, or leave it out of what is computed again")
    _lower(operation, lowering)
    made = [lowering.stored(output) for output in operation.outputs]
    for output, laid_out in zip(operation.outputs, _drawn_once(operation, lowering, made), strict=True):
        lowering.tensors[output] = laid_out


def _demands(operation: mtf.Operation, demands: StockDemands) -> None:
    names = names_of(operation)
    demands.keep_whole(operation, names - set(operation.splittable_dims), "it is not declared splittable")
    for pair in joined_dims(operation):
        demands.need_together(operation, (pair.given, pair.made), pair.parts)
    demands.keep_whole(operation, names - _kept(operation) - _paired(operation),
                       "a function of slices cannot make or sum up a split dim")
    if draws_anew(operation):
        demands.need_no_copies(operation, dims_of(operation.outputs[0].shape), "devices that hold the same block would "
                               "draw other random numbers; give the function a seed, or use mtf.random_uniform")


def _forward(gradient: mtf.Operation) -> mtf.Operation:
    return gradient._forward_op


def _gradient_splittable(operation: mtf.Operation) -> frozenset[str]:
    """It differentiates the very tensors of its forward operation, slice by slice."""
    return splittable_dims(operation._forward_op) & names_of(operation)


def _gradient_stock_splittable(operation: mtf.Operation) -> frozenset[str]:
    return splittable_dims(operation._forward_op, stock=True) & names_of(operation)


def _gradient_nodes(operation: mtf.Operation, known: dict[Hashable, Nodes]) -> Nodes:
    if isinstance(operation._forward_op, mtf.SlicewiseOperation):
        return traced_nodes(operation._forward_op, operation._grad_ys, known)
    return Nodes(broadcast_runs=broadcast_runs(operation.outputs[0], operation.inputs))


def _joined(forward: mtf.Operation) -> set[str]:
    """Dims that the function makes of blocks, each of them on the device that has the block: its gradient is whole."""
    return {pair.made for pair in joined_dims(forward)} if isinstance(forward, mtf.SlicewiseOperation) else set()


def _gradient_contracted(operation: mtf.Operation) -> tuple[tuple[str, ...], ...]:
    """Of every input's gradient, the dims that the function's outputs have and the input lacks: every part of them has
    used the input, and has a part of its gradient."""
    joined = _joined(operation._forward_op)
    made = dict.fromkeys(name for tensor in operation._forward_op.outputs for name in tensor.shape.dimension_names
                         if name not in joined)
    return tuple(tuple(name for name in made if name not in x.shape.dimension_names)
                 for x in operation._forward_op.inputs)


def _lower_gradient(op: mtf.ops.GenericGradOperation, lowering: Lowering) -> None:
    """Differentiates the very tensors of the forward operation, whose mesh implementation it shares."""
    impl, forward = lowering.mesh_impl(op), op._forward_op
    given = list(zip(*(x.tensor_list for x in _GIVEN.get(lowering, {}).get(forward, ())), strict=True))

    def lists(tensors: list[mtf.Tensor]) -> list[tuple[tf.Tensor, ...]]:
        return list(zip(*(lowering.tensors[t].to_laid_out_tensor().tensor_list for t in tensors), strict=True))

    def gradient(_: str, ys: Sequence[tf.Tensor], xs: Sequence[tf.Tensor], grad_ys: Sequence[tf.Tensor],
                 ) -> tuple[tf.Tensor, ...]:
        found = tf.gradients(ys=list(ys), xs=list(xs), grad_ys=list(grad_ys), stop_gradients=list(xs),
                             unconnected_gradients=tf.UnconnectedGradients.ZERO)
        # That of a tensor of which rows are taken is rows with their indices (tf.IndexedSlices).
        return tuple(map(tf.convert_to_tensor, found))

    gradients = _drawn_once(forward, lowering, impl.per_device(
        gradient, lists(forward.outputs), given or lists(forward.inputs), lists(op._grad_ys)))
    split = {axis for y in forward.outputs for axis in impl.tensor_layout(y) if axis is not None}
    for x, output, laid_out in zip(forward.inputs, op.outputs, gradients, strict=True):
        # An input that all parts of a split dim have used receives a part of its gradient from each of them.
        partial = sorted(split - set(impl.tensor_layout(x)))
        if partial:
            laid_out = _ops.LazyAllreduceSum(impl, laid_out, partial)
        lowering.set_tensor_lowering(output, laid_out)


def _gradient_demands(operation: mtf.ops.GenericGradOperation, demands: StockDemands) -> None:
    forward = operation._forward_op
    for tensor in (*forward.inputs, *forward.outputs, *operation._grad_ys):
        demands.need_reduced(operation, tensor, "the gradient of a slicewise function of a pending sum")
    made = {dim for tensor in forward.outputs for dim in tensor.shape.dimension_names} - _joined(forward)
    for tensor, gradient in zip(forward.inputs, operation.outputs, strict=True):
        if demands.is_used(gradient) and tensor.dtype.is_floating:
            demands.keep_whole(operation, made - set(tensor.shape.dimension_names),
                               f"every part of it has a part of the gradient of {tensor.name}")
    used = dict.fromkeys(tensor for tensor, gradient in zip(forward.inputs, operation.outputs, strict=True)
                         if tensor.dtype.is_floating and demands.is_used(gradient))
    if any(forward.inputs.count(tensor) > 1 for tensor in used):
        demands.counts_twice(forward, None)
    # Stock Mesh-TF has TensorFlow differentiate by an input that another is made of, without stopping it there: what
    # comes to it by that way is counted a second time, on every device what came about on that device.
    for source in used:
        for between, read in demands.ways(source, [x for x in forward.inputs if x.dtype.is_floating]):
            demands.counts_twice(forward, between)
            demands.keep_whole(operation, _combined_along(between, read), "stock Mesh-TensorFlow takes the gradient of "
                               f"{forward.name} through {between.name} as well, and every part would have a part of "
                               "that")


def _combined_along(operation: mtf.Operation, read: mtf.Tensor) -> set[str]:
    """The dims along which an operation takes values of one place of what it reads to another, or may do so."""
    rule = rule_of(operation)
    if not is_known(operation) or rule.body(operation):
        return {name for inner in (operation, *rule.body(operation)) for name in names_of(inner)}
    if rule.role(operation) == "rename":
        return names_of(operation) - _unmoved(read.shape.dims, operation.outputs[0].shape.dims)
    made = {name for tensor in operation.outputs for name in tensor.shape.dimension_names}
    shift = rule.shift(operation)
    return (set(read.shape.dimension_names) - made) | ({shift[0]} if shift else set())


def _unmoved(old: Sequence[mtf.Dimension], new: Sequence[mtf.Dimension]) -> set[str]:
    """The names of the dims before and after those that a reshape works on."""
    both = itertools.chain(*(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs) for pairs in (
        zip(old, new, strict=False), zip(reversed(old), reversed(new), strict=False))))
    return {dim.name for dim, _ in both}


add_rules({
    _ops.SlicewiseOperation: Rule(
        splittable=_splittable, stock_splittable=_stock_splittable, together=_together, nodes=_nodes, lower=_lower_once,
        stock_demands=_demands),
    _ops.GenericGradOperation: Rule(
        splittable=_gradient_splittable, stock_splittable=_gradient_stock_splittable, nodes=_gradient_nodes,
        contracted=_gradient_contracted, sum_is_pending=always(True), leader=_forward, differentiates=_forward,
        lower=_lower_gradient, stock_demands=_gradient_demands),
})
