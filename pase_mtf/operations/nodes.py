"""How many TensorFlow nodes a Mesh-TF operation becomes on a device, and how much they read and write.

To a graph of Mesh-TF a function of slices is one operation, whatever it computes: the cell of an LSTM is some twenty
TensorFlow nodes, each with its overhead and its pass over memory. The function is therefore called once, on
placeholders of the unsplit shapes in a graph of its own, and what it made is counted.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from pase_mtf.compat import mtf, tf
from pase_mtf.operations.facts import is_handed_over, kind_of

__all__ = ["Nodes", "nodes_of"]

# Neither compute nor move anything: they are there, or hand on their input.
_STILL = frozenset({"Const", "Placeholder", "Identity", "NoOp", "StopGradient"})
_VIEWS = frozenset({"Reshape", "ExpandDims", "Squeeze", "Shape", "ShapeN"})
# Elementwise, and spread a tensor of fewer dims over the other.
_SPREADING = frozenset({"Add", "AddV2", "Sub", "Mul", "MulNoNan", "Div", "DivNoNan", "RealDiv", "FloorDiv", "Maximum",
                        "Minimum", "Pow", "SquaredDifference", "BroadcastTo", "Equal", "NotEqual", "Greater",
                        "GreaterEqual", "Less", "LessEqual", "LogicalAnd", "LogicalOr", "SelectV2", "Xdivy", "Xlogy"})


class Nodes(NamedTuple):
    """What an operation becomes on a device.

    Attributes:
      count: nodes that are run.
      traffic: bytes that they read and write, as a multiple of the bytes of the operation's inputs and outputs.
      rows: over how many rows they spread a tensor of fewer dims: TensorFlow looks up anew, for every run of elements
        that lie side by side, where in the smaller tensor it has to read.
    """

    count: int = 1
    traffic: float = 1.0
    rows: float = 0.0


def nodes_of(operation: mtf.Operation, known: dict) -> Nodes | None:
    """What the operation becomes; None where that is not known, and one node should be reckoned with.

    Args:
      operation: of a Mesh-TF graph.
      known: what was counted already; the same for all operations of a graph.
    """
    if isinstance(operation, mtf.SlicewiseOperation):
        return _traced(operation, (), known)
    if isinstance(operation, mtf.ops.GenericGradOperation) and isinstance(
            operation._forward_op, mtf.SlicewiseOperation):
        return _traced(operation._forward_op, operation._grad_ys, known)
    if isinstance(operation, mtf.Assign):
        # A value becomes the variable as it is; what is added is added in place: the variable is read and written, too.
        # (`traffic` is of the value: an Assign has no output.)
        return Nodes(1, 0.0 if is_handed_over(operation) else 3.0)
    if isinstance(operation, mtf.EinsumOperation) and kind_of(operation) == "reduction":
        # A product of all dims, which is written and read again by the sum.
        sizes = {dim.name: dim.size for tensor in operation.inputs for dim in tensor.shape.dims}
        product = math.prod(sizes.values())
        ends = sum(tensor.size for tensor in [*operation.inputs, *operation.outputs])
        whole = next(tensor for tensor in operation.inputs if tensor.shape.ndims == len(sizes))
        return Nodes(2, (ends + 2.0 * product) / max(ends, 1), _spread_rows(whole, operation.inputs))
    if kind_of(operation) == "pointwise" and operation.outputs and not isinstance(operation, mtf.WhileLoopOperation):
        return Nodes(rows=_spread_rows(operation.outputs[0], operation.inputs))
    return None


def _spread_rows(whole: mtf.Tensor, inputs: Sequence[mtf.Tensor]) -> float:
    """Over how many rows of the whole the inputs of fewer dims are spread."""
    return float(sum(_rows(whole.shape.to_integer_list, [name in tensor.shape.dimension_names
                                                         for name in whole.shape.dimension_names])
                     for tensor in inputs))


def _rows(shape: Sequence[int], held: Sequence[bool]) -> int:
    """How many rows a tensor has of elements that lie side by side and read one, or neighbouring, elements of another.

    Args:
      shape: of the larger tensor.
      held: per dim whether the smaller one has it.

    Returns:
      0 where the smaller one has all of its dims, or none.
    """
    dims = [(size, has) for size, has in zip(shape, held, strict=True) if size > 1]
    if len({has for _, has in dims}) < 2:
        return 0
    inner = list(itertools.takewhile(lambda dim: dim[1] == dims[-1][1], reversed(dims)))
    return math.prod(shape) // math.prod(size for size, _ in inner)


def _traced(operation: mtf.SlicewiseOperation, gradients: Sequence[mtf.Tensor], known: dict) -> Nodes | None:
    """Of a function of slices or, given gradients of its outputs, of TensorFlow's gradient of it."""
    function = operation._tf_fn
    shapes = tuple((tuple(tensor.shape.to_integer_list), tensor.dtype) for tensor in operation.inputs)
    key = _text(function), shapes, bool(gradients)
    if key not in known:
        try:
            known[key] = _trace(function, operation, gradients)
        except Exception:  # a user's function that cannot do without its own graph
            known[key] = None
    return known[key]


