"""The kernels of a move, written down instead of emitted: by the code that emits them, on shapes instead of tensors."""

from __future__ import annotations

import collections
import functools
from collections.abc import Mapping, Sequence

from pase_mtf.graph.partition import Partition
from pase_mtf.lowering.emit import Emitter
from pase_mtf.lowering.reshard import move
from pase_mtf.machine.kernels import Block, Kernel, float_of_size

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
    """A tensor of which nothing is there but its shape."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = _Shape(shape)


class _Recorder(Emitter):
    """Writes down what would be emitted.

    Attributes:
      kernels: and how often.
    """

    def __init__(self, devices: int, dtype: str) -> None:
        super().__init__([str(device) for device in range(devices)], shared=True)
        self.kernels: collections.Counter[Kernel] = collections.Counter()
        self._dtype = dtype

    def _block(self, x: _Tensor) -> Block:
        return Block(self._dtype, tuple(x.shape))

    def _indices(self, *numbers: int) -> Block:
        return Block("int32", (len(numbers),), tuple(map(int, numbers)))

    def slice(self, device: str, x: _Tensor, begin: Sequence[int], size: Sequence[int]) -> _Tensor:
        """A region, wherever it begins."""
        made = _Tensor(size)
        self.kernels[Kernel("Slice", (self._block(x), self._indices(*[0] * len(size)), self._indices(*size)),
                            (self._block(made),))] += 1
        return made

    def emit_split(self, device: str, x: _Tensor, parts: int, axis: int) -> list[_Tensor]:
        """Equal parts."""
        shape = list(x.shape)
        shape[axis] //= parts
        made = [_Tensor(shape) for _ in range(parts)]
        self.kernels[Kernel("Split", (Block("int32", (), (axis,)), self._block(x)), tuple(map(self._block, made)),
                            (("num_split", parts),))] += 1
        return made

    def concat(self, device: str, xs: Sequence[_Tensor], axis: int) -> _Tensor:
        """The tensors one after the other."""
        if len(xs) == 1:
            return xs[0]
        shape = list(xs[0].shape)
        shape[axis] = sum(x.shape[axis] for x in xs)
        made = _Tensor(shape)
        self.kernels[Kernel("ConcatV2", (*map(self._block, xs), Block("int32", (), (axis,))), (self._block(made),),
                            apart=True)] += 1
        return made

    def reshape(self, device: str, x: _Tensor, shape: Sequence[int]) -> _Tensor:
        """Another shape."""
        if list(x.shape) == list(shape):
            return x
        made = _Tensor(shape)
        self.kernels[Kernel("Reshape", (self._block(x), self._indices(*shape)), (self._block(made),))] += 1
        return made

    def transpose(self, device: str, x: _Tensor, perm: Sequence[int]) -> _Tensor:
        """Its dims in another order."""
        made = _Tensor([x.shape[axis] for axis in perm])
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
    recorder = _Recorder(1 + max((*source.devices, *target.devices)), float_of_size(itemsize))
    block = _Tensor(source.block_shape(shape))
    move([block for _ in source.devices], source, target, shape, recorder)
    return recorder.kernels
