"""Kernels of many kinds, small enough to be timed at once."""

from pase_mtf.machine.kernels import Block, Kernel, send_kernel, sum_kernel


def floats(*shape):
    return Block("float32", shape)


ADD = Kernel("AddV2", (floats(8, 4), floats(4)), (floats(8, 4),))
KERNELS = (
    ADD, sum_kernel(2, 64, 4), sum_kernel(2, 64, 2), send_kernel(64, 4), send_kernel(1, 1),
    Kernel("Einsum", (floats(8, 4), floats(4, 16)), (floats(8, 16),), (("equation", "ab,bc->ac"),)),
    Kernel("Conv2D", (floats(2, 4, 4, 3), floats(3, 3, 3, 2)), (floats(2, 2, 2, 2),),
           (("padding", "SAME"), ("strides", (1, 2, 2, 1)))),
    Kernel("AssignSubVariableOp", (Block("resource", (8,)), floats(8)), ()),
    Kernel("OneHot", (Block("int32", (8,)), Block("int32", (), (4,)), floats(), floats()), (floats(8, 4),)),
    Kernel("Split", (Block("int32", (), (1,)), floats(8, 4)), (floats(8, 2), floats(8, 2)), (("num_split", 2),)),
    Kernel("ConcatV2", (floats(8, 2), floats(8, 2), Block("int32", (), (1,))), (floats(8, 4),), apart=True),
    Kernel("Einsum", (floats(8, 4), floats(4, 16)), (floats(8, 16),), (("equation", "ab,bc->ac"),), again=True),
    Kernel("Cast", (floats(8),), (Block("bfloat16", (8,)),), (("DstT", "bfloat16"),)),
    Kernel("GatherV2", (floats(8, 2), Block("int32", (5000,)), Block("int32", (), (0,))), (floats(5000, 2),)))
MULTIPLY = Kernel("Mul", (floats(8, 4), floats(4)), (floats(8, 4),))
NONE = Kernel("NoSuchOperation", (floats(8),), (floats(8),))
WRONG = Kernel("Einsum", (floats(8, 4), floats(5, 16)), (floats(8, 16),), (("equation", "ab,bc->ac"),))