def _text(function: object, depth: int = 4) -> tuple:
    """Equal for functions of one text that call the same functions: made anew for every operation, they differ in
    constants only. TensorFlow's own are wrapped, and have the text of their wrapper."""
    code = getattr(function, "__code__", None)
    if code is None or not depth:
        return (id(function),)
    held = []
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # not bound yet
            held.append(cell.cell_contents)
    return code, *(_text(inner, depth - 1) for inner in held if callable(inner) and inner is not function)


def _trace(function: object, operation: mtf.SlicewiseOperation, gradients: Sequence[mtf.Tensor]) -> Nodes:
    with tf.Graph().as_default() as graph:
        inputs = [tf.placeholder(tensor.dtype, tensor.shape.to_integer_list) for tensor in operation.inputs]
        outputs = function(*inputs)
        outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
        made = graph.get_operations()
        ends = _bytes([*inputs, *outputs])
        if gradients:
            dys = [tf.placeholder(tensor.dtype, tensor.shape.to_integer_list) for tensor in gradients]
            results = [x for x in tf.gradients(outputs, inputs, dys) if x is not None]
            ends += _bytes([*dys, *results])
            forward = set(made)
            made = [node for node in graph.get_operations() if node not in forward]
        run = [node for node in made if node.type not in _STILL]
        moving = [node for node in run if node.type not in _VIEWS]
        traffic = sum(_bytes([*node.inputs, *node.outputs]) for node in moving)
        rows = sum(map(_node_rows, moving))
    return Nodes(max(len(run), 1), max(traffic, ends) / max(ends, 1), float(rows))


def _node_rows(node: tf.Operation) -> int:
    """The rows that a node of TensorFlow spreads its inputs over."""
    if node.type not in _SPREADING or not node.outputs or node.outputs[0].shape.rank is None:
        return 0
    shape = [size or 1 for size in node.outputs[0].shape.as_list()]
    known = [x.shape.as_list() for x in node.inputs[:2] if x.shape.rank is not None and x.shape.rank <= len(shape)]
    if node.type == "BroadcastTo":
        known = known[:1]  # the other is the shape
    # By NumPy's rules: dims that are missing are missing in front.
    return sum(_rows(shape, [False] * (len(shape) - len(sizes)) + [
        size == whole for size, whole in zip(sizes, shape[len(shape) - len(sizes):], strict=True)]) for sizes in known)


def _size(tensor: tf.Tensor) -> int:
    return math.prod(size or 1 for size in tensor.shape.as_list()) if tensor.shape.rank else 1


def _bytes(tensors: Sequence[tf.Tensor]) -> int:
    return sum(_size(tensor) * tensor.dtype.size for tensor in tensors if tensor.dtype != tf.resource)
