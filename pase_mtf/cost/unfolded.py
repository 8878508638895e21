"""What gradients of convolutions hold beside their tensors, where TensorFlow unfolds images for them.

On processors for which it does not take oneDNN's kernels, TensorFlow computes such a gradient as a product of matrices:
an element for every place of the output and every weight of a channel, for as many images at once as fill a cache of
30 MiB, however few there are (its core/kernels/conv_grad_filter_ops.cc and conv_grad_input_ops.h). A gradient of the
image that keeps all threads busy is computed image by image. Both gradients of a convolution are ready to run at once,
and do where there is a core for each.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from pase_mtf.cost.held import LayerItems
from pase_mtf.cost.tables import ConfigurationTable, positions_of
from pase_mtf.graph.computation_graph import Layer, LayerOperation, Operand
from pase_mtf.graph.configurations import Configuration

__all__ = ["Unfolded", "unfolded_bytes"]

_WORKING_SET = 30 << 20
"""Bytes that images are unfolded into, about."""
_OF_A_THREAD = 256 << 10
"""Bytes that one thread works on at least, where several share one image."""


def _coarse(operation: LayerOperation) -> Operand:
    """Of the two images that the gradient of a filter is of, the one over whose places it multiplies: what the
    convolution made, of a transposed one what went into it. The last channels of the filter are its own."""
    channels, spatial = operation.outputs[0].shape[-1], len(operation.outputs[0].shape) - 2
    return min(operation.inputs[::-1], key=lambda image: (
        image.shape[-1] != channels, math.prod(image.shape[-1 - spatial:-1])))


# Role -> given an operation: the tensor over whose places and channels it multiplies, and the filter.
_ENDS: dict[str, Callable[[LayerOperation], tuple[Operand, Operand]]] = {
    "filter gradient": lambda operation: (_coarse(operation), operation.outputs[0]),
    "image gradient": lambda operation: (operation.inputs[0], operation.inputs[1]),
    "transposed convolution": lambda operation: (operation.inputs[0], operation.inputs[1])}


def unfolded_bytes(images: np.ndarray, places: int, weights: np.ndarray, channels: np.ndarray, itemsize: int,
                   threads: int = 0) -> np.ndarray:
    """Bytes of the images that one kernel unfolds at once.

    Args:
      images: int64 [K], how many it is given.
      places: of the convolution's output, in one image.
      weights: int64 [K], of the filter, for one channel of the output.
      channels: int64 [K], of the output.
      itemsize: bytes per element.
      threads: of a gradient of the image, how many share it; 0: it is one of a filter.

    Returns:
      int64 [K].
    """
    unit = places * weights + places * channels + weights * channels
    together = -(-(_WORKING_SET // itemsize) // unit)
    if threads:
        together = np.where((images == 1) | (unit // threads >= _OF_A_THREAD // itemsize), 1, together)
    found: np.ndarray = together * places * weights * itemsize
    return found


class Unfolded:
    """What the kernels of one layer unfold.

    Attributes:
      there: (kernel, the moment of the step in which it runs): all of one moment may run at the same time. Empty where
        nothing is unfolded.
    """

    def __init__(self, layer: Layer, items: LayerItems, threads: int) -> None:
        """Looks at a layer.

        Args:
          layer: of a graph.
          items: what it holds.
          threads: that one kernel has; 0: none unfolds.
        """
        self._items, self._threads = items, threads
        self._kernels = [operation for operation in layer.operations if operation.role in _ENDS] if threads else []
        there = {(number, held.begin) for number, operation in enumerate(self._kernels)
                 for held in operation.held if held.output == 0}
        self.there = sorted(there | self._beside(there))
        self._of = functools.cache(lambda configuration: self._under((configuration,))[:, 0].tolist())

    def _beside(self, there: set[tuple[int, int]]) -> set[tuple[int, int]]:
        """The two gradients of one convolution wait for the same: each may run in the moment of the other, though an
        order of the step has one after the other."""
        filters, images = ([number for number, kernel in enumerate(self._kernels) if kernel.role == role]
                           for role in ("filter gradient", "image gradient"))
        if any(len({self._kernels[number].name for number in numbers}) != 1 for numbers in (filters, images)):
            return set()
        of_filter, of_image = ({when for number, when in there if number in numbers} for numbers in (filters, images))
        return ({(filters[0], when) for when in of_image - of_filter}
                | {(images[0], when) for when in of_filter - of_image})

    def under(self, configuration: Configuration) -> Iterator[tuple[float, int]]:
        """Bytes, and the moment in which they are there."""
        nbytes = self._of(configuration)
        return ((nbytes[kernel], moment) for kernel, moment in self.there)

    def at(self, moment: int, configurations: Sequence[Configuration]) -> np.ndarray:
        """Bytes that are there at a moment under each of K configurations, float64 [K]."""
        kernels = [kernel for kernel, when in self.there if when == moment]
        if not kernels:
            return np.zeros(len(configurations))
        found: np.ndarray = self._under(configurations)[kernels].sum(axis=0).astype(np.float64)
        return found

    def _under(self, configurations: Sequence[Configuration]) -> np.ndarray:
        """Bytes of every kernel, int64 [kernels, K]."""
        table = self._items.shares.table(configurations)
        return np.stack([self._nbytes(kernel, table) for kernel in self._kernels])

    def _nbytes(self, kernel: LayerOperation, table: ConfigurationTable) -> np.ndarray:
        image, weights = _ENDS[kernel.role](kernel)

        def local(operand: Operand, dims: slice) -> np.ndarray:
            columns = np.array(positions_of(operand.dims[dims], self._items.position), np.int64)
            return np.asarray(math.prod(operand.shape[dims]) // table.shards[:, columns].prod(axis=1))

        spatial = len(weights.shape) - 2
        return unfolded_bytes(
            local(image, slice(None, -1 - spatial)), math.prod(image.shape[-1 - spatial:-1]),
            local(weights, slice(None, -1)), local(image, slice(-1, None)), image.itemsize,
            0 if kernel.role == "filter gradient" else self._threads)
