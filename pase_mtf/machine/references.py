"""Kernels that tell how fast a machine is."""

from __future__ import annotations

from pase_mtf.machine.kernels import TINY, Block, Kernel, sum_kernel

__all__ = ["PROBES", "REFERENCES"]


def _floats(*shape: int) -> Block:
    return Block("float32", shape)


def _indices(*values: int) -> Block:
    return Block("int32", (len(values),), values)


_SAME = (("padding", "SAME"), ("strides", (1, 1, 1, 1)))
_ARITHMETIC = Kernel("Einsum", (_floats(256, 512), _floats(512, 512)), (_floats(256, 512),),
                     (("equation", "ab,bc->ac"),))
_MEMORY = Kernel("Mul", (_floats(1 << 20), _floats(1 << 20)), (_floats(1 << 20),))
PROBES = _ARITHMETIC, _MEMORY
"""One that is bound by arithmetic, and one by memory: timed with all others, they tell whether these are disturbed."""
REFERENCES = (
    _ARITHMETIC,
    Kernel("Einsum", (_floats(8, 2048), _floats(2048, 1024)), (_floats(8, 1024),), (("equation", "ab,bc->ac"),)),
    Kernel("Conv2D", (_floats(8, 14, 14, 64), _floats(3, 3, 64, 128)), (_floats(8, 14, 14, 128),), _SAME),
    Kernel("Conv2DBackpropInput", (_indices(8, 14, 14, 64), _floats(3, 3, 64, 128), _floats(8, 14, 14, 128)),
           (_floats(8, 14, 14, 64),), _SAME),
    Kernel("Conv2DBackpropFilter", (_floats(8, 14, 14, 64), _indices(3, 3, 64, 128), _floats(8, 14, 14, 128)),
           (_floats(3, 3, 64, 128),), _SAME),
    Kernel("Mul", (_floats(1 << 14), _floats(1 << 14)), (_floats(1 << 14),)),
    _MEMORY,
    TINY,
    Kernel("Sum", (_floats(256, 1024), _indices(1)), (_floats(256),)),
    sum_kernel(2, 1 << 16, 4),
)
"""Kernels that are timed first on every machine, and again at the start of every run: a few of each kind."""
