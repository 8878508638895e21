"""What a Mesh-TF operation is to a device: its kind, its arithmetic, and the sums that a split leaves unfinished."""

import math
from collections.abc import Sequence

from pase_mtf.compat import mtf

__all__ = ["flops_of", "is_handed_over", "is_lazy_sum", "is_reshape", "kind_of", "needed_for_updates",
           "passes_lazy_sums", "reduced_dims", "tensors_in"]

_CONVOLUTIONS = (
    mtf.Conv2dOperation, mtf.Conv3dOperation, mtf.Conv2dTransposeOperation, mtf.Conv3dTransposeOperation)
_CONVOLUTION_GRADIENTS = (mtf.Conv2or3dBackpropInputOperation, mtf.Conv2or3dBackpropFilterOperation)
# Hand their input on, or bring in what is there already.
_FREE = (mtf.Variable, mtf.ReadVariable, mtf.ImportOperation, mtf.ImportLaidOutTensorOperation, mtf.ReshapeOperation,
         mtf.StopGradient, mtf.CustomGradientOperation, mtf.Depend)


def tensors_in(operation: mtf.Operation) -> list[mtf.Tensor]:
    """The inputs an operation really reads (a custom gradient lists those of its whole function)."""
    if isinstance(operation, mtf.CustomGradientOperation):
        return list(operation._fn_outputs)
    return list(operation.inputs)


def is_handed_over(operation: mtf.Operation) -> bool:
    """Whether the operation sets a variable to a value as it is: nothing is computed or copied."""
    return isinstance(operation, mtf.Assign) and operation.assign_fn is mtf.ops.assign_slice


def needed_for_updates(operations: Sequence[mtf.Operation]) -> list[bool]:
    """What the assignments of a graph need; the gradient of the input image, say, is needed by none.

    Args:
      operations: of the graph, in its order.

    Returns:
      Per operation whether an assignment needs it; of a graph without assignments all are needed.
    """
    if not any(isinstance(operation, mtf.Assign) for operation in operations):
        return [True] * len(operations)
    needed: set[int] = set()
    found = []
    for operation in reversed(operations):
        found.append(isinstance(operation, mtf.Assign) or any(id(tensor) in needed for tensor in operation.outputs))
        if found[-1]:
            read = [*operation.inputs, *tensors_in(operation)]
            if isinstance(operation, mtf.WhileLoopOperation):  # its body reads from outside as well
                for inner in (*operation._cond_ops, *operation._body_ops):
                    read += inner.inputs
            if isinstance(operation, mtf.Depend):
                for dependency in operation._dependencies:
                    read += dependency.outputs if isinstance(dependency, mtf.Operation) else [dependency]
            needed.update(map(id, read))
    return found[::-1]


def is_reshape(operation: mtf.Operation) -> bool:
    """Whether the operation gives its input other dims and leaves the numbers where they are."""
    return isinstance(operation, mtf.ReshapeOperation)


def _sizes(tensors: Sequence[mtf.Tensor]) -> dict[str, int]:
    return {dim.name: dim.size for tensor in tensors for dim in tensor.shape.dims}


def kind_of(operation: mtf.Operation) -> str:
    """The kind of work: "matmul", "convolution", "reduction", "pointwise", "gather" or "none"."""
    if isinstance(operation, _FREE):
        return "none"
    if isinstance(operation, _CONVOLUTIONS + _CONVOLUTION_GRADIENTS):
        return "convolution"
    if isinstance(operation, mtf.EinsumOperation):
        inputs, output = operation.inputs, operation.outputs[0]
        everything = _sizes(inputs)
        if set(everything) <= set(output.shape.dimension_names):
            return "pointwise"
        # Mesh-TF multiplies and reduces, without a matrix product, where one operand already has every dim.
        if any(tensor.shape.ndims == len(everything) for tensor in inputs):
            return "reduction"
        return "matmul"
    if isinstance(operation, (mtf.ReduceOperation, mtf.PoolOperation, mtf.PoolBackPropOperation, mtf.TopKOperation)):
        return "reduction"
    if isinstance(operation, (mtf.OneHotOperation, mtf.ConcatOperation, mtf.SplitOperation, mtf.StackOperation,
                              mtf.UnstackOperation, mtf.SliceOperation, mtf.PadOperation, mtf.ShiftOperation)):
        return "gather"
    return "pointwise"


def flops_of(operation: mtf.Operation) -> float:
    """Floating point operations of the whole operation, unsplit: 2 per multiply-add, 1 per element otherwise."""
    kind = kind_of(operation)
    if kind == "none":
        return 0.0
    if kind == "convolution":
        return 2.0 * _convolution_size(operation)
    everything = _sizes([*operation.inputs, *operation.outputs])
    if isinstance(operation, mtf.EinsumOperation):
        return (2.0 if kind == "matmul" else float(len(operation.inputs))) * math.prod(everything.values())
    if isinstance(operation, mtf.WhileLoopOperation):
        # The number of iterations is not in the graph: one of them.
        return float(sum(flops_of(inner) for inner in operation._body_ops))
    return float(max([tensor.size for tensor in [*operation.inputs, *operation.outputs]], default=0))


def _convolution_size(operation: mtf.Operation) -> float:
    """Multiply-adds of a convolution or one of its gradients: they are the same three ways round."""
    if isinstance(operation, mtf.Conv2or3dBackpropFilterOperation):
        _, gradient = operation.inputs
        conv_filter = operation.outputs[0]
    elif isinstance(operation, mtf.Conv2or3dBackpropInputOperation):
        gradient, conv_filter = operation.inputs
    else:
        conv_filter = operation.inputs[1]
        gradient = operation.outputs[0]
    # Every output element is a sum over the filter's taps and the channels that the output does not have.
    names = set(gradient.shape.dimension_names)
    taps = math.prod(dim.size for dim in conv_filter.shape.dims if dim.name not in names)
    return float(gradient.size) * taps


def reduced_dims(operation: mtf.Operation) -> tuple[str, ...]:
    """The dims whose split leaves partial results in the outputs, which Mesh-TF then combines by an all-reduce."""
    if isinstance(operation, (mtf.EinsumOperation, mtf.ReduceOperation)):
        outputs = set(operation.outputs[0].shape.dimension_names)
        return tuple(name for name in _sizes(operation.inputs) if name not in outputs)
    if isinstance(operation, _CONVOLUTIONS + _CONVOLUTION_GRADIENTS):
        outputs = set(operation.outputs[0].shape.dimension_names)
        return tuple(name for name in _sizes(operation.inputs) if name not in outputs)
    return ()


def is_lazy_sum(operation: mtf.Operation) -> bool:
    """Whether Mesh-TF leaves the all-reduce of the output until somebody needs the sum."""
    if isinstance(operation, mtf.ReduceOperation):
        return operation._reduction_fn_string == "SUM"
    return isinstance(operation, (mtf.EinsumOperation, *_CONVOLUTIONS, *_CONVOLUTION_GRADIENTS))


def passes_lazy_sums(operation: mtf.Operation) -> bool:
    """Whether the operation works on unfinished sums and hands the all-reduce on (an addition of several does)."""
    return isinstance(operation, (mtf.AddOperation, mtf.ReshapeOperation, mtf.CustomGradientOperation))
