"""Which dims of a Mesh-TF operation can be split when `lowering` lowers it.

What an operation declares (`splittable_dims`) and what really lowers to right values differ both ways in Mesh-TF
0.1.21: the backward operations of convolutions and pooling declare the spatial dims splittable and they are not; a
transposed convolution cannot split its output channels; a dim that stands twice in one tensor (one name, two sizes)
would put two tensor dims on one mesh axis. Here is the truth, one rule per operation class.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from pase_mtf.compat import mtf

__all__ = ["register_splittable", "rule_of", "splittable_dims"]

_ops = mtf.ops

# Dims that import_fully_replicated and anonymize make: unrelated tensors share these names, and the purpose of the
# names is that no layout mentions them.
_ANONYMOUS = "_anonymous_"


def _names(operation: mtf.Operation) -> set[str]:
    return {name for tensor in (*operation.inputs, *operation.outputs) for name in tensor.shape.dimension_names}


def _all(operation: mtf.Operation) -> set[str]:
    return _names(operation)


def _none(operation: mtf.Operation) -> set[str]:
    return set()


def _declared(operation: mtf.Operation) -> set[str]:
    return _names(operation) & set(operation.splittable_dims)


def _but_resized(operation: mtf.Operation) -> set[str]:
    """Concat, split, slice, pad, stack, unstack: all but the dim along which they work, which they declare."""
    return _names(operation) - set(operation.unsplittable_dims)


def _generic_gradient(operation: mtf.Operation) -> set[str]:
    """It differentiates the very tensors of its forward operation, slice by slice."""
    return splittable_dims(operation._forward_op) & _names(operation)


def _pool(operation: mtf.Operation) -> set[str]:
    spatial = 2 if "2D" in operation._pool_fn_string else 3
    return _names(operation) - set(operation.inputs[0].shape.dimension_names[-1 - spatial:-1])


def _convolution(operation: mtf.Operation) -> set[str]:
    """Spatial dims of image and filter stay whole; batch dims and channels may be split."""
    image, kernel = operation.inputs
    spatial = len(kernel.shape) - 2
    whole = {*image.shape.dimension_names[-1 - spatial:-1], *kernel.shape.dimension_names[:spatial]}
    return _names(operation) - whole


def _transposed_convolution(operation: mtf.Operation) -> set[str]:
    """Mesh-TF hands TensorFlow the unsplit number of output channels."""
    return _convolution(operation) - {operation.outputs[0].shape.dimension_names[-1]}


def _convolution_backward(operation: mtf.Operation) -> set[str]:
    spatial = operation._conv_dimension
    backward_filter = isinstance(operation, _ops.Conv2or3dBackpropFilterOperation)
    kernel = operation.outputs[0] if backward_filter else operation.inputs[1]
    images = [tensor for tensor in (*operation.inputs, *operation.outputs) if tensor is not kernel]
    whole = set(kernel.shape.dimension_names[:spatial])
    for image in images:
        whole |= set(image.shape.dimension_names[-1 - spatial:-1])
    return _names(operation) - whole


def _top_k(operation: mtf.Operation) -> set[str]:
    return _names(operation) - {operation._k_dim.name}


def _einsum(operation: mtf.Operation) -> set[str]:
    """The iteration space is the union of all dims: one name with two sizes would stand in it twice."""
    dims = {dim for tensor in operation.inputs for dim in tensor.shape.dims}
    return _names(operation) - _repeated(dim.name for dim in dims)


def _loop(operation: mtf.Operation) -> set[str]:
    """The body shares the layout of the loop: what one of its operations cannot split, the loop cannot."""
    names, whole = _names(operation), set()
    for inner in (*operation._cond_ops, *operation._body_ops):
        inner_names = _names(inner)
        names |= inner_names
        whole |= inner_names - splittable_dims(inner)
    return names - whole


_RULES: dict[type, Callable[[mtf.Operation], Iterable[str]]] = {
    # Slicewise covers every component-wise function; the user declares what may be split.
    _ops.SlicewiseOperation: _declared,
    _ops.GenericGradOperation: _generic_gradient,
    _ops.ImportLaidOutTensorOperation: _none,
    _ops.ConcatOperation: _but_resized,
    _ops.SplitOperation: _but_resized,
    _ops.StackOperation: _but_resized,
    _ops.UnstackOperation: _but_resized,
    _ops.SliceOperation: _but_resized,
    _ops.PadOperation: _but_resized,
    _ops.PoolOperation: _pool,
    _ops.PoolBackPropOperation: _pool,
    _ops.Conv2dOperation: _convolution,
    _ops.Conv3dOperation: _convolution,
    _ops.Conv2dTransposeOperation: _transposed_convolution,
    _ops.Conv3dTransposeOperation: _transposed_convolution,
    _ops.Conv2or3dBackpropInputOperation: _convolution_backward,
    _ops.Conv2or3dBackpropFilterOperation: _convolution_backward,
    _ops.TopKOperation: _top_k,
    _ops.EinsumOperation: _einsum,
    _ops.WhileLoopOperation: _loop,
    **dict.fromkeys((
        _ops.ScalarMultiplyOperation, _ops.ScalarAddOperation, _ops.BinaryOpWithBroadcasting, _ops.AddOperation,
        _ops.MinMaxOperation, _ops.BroadcastOperation, _ops.ReduceOperation, _ops.ShiftOperation, _ops.OneHotOperation,
        _ops.ImportOperation, _ops.Variable, _ops.StackedVariable, _ops.ReadVariable, _ops.Assign, _ops.Depend,
        _ops.Constant, _ops.StopGradient, _ops.ScalarSummaryOperation, _ops.PrintOperation, _ops.ReshapeOperation,
        _ops.RangeOperation, _ops.RandomOperation, _ops.CustomGradientOperation), _all),
}


def register_splittable(operation_class: type, rule: Callable[[mtf.Operation], Iterable[str]]) -> None:
    """Tells which dims of an Operation class of your own may be split.

    Args:
      operation_class: a subclass of mtf.Operation; its subclasses that keep its `lower` follow the same rule.
      rule: a function from an operation of that class to the names of the dims that may be split. Splitting them must
        lower to right values: an output that lacks a split input dim is summed by the operation itself.
    """
    _RULES[operation_class] = rule


def rule_of(operation: mtf.Operation) -> Callable[[mtf.Operation], Iterable[str]] | None:
    """The rule of the operation's class, or None where the class is unknown.

    A subclass with a lowering of its own is another operation, whatever it inherits.
    """
    for cls in type(operation).__mro__:
        if cls in _RULES:
            return _RULES[cls] if type(operation).lower is cls.lower else None
    return None


def _repeated(names: Iterable[str]) -> set[str]:
    return {name for name, count in Counter(names).items() if count > 1}


def splittable_dims(operation: mtf.Operation) -> frozenset[str]:
    """The names of the dims that can truly be split when `lowering` lowers this operation.

    What is not decided here: sizes (a dim splits into parts that divide every size it has in the operation) and
    whether two dims of one tensor share a mesh axis (they must not).

    Args:
      operation: any Mesh-TF operation. One of a class unknown to us (and not registered) may split nothing.

    Returns:
      A subset of the dim names of its inputs and outputs (and, for a while loop, of its body).
    """
    rule = rule_of(operation) or _none
    twice = set()
    for tensor in (*operation.inputs, *operation.outputs):
        twice |= _repeated(tensor.shape.dimension_names)
    return frozenset(
        name for name in rule(operation) if name not in twice and not name.startswith(_ANONYMOUS))
