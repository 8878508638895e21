"""How many TensorFlow nodes a function of slices becomes, how much they read and write, multiply, and make besides.

To a graph of Mesh-TF a function of slices is one operation, whatever it computes: the cell of an LSTM is some twenty
TensorFlow nodes, each with its overhead and its pass over memory. The function is therefore called once, on
placeholders of the unsplit shapes in a graph of its own, and what it made is counted.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

from pase_mtf.compat import mtf, op_def_registry, tf
from pase_mtf.operations.lowering_key import function_key, text_key
from pase_mtf.operations.nodes import Nodes, run_count
from pase_mtf.operations.products import products_of

__all__ = ["MadeEarly", "draws_anew", "made_early", "traced_nodes"]

_Found = TypeVar("_Found")

_TRACED: dict[Hashable, Any] = {}
"""What was traced in this process. A program is exported again and again: for its strategy, for every arm, and by a
search that tries what fits."""

# Neither compute nor move anything: they are there, or pass on their input.
_STILL = frozenset({"Const", "Placeholder", "Identity", "NoOp", "StopGradient"})
_VIEWS = frozenset({"Reshape", "ExpandDims", "Squeeze", "Shape", "ShapeN"})
# What these make is of the shape of what they read, perhaps, and lies beside it all the same.
_ANEW = frozenset({"AvgPool", "AvgPoolGrad", "MaxPool", "ReverseV2", "Roll"})
# What they run stands in another graph, or once for all iterations.
_LOOPS = frozenset({"While", "StatelessWhile", "LoopCond"})
# Elementwise, and broadcast a tensor of fewer dims over the other.
_BROADCASTING = frozenset({
    "Add", "AddV2", "Sub", "Mul", "MulNoNan", "Div", "DivNoNan", "RealDiv", "FloorDiv", "Maximum", "Minimum", "Pow",
    "SquaredDifference", "BroadcastTo", "Equal", "NotEqual", "Greater", "GreaterEqual", "Less", "LessEqual",
    "LogicalAnd", "LogicalOr", "SelectV2", "Xdivy", "Xlogy"})


def traced_nodes(operation: mtf.SlicewiseOperation, gradients: Sequence[mtf.Tensor], known: dict[Hashable, Nodes],
                 ) -> Nodes:
    """What a function of slices becomes or, given gradients of its outputs, TensorFlow's gradient of it.

    A function that cannot be called in a graph of its own counts as one node that reads its inputs and writes its
    outputs once; a warning says so.

    Args:
      operation: has the function.
      gradients: of the operation's outputs; empty for the function itself.
      known: what was traced already; the same for all operations of a graph.
    """
    function = operation._tf_fn
    shapes = tuple((tuple(tensor.shape.to_integer_list), tensor.dtype) for tensor in operation.inputs)
    key = text_key(function), shapes, bool(gradients)
    if key not in known:
        try:
            known[key] = _once(function, ("nodes", *key[1:]), lambda: _trace(function, operation, gradients))
        except Exception as error:  # whatever a user's function raises that cannot do without its own graph
            what = "gradient of its function" if gradients else "function"
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            warnings.warn(f"operation {operation.name}: its {what} cannot be traced ({reason}); it is costed as one "
                          "pass over its inputs and outputs", stacklevel=2)
            known[key] = Nodes(is_stateful=True)
    return known[key]


def draws_anew(operation: mtf.SlicewiseOperation) -> bool:
    """Whether a function of slices draws random numbers without a seed: others wherever it is called. Nobody knows of
    one that cannot be called in a graph of its own."""
    shapes = tuple((tuple(tensor.shape.to_integer_list), tensor.dtype) for tensor in operation.inputs)
    try:
        return _once(operation._tf_fn, ("draws", shapes), lambda: _trace_draws(operation))
    except Exception:  # that it cannot be traced is told by `traced_nodes`
        return False


def _trace_draws(operation: mtf.SlicewiseOperation) -> bool:
    with tf.Graph().as_default() as graph:
        operation._tf_fn(*(tf.placeholder(tensor.dtype, tensor.shape.to_integer_list) for tensor in operation.inputs))
        definition = graph.as_graph_def()
    # What functions and branches of TensorFlow run stands beside the graph.
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    return any({"seed", "seed2"} <= set(node.attr) and not (node.attr["seed"].i or node.attr["seed2"].i)
               and op_def_registry.get(node.op).is_stateful for node in nodes)


class MadeEarly(NamedTuple):
    """What a function makes before all of its inputs are there.

    Attributes:
      nbytes: of unsplit tensors, beside those given and returned, that wait for what comes last.
      still_read: of every input, whether it is read by what waits for what comes last.
    """

    nbytes: int
    still_read: tuple[bool, ...]


def made_early(operation: mtf.Operation, late: Sequence[bool], known: dict[Hashable, MadeEarly]) -> MadeEarly:
    """What a function of slices, or TensorFlow's gradient of it, makes before all of its inputs are there. TensorFlow
    runs every node as soon as it can.

    Args:
      operation: any; one that is no such function makes nothing.
      late: of every input, whether it comes last.
      known: what was traced already; the same for all operations of a graph.
    """
    nothing = MadeEarly(0, (True,) * len(late))
    gradient = isinstance(operation, mtf.ops.GenericGradOperation)
    forward = operation._forward_op if gradient else operation
    if not isinstance(forward, mtf.SlicewiseOperation):
        return nothing
    shapes = tuple((tuple(tensor.shape.to_integer_list), tensor.dtype) for tensor in forward.inputs)
    key = "early", text_key(forward._tf_fn), shapes, gradient, tuple(late)
    if key not in known:
        try:
            known[key] = _once(forward._tf_fn, ("early", *key[2:]), lambda: _trace_early(
                forward, operation._grad_ys if gradient else (), late))
        except Exception:  # what cannot be traced has been told (`traced_nodes`)
            known[key] = nothing
    return known[key]


def _once(function: Callable, given: Hashable, trace: Callable[[], _Found]) -> _Found:
    """What a trace of a function finds: looked up where a function that makes the same was traced with the same."""
    key = function_key(function)
    if key is None:
        return trace()
    if (key, given) not in _TRACED:
        _TRACED[key, given] = trace()
    return _TRACED[key, given]


def _trace_early(forward: mtf.SlicewiseOperation, grad_ys: Sequence[mtf.Tensor], late: Sequence[bool]) -> MadeEarly:
    with tf.Graph().as_default() as graph:
        inputs = [tf.placeholder(tensor.dtype, tensor.shape.to_integer_list) for tensor in forward.inputs]
        outputs = forward._tf_fn(*inputs)
        outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
        given, late_nodes = inputs, {x.op for x, is_late in zip(inputs, late, strict=False) if is_late}
        if grad_ys:
            dys = [tf.placeholder(tensor.dtype, tensor.shape.to_integer_list) for tensor in grad_ys]
            tf.gradients(outputs, inputs, dys)
            given, late_nodes = [*inputs, *outputs, *dys], {dy.op for dy in dys}
        made, read = _waiting(graph, given, late_nodes)
        still_read = [is_late or tensor.ref() in read for tensor, is_late in zip(given, late, strict=True)]
        return MadeEarly(_bytes(made), tuple(still_read))


def _waiting(graph: tf.Graph, given: Sequence[tf.Tensor], late: set[tf.Operation],
             ) -> tuple[list[tf.Tensor], set[Hashable]]:
    """What can be made without some nodes and is read by what needs these; and which of `given` that reads."""
    shown = {tensor.ref(): tensor.ref() for tensor in given}  # a view -> what it shows
    known, held, read = set(shown), {}, set[Hashable]()
    for node in graph.get_operations():
        if any(tensor.op in late for tensor in node.inputs):
            late.add(node)
            for tensor in node.inputs:
                whole = shown.get(tensor.ref(), tensor.ref())
                read.add(whole)
                if whole not in known and tensor.op not in late and whole.deref().op.type != "Const":
                    held[whole] = whole.deref()
        elif node.inputs and node.type in _STILL | _VIEWS:
            for tensor in node.outputs:
                shown.setdefault(tensor.ref(), shown.get(node.inputs[0].ref(), node.inputs[0].ref()))
    return list(held.values()), read


def _trace(function: Callable, operation: mtf.SlicewiseOperation, gradients: Sequence[mtf.Tensor]) -> Nodes:
    with tf.Graph().as_default() as graph:
        inputs = [tf.placeholder(tensor.dtype, tensor.shape.to_integer_list) for tensor in operation.inputs]
        outputs = function(*inputs)
        outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
        made = graph.get_operations()
        given, results = inputs, outputs
        if gradients:
            dys = [tf.placeholder(tensor.dtype, tensor.shape.to_integer_list) for tensor in gradients]
            given = [*inputs, *outputs, *dys]
            results = [tf.convert_to_tensor(x) for x in tf.gradients(outputs, inputs, dys) if x is not None]
            forward = set(made)
            made = [node for node in graph.get_operations() if node not in forward]
        if (loop := next((node.name for node in graph.get_operations() if node.type in _LOOPS), None)) is not None:
            raise ValueError(f"{loop} is a loop, and nobody knows what it computes; register_operation(..., flops=...) "
                             "tells of an operation of your own")
        run = [node for node in made if node.type not in _STILL]
        moving = [node for node in run if node.type not in _VIEWS]
        traffic = sum(_bytes([*node.inputs, *node.outputs]) for node in moving)
        runs, products, ends = sum(map(_node_runs, moving)), products_of(moving), _bytes([*given, *results])
        known = {tensor.ref() for tensor in (*given, *results)}
        inner = max((_bytes([x]) for node in moving for x in node.outputs if x.ref() not in known), default=0)
        besides = inner if inner > max((_bytes([x]) for x in results), default=0) else 0
        # It finds the maxima once more: their places, of 8 bytes each, and the maxima where others still read them.
        besides = max([besides, *(_size(node.inputs[1]) * (8 + node.inputs[1].dtype.size)
                                  for node in moving if node.type == "MaxPoolGrad")])
    # What is handed on as it is, or in another shape, nobody copies.
    times = max(traffic, ends) / max(ends, 1) if moving or not results else 0.0
    return Nodes(max(len(run), 1), times, float(runs), products.flops, products.kind,
                 float(besides), any(node.op_def.is_stateful for node in made),
                 any(node.type in _ANEW and _bytes(node.outputs) >= _bytes(results[:1]) for node in moving))


def _node_runs(node: tf.Operation) -> int:
    """The runs that a node of TensorFlow broadcasts its inputs over."""
    if node.type not in _BROADCASTING or not node.outputs or node.outputs[0].shape.rank is None:
        return 0
    shape = [size or 1 for size in node.outputs[0].shape.as_list()]
    known = [x.shape.as_list() for x in node.inputs[:2] if x.shape.rank is not None and x.shape.rank <= len(shape)]
    if node.type == "BroadcastTo":
        known = known[:1]  # the other is the shape
    # By NumPy's rules: dims that are missing are missing in front.
    return sum(run_count(shape, [False] * (len(shape) - len(sizes)) + [
        size == whole for size, whole in zip(sizes, shape[len(shape) - len(sizes):], strict=True)]) for sizes in known)


def _size(tensor: tf.Tensor) -> int:
    return math.prod(size or 1 for size in tensor.shape.as_list()) if tensor.shape.rank else 1


def _bytes(tensors: Sequence[tf.Tensor]) -> int:
    return sum(_size(tensor) * tensor.dtype.size for tensor in tensors if tensor.dtype != tf.resource)
