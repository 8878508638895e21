"""The kernels of a move, written down instead of emitted: by the code that emits them, on shapes instead of tensors."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Mapping, Sequence

from pase_mtf.graph.partition import Partition
from pase_mtf.lowering.emit import Emitter
from pase_mtf.lowering.exchange import Copies
from pase_mtf.lowering.reshard import move
from pase_mtf.machine.kernels import Block, Kernel, float_of_size, send_kernel

__all__ = ["recorded_move"]


class _Shape(list[int]):
    """What is asked of the shape of a tensor."""

    @property
    def rank(self) -> int:
        """How many dims."""
        return len(self)

    def as_list(self) -> list[int]:
        """The sizes."""
        return list(self)


class _Tensor:
    """A tensor of which nothing is there but its shape, and the devices that have it: where it was made, first."""

    def __init__(self, shape: Sequence[int], device: str) -> None:
        self.shape, self.devices = _Shape(shape), {device}


class _Sends(Copies):
    """Writes down what is taken to another device as it is."""

    def __init__(self, kernels: collections.Counter[Kernel], itemsize: int) -> None:
        self._kernels, self._itemsize = kernels, itemsize

    def bring(self, device: str, x: _Tensor) -> _Tensor:
        """The tensor itself, once for every device."""
        if device not in x.devices:
            x.devices.add(device)
            self._kernels[send_kernel(math.prod(x.shape), self._itemsize)] += 1
        return x


class _Recorder(Emitter):
    """Writes down what would be emitted.

    Attributes:
      kernels: and how often.
    """

    def __init__(self, devices: int, itemsize: int) -> None:
        super().__init__([str(device) for device in range(devices)], shared=True)
        self.kernels: collections.Counter[Kernel] = collections.Counter()
        self.exchange = _Sends(self.kernels, itemsize)
        self._dtype = float_of_size(itemsize)

    def _block(self, x: _Tensor) -> Block:
        return Block(self._dtype, tuple(x.shape))

    def _indices(self, *numbers: int) -> Block:
        return Block("int32", (len(numbers),), tuple(map(int, numbers)))

    def slice(self, device: str, x: _Tensor, begin: Sequence[int], size: Sequence[int]) -> _Tensor:
        """A region, wherever it begins."""
        made = _Tensor(size, device)
        self.kernels[Kernel("Slice", (self._block(x), self._indices(*[0] * len(size)), self._indices(*size)),
                            (self._block(made),))] += 1
        return made

    def emit_split(self, device: str, x: _Tensor, parts: int, axis: int) -> list[_Tensor]:
        """Equal parts."""
        shape = list(x.shape)
        shape[axis] //= parts
        made = [_Tensor(shape, device) for _ in range(parts)]
        self.kernels[Kernel("Split", (Block("int32", (), (axis,)), self._block(x)), tuple(map(self._block, made)),
                            (("num_split", parts),))] += 1
        return made

    def concat(self, device: str, xs: Sequence[_Tensor], axis: int) -> _Tensor:
        """The tensors one after the other."""
        if len(xs) == 1:
            return xs[0]
        apart = any(device not in x.devices for x in xs)  # and not what was put together here of other devices' blocks
        for x in xs:
            x.devices.add(device)  # sending them is a part of this kernel
        shape = list(xs[0].shape)
        shape[axis] = sum(x.shape[axis] for x in xs)
        made = _Tensor(shape, device)
        self.kernels[Kernel("ConcatV2", (*map(self._block, xs), Block("int32", (), (axis,))), (self._block(made),),
                            apart=apart)] += 1
        return made

    def reshape(self, device: str, x: _Tensor, shape: Sequence[int]) -> _Tensor:
        """Another shape."""
        if list(x.shape) == list(shape):
            return x
        made = _Tensor(shape, device)
        self.kernels[Kernel("Reshape", (self._block(x), self._indices(*shape)), (self._block(made),))] += 1
        return made

    def transpose(self, device: str, x: _Tensor, perm: Sequence[int]) -> _Tensor:
        """Its dims in another order."""
        made = _Tensor([x.shape[axis] for axis in perm], device)
        self.kernels[Kernel("Transpose", (self._block(x), self._indices(*perm)), (self._block(made),))] += 1
        return made


@functools.lru_cache(maxsize=1 << 16)
def recorded_move(source: Partition, target: Partition, shape: tuple[int, ...], itemsize: int) -> Mapping[Kernel, int]:
    """The kernels that `reshard.move` emits where devices share memory, on all of them together.

    Args:
      source, target: partitions over the same devices.
      shape: the unsplit shape of the tensor.
      itemsize: bytes per element.
    """
    recorder, block = _Recorder(1 + max((*source.devices, *target.devices)), itemsize), source.block_shape(shape)
    move([_Tensor(block, recorder.devices[device]) for device in source.devices], source, target, shape, recorder)
    return recorder.kernels
