"""Matrix products and convolutions among TensorFlow's nodes: how many floating point operations they are."""

from __future__ import annotations

import math
from collections.abc import Iterable

from pase_mtf.compat import tf

__all__ = ["Products", "products_of"]

_MATRICES = {"MatMul": "transpose_a", "BatchMatMul": "adj_x", "BatchMatMulV2": "adj_x", "BatchMatMulV3": "adj_x"}
"""Type of node -> the attribute that says whether its first matrix is transposed."""
_OUTPUT = -1
_CONVOLUTIONS = {
    "Conv2D": (_OUTPUT, 1, 1), "Conv2DBackpropInput": (2, 1, 1), "Conv2DBackpropFilter": (2, _OUTPUT, 1),
    "Conv3D": (_OUTPUT, 1, 1), "Conv3DBackpropInputV2": (2, 1, 1), "Conv3DBackpropFilterV2": (2, _OUTPUT, 1),
    "DepthwiseConv2dNative": (_OUTPUT, 1, 2), "DepthwiseConv2dNativeBackpropInput": (2, 1, 2),
    "DepthwiseConv2dNativeBackpropFilter": (2, _OUTPUT, 2)}
"""Type of node -> which of its inputs has the places of the convolution's output, which is the filter, and how many of
its dims, the last ones, are channels of the output."""


class Products(dict[str, float]):
    """FLOPs of several nodes by the kind of operation that they are, "matmul" or "convolution"."""

    @property
    def flops(self) -> float:
        """Of all of them."""
        return math.fsum(self.values())

    @property
    def kind(self) -> str:
        """That of most FLOPs; "" where there are none."""
        return max(self, key=self.__getitem__, default="")


def products_of(nodes: Iterable[tf.Operation]) -> Products:
    """The matrix products and convolutions among nodes: two FLOPs per multiply-add, by the shapes that are known before
    they run."""
    found = Products()
    for node in nodes:
        kind, flops = "convolution" if node.type in _CONVOLUTIONS else "matmul", _flops(node)
        if flops:
            found[kind] = found.get(kind, 0.0) + flops
    return found


def _flops(node: tf.Operation) -> float:
    if any(tensor.shape.rank is None for tensor in (*node.inputs, *node.outputs)):
        return 0.0
    if node.type in _MATRICES:
        transposed = node.get_attr(_MATRICES[node.type])
        return 2.0 * math.prod(_sizes(node.outputs[0])) * _sizes(node.inputs[0])[-2 if transposed else -1]
    if node.type == "Einsum" and len(node.inputs) == 2:
        return 2.0 * math.prod(_sizes(node.outputs[0])) * _summed_over(node)
    if node.type in _CONVOLUTIONS:
        *ends, channels = _CONVOLUTIONS[node.type]
        places, weights = (_sizes(node.outputs[0] if end == _OUTPUT else node.inputs[end]) for end in ends)
        return 2.0 * math.prod(places) * math.prod(weights[:-channels])
    return 0.0


def _sizes(tensor: tf.Tensor) -> list[int]:
    return [size or 1 for size in tensor.shape.as_list()]


def _summed_over(einsum: tf.Operation) -> int:
    """The elements of the dims that its operands have and its output has not."""
    operands, _, made = einsum.get_attr("equation").decode().partition("->")
    sizes: dict[str, int] = {}
    for labels, tensor in zip(operands.split(","), einsum.inputs, strict=True):
        first, _, last = labels.partition("...")
        sizes.update(zip(first, _sizes(tensor), strict=False))
        sizes.update(zip(reversed(last), reversed(_sizes(tensor)), strict=False))
    return math.prod(size for label, size in sizes.items() if label not in made)
