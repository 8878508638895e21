"""Convolutions, transposed convolutions, and the gradients of both.

Dims: image [batch..., spatial..., channels], filter [spatial..., in-channels, out-channels] (of a transposed
convolution [spatial..., out-channels, in-channels]).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

from pase_mtf.compat import mtf
from pase_mtf.operations.einsum import contracted_away, union_space
from pase_mtf.operations.protocols import StockDemands, dims_of
from pase_mtf.operations.registry import Rule, add_rules, always, names_of, rule_of, tensors_of
from pase_mtf.operations.stock_sums import PendingSum, ReducedSum

_ops = mtf.ops


def _filters(operation: mtf.Operation) -> mtf.Tensor:
    if isinstance(operation, _ops.Conv2or3dBackpropFilterOperation):
        return operation.outputs[0]
    return operation.inputs[1]


def _images(operation: mtf.Operation) -> list[mtf.Tensor]:
    filters = _filters(operation)
    return [tensor for tensor in tensors_of(operation) if tensor is not filters]


def _flops(operation: mtf.Operation) -> float:
    """Of a convolution or one of its gradients: they do the same multiply-adds, three ways round.

    Every element of the coarser of the two images takes part in a product with all of the filter but for the channels
    that it has itself. The coarser one is the output of a convolution, and the input of a transposed one.
    """
    coarse = min(_images(operation), key=lambda image: math.prod(
        dim.size for dim in image.shape.dims[-1 - _spatial(operation):-1]))
    # By place: a filter may call its dims as the images do theirs.
    *window, one, other = _filters(operation).shape.dims
    channels = other if one == coarse.shape.dims[-1] else one
    return 2.0 * float(coarse.size) * math.prod(dim.size for dim in (*window, channels))


def _spatial(operation: mtf.Operation) -> int:
    return len(_filters(operation).shape) - 2


def _splittable(operation: mtf.Operation) -> set[str]:
    """Spatial dims of images and filter stay whole; batch dims and channels may be split.

    The gradients declare the spatial dims splittable, and they are not.
    """
    spatial = _spatial(operation)
    whole = set(_filters(operation).shape.dimension_names[:spatial])
    for image in _images(operation):
        whole |= set(image.shape.dimension_names[-1 - spatial:-1])
    return names_of(operation) - whole


def _transposed_splittable(operation: mtf.Operation) -> set[str]:
    """Mesh-TF gives TensorFlow the unsplit number of output channels."""
    return _splittable(operation) - {operation.outputs[0].shape.dimension_names[-1]}


def _demands(operation: mtf.Operation, demands: StockDemands) -> None:
    demands.keep_whole(operation, names_of(operation) - set(rule_of(operation).splittable(operation)),
                       "a convolution cannot split it")
    # The dims over which Mesh-TF counts the work: those of the filter and of the convolution's output.
    if isinstance(operation, _ops.Conv2or3dBackpropFilterOperation):
        other = operation.inputs[1]
    elif isinstance(operation, _ops.Conv2or3dBackpropInputOperation):
        other = operation.inputs[0]
    else:
        other = operation.outputs[0]
    union = dict.fromkeys((*dims_of(_filters(operation).shape), *dims_of(other.shape)))
    demands.keep_apart(operation, tuple(union), "one convolution")


def _sums(operation: mtf.Operation, _: Mapping[mtf.Tensor, PendingSum]) -> dict[mtf.Tensor, PendingSum]:
    """Over the channels that the image to be convolved has."""
    return {operation.outputs[0]: ReducedSum((operation.inputs[0].shape.dims[-1].name,))}


def _filter_sums(operation: mtf.Operation, _: Mapping[mtf.Tensor, PendingSum]) -> dict[mtf.Tensor, PendingSum]:
    """Over the batch dims."""
    batch = operation.inputs[1].shape.dims[:-operation._num_nonbatch_dims]
    return {operation.outputs[0]: ReducedSum(tuple(dim.name for dim in batch))}


def _rule(role: str, splittable: Callable[[mtf.Operation], set[str]] = _splittable,
          sums: Callable[..., dict[mtf.Tensor, PendingSum]] = _sums) -> Rule:
    return Rule(kind=always("convolution"), role=always(role), flops=_flops, contracted=contracted_away,
                sum_is_pending=always(True), splittable=splittable, spaces=union_space, stock_demands=_demands,
                stock_sums=sums)


add_rules({
    _ops.Conv2dOperation: _rule("convolution"),
    _ops.Conv3dOperation: _rule("convolution"),
    _ops.Conv2dTransposeOperation: _rule("transposed convolution", _transposed_splittable),
    _ops.Conv3dTransposeOperation: _rule("transposed convolution", _transposed_splittable),
    # That of a transposed convolution is a convolution.
    _ops.Conv2or3dBackpropInputOperation: dataclasses.replace(_rule("image gradient"), role=lambda operation: (
        "convolution" if operation._is_transpose else "image gradient")),
    _ops.Conv2or3dBackpropFilterOperation: _rule("filter gradient", sums=_filter_sums),
})
