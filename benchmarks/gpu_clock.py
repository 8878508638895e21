"""Times kernels on a GPU with PyTorch: needs that and numpy, and neither TensorFlow nor this package.

    python benchmarks/gpu_clock.py kernels.json --output=times.json --seconds=300

`benchmarks.gpu` writes kernels.json, and makes a page of times.json. A kernel is a TensorFlow node (`machine.kernels`);
what PyTorch calls the same is captured many times in a CUDA graph, so that no launch from the host is in its time, on
copies of its tensors that together do not fit in the caches, as far as some are enough. Products are in TF32, as
TensorFlow has them by default, or in bfloat16.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import operator
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

try:
    import torch
    import torch.nn.functional as nn
except ImportError:
    sys.exit("error: PyTorch is not installed here; run this where it is, on a computer with a GPU")

__all__ = ["main", "timed"]

_COPIES, _COPIES_BYTES, _MOST_BYTES = 16, 256 * 2**20, 2 * 2**30
_DEVICE = "cuda"
_REPLAYS, _REPLAY_SECONDS = 5, 2e-3
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int32": torch.int32, "int64": torch.int64,
           "bool": torch.bool, "float64": torch.float64, "half": torch.float16, "resource": torch.float32}

_Kernel = dict[str, Any]
_Function = Callable[[Sequence[torch.Tensor], _Kernel], object]


def _values(kernel: _Kernel, number: int) -> list[int]:
    """The numbers in an input that is a constant."""
    return list(kernel["inputs"][number][2])


def _images(tensor: torch.Tensor) -> torch.Tensor:
    """[N, H, W, C] as PyTorch names it, where it lies."""
    return tensor.permute(0, 3, 1, 2)


def _filters(tensor: torch.Tensor) -> torch.Tensor:
    """[H, W, in, out] as PyTorch wants it, in the order that is fastest there."""
    return tensor.permute(3, 2, 0, 1).contiguous(memory_format=torch.channels_last)


def _geometry(kernel: _Kernel, image: Sequence[int], made: Sequence[int], window: Sequence[int]) -> dict[str, Any]:
    """Stride, and the padding that makes an output of this size; where it is not the same on both sides, the more."""
    attributes = kernel["attributes"]
    stride, apart = (attributes.get(name, [1] * 4)[1:3] for name in ("strides", "dilations"))
    needed = [(out - 1) * step + (size - 1) * far + 1 - held
              for out, step, size, far, held in zip(made, stride, window, apart, image, strict=True)]
    return {"stride": list(stride), "padding": [max(-(-pad // 2), 0) for pad in needed], "dilation": list(apart)}


def _convolution(tensors: Sequence[torch.Tensor], kernel: _Kernel) -> object:
    image, filters = tensors
    around = _geometry(kernel, image.shape[2:], kernel["outputs"][0][1][1:3], filters.shape[2:])
    return nn.conv2d(image, filters, groups=image.shape[1] // filters.shape[1], **around)


def _convolution_gradient(tensors: Sequence[torch.Tensor], kernel: _Kernel) -> object:
    image, filters, gradient = tensors
    around = _geometry(kernel, image.shape[2:], gradient.shape[2:], filters.shape[2:])
    filters_wanted = "Filter" in kernel["operation"]
    return torch.ops.aten.convolution_backward(
        gradient, image, filters, None, around["stride"], around["padding"], around["dilation"], False, [0, 0],
        image.shape[1] // filters.shape[1], [not filters_wanted, filters_wanted, False])


def _pool(kernel: _Kernel, image: torch.Tensor) -> tuple[list[int], list[int], list[int]]:
    attributes = kernel["attributes"]
    window, stride = attributes["ksize"][1:3], attributes["strides"][1:3]
    same = attributes.get("padding") == "SAME"
    return list(window), list(stride), [size // 2 if same else 0 for size in window]


def _max_pool(tensors: Sequence[torch.Tensor], kernel: _Kernel) -> object:
    return nn.max_pool2d(tensors[0], *_pool(kernel, tensors[0]))


def _max_pool_gradient(tensors: Sequence[torch.Tensor], kernel: _Kernel) -> object:
    image, _, gradient, *places = tensors
    return torch.ops.aten.max_pool2d_with_indices_backward(
        gradient, image, *_pool(kernel, image), [1, 1], False, places[0])


def _average_pool(tensors: Sequence[torch.Tensor], kernel: _Kernel) -> object:
    return nn.avg_pool2d(tensors[0], *_pool(kernel, tensors[0]), count_include_pad=False)


def _average_pool_gradient(tensors: Sequence[torch.Tensor], kernel: _Kernel) -> object:
    gradient, image = tensors
    return torch.ops.aten.avg_pool2d_backward(gradient, image, *_pool(kernel, image), False, False, None)


def _sliced(tensors: Sequence[torch.Tensor], kernel: _Kernel) -> object:
    begins, sizes = _values(kernel, 1), _values(kernel, 2)
    return tensors[0][tuple(slice(begin, None if size < 0 else begin + size)
                            for begin, size in zip(begins, sizes, strict=True))].clone()


def _strided(tensors: Sequence[torch.Tensor], kernel: _Kernel) -> object:
    masks = {name: int(kernel["attributes"].get(f"{name}_mask", 0)) for name in ("begin", "end", "shrink_axis")}
    where: list[Any] = []
    for place, (begin, end, step) in enumerate(zip(*(_values(kernel, number) for number in (1, 2, 3)), strict=True)):
        if masks["shrink_axis"] >> place & 1:
            where.append(begin)
        else:
            where.append(slice(None if masks["begin"] >> place & 1 else begin,
                               None if masks["end"] >> place & 1 else end, step))
    return tensors[0][tuple(where)].clone()


def _padded(tensors: Sequence[torch.Tensor], kernel: _Kernel) -> object:
    pairs = np.reshape(_values(kernel, 1), (-1, 2))[::-1]
    return nn.pad(tensors[0], [int(size) for pair in pairs for size in pair])


def _reduced(function: Callable[..., torch.Tensor]) -> _Function:
    return lambda tensors, kernel: function(tensors[0], dim=_values(kernel, 1))


def _by_axis(function: Callable[..., object]) -> _Function:
    return lambda tensors, kernel: function(tensors, dim=int(kernel["attributes"].get("axis", 0)))


def _parts(tensors: Sequence[torch.Tensor], kernel: _Kernel) -> object:
    sizes = [block[1] for block in kernel["outputs"]]
    axis = next((place for place, (whole, part) in enumerate(zip(tensors[0].shape, sizes[0], strict=True))
                 if whole != part), 0)
    return torch.split_with_sizes_copy(tensors[0], [size[axis] for size in sizes], dim=axis)


def _one_hot(tensors: Sequence[torch.Tensor], kernel: _Kernel) -> object:
    made = torch.zeros(kernel["outputs"][0][1], device=tensors[0].device)
    return made.scatter_(-1, tensors[0].long().unsqueeze(-1) % made.shape[-1], 1.0)


def _joined(tensors: Sequence[torch.Tensor], kernel: _Kernel) -> object:
    made = kernel["outputs"][0][1]
    axis = next((place for place, size in enumerate(made) if size != tensors[0].shape[place]), 0)
    return torch.cat([tensor for tensor in tensors if tensor.ndim == len(made)], dim=axis)


def _pointwise(function: Callable[..., object]) -> _Function:
    return lambda tensors, kernel: function(*tensors)


_FUNCTIONS: dict[str, _Function] = {
    **{name: _pointwise(function) for name, function in {
        "AddV2": operator.add, "Mul": operator.mul, "Sub": operator.sub, "RealDiv": operator.truediv,
        "Maximum": torch.maximum, "Minimum": torch.minimum, "SquaredDifference": lambda one, two: (one - two) ** 2,
        "GreaterEqual": operator.ge, "Greater": operator.gt, "Less": operator.lt, "LessEqual": operator.le,
        "Equal": operator.eq, "NotEqual": operator.ne, "LogicalAnd": torch.logical_and,
        "FloorDiv": operator.floordiv, "FloorMod": operator.mod, "SelectV2": torch.where, "Select": torch.where,
        "Sigmoid": torch.sigmoid, "Tanh": torch.tanh, "Rsqrt": torch.rsqrt, "Relu": torch.relu, "Sqrt": torch.sqrt,
        "Reciprocal": torch.reciprocal, "Square": torch.square, "Neg": operator.neg, "Exp": torch.exp,
        "Log": torch.log, "Sign": torch.sign, "Abs": torch.abs,
        "ReluGrad": lambda gradient, made: torch.ops.aten.threshold_backward(gradient, made, 0),
        "Softmax": lambda tensor: torch.softmax(tensor, -1), "AddN": lambda *tensors: sum(tensors[1:], tensors[0]),
        "AssignVariableOp": lambda variable, value: variable.copy_(value),
        "AssignAddVariableOp": lambda variable, value: variable.add_(value),
        "AssignSubVariableOp": lambda variable, value: variable.sub_(value),
    }.items()},
    "Sum": _reduced(torch.sum), "Mean": _reduced(torch.mean), "Max": _reduced(torch.amax),
    "Min": _reduced(torch.amin),
    "Einsum": lambda tensors, kernel: torch.einsum(kernel["attributes"]["equation"], *tensors),
    "Pack": _by_axis(torch.stack), "ConcatV2": _joined, "Split": _parts, "SplitV": _parts,
    "Unpack": lambda tensors, kernel: torch.unbind_copy(tensors[0], dim=int(kernel["attributes"].get("axis", 0))),
    "Slice": _sliced, "StridedSlice": _strided, "Pad": _padded, "PadV2": _padded,
    "Transpose": lambda tensors, kernel: tensors[0].permute(_values(kernel, 1)).contiguous(),
    "BroadcastTo": lambda tensors, kernel: tensors[0].expand(kernel["outputs"][0][1]).contiguous(),
    "Cast": lambda tensors, kernel: tensors[0].to(_DTYPES[kernel["outputs"][0][0]], copy=True),
    "ReverseV2": lambda tensors, kernel: torch.flip(tensors[0], _values(kernel, 1)),
    "OneHot": _one_hot,
    "Fill": lambda tensors, kernel: torch.full(kernel["outputs"][0][1], 0.0, device=_DEVICE),
    "Conv2D": _convolution, "Conv2DBackpropInput": _convolution_gradient,
    "Conv2DBackpropFilter": _convolution_gradient,
    "MaxPool": _max_pool, "MaxPoolGrad": _max_pool_gradient, "AvgPool": _average_pool,
    "AvgPoolGrad": _average_pool_gradient,
}
_NOTHING = frozenset({"Reshape", "ExpandDims", "Squeeze", "Identity", "ReadVariableOp"})
"""Of these TensorFlow makes no kernel that does anything."""


def _made(block: Sequence[Any]) -> torch.Tensor:
    dtype, shape = _DTYPES[block[0]], tuple(block[1])
    if dtype.is_floating_point:
        return torch.rand(shape, device=_DEVICE).add_(0.5).to(dtype)
    return torch.randint(0, 2, shape, device=_DEVICE).to(dtype)


def _read(kernel: _Kernel) -> list[torch.Tensor]:
    """What the function of a kernel is called with, made anew."""
    operation = kernel["operation"]
    if operation.startswith("Conv2DBackprop"):
        blocks = list(kernel["inputs"])
        wanted = 1 if "Filter" in operation else 0
        blocks[wanted] = kernel["outputs"][0]
        return [_images(_made(blocks[0])), _filters(_made(blocks[1])), _images(_made(blocks[2]))]
    if operation == "AvgPoolGrad":
        return [_images(_made(kernel["inputs"][1])), _images(_made(kernel["outputs"][0]))]
    tensors = [_made(block) for block in kernel["inputs"] if len(block) < 3]
    if operation == "Conv2D":
        return [_images(tensors[0]), _filters(tensors[1])]
    if operation in ("MaxPool", "AvgPool", "MaxPoolGrad"):
        tensors = [_images(tensor) for tensor in tensors]
    if operation == "MaxPoolGrad":
        window = _pool(kernel, tensors[0])
        tensors.append(torch.ops.aten.max_pool2d_with_indices(tensors[0], *window)[1])
    return tensors


def timed(kernel: _Kernel) -> float:
    """Seconds of a kernel, as `machine.kernels` writes one.

    Raises:
      KeyError: PyTorch's name of it is not known here.
      RuntimeError, TypeError, ValueError: PyTorch cannot do it.
    """
    if kernel["operation"] in _NOTHING:
        return 0.0
    function = _FUNCTIONS[kernel["operation"]]
    kernel = {"attributes": {}, **kernel}
    sets = [_read(kernel)]
    nbytes = max(sum(tensor.nbytes for tensor in sets[0]), 1)
    copies = min(_COPIES, max(math.ceil(_COPIES_BYTES / nbytes), 1), max(_MOST_BYTES // nbytes, 1))
    sets += [_read(kernel) for _ in range(copies - 1)]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for tensors in itertools.islice(itertools.cycle(sets), 3):
            function(tensors, kernel)
        begin.record(stream)
        for tensors in itertools.islice(itertools.cycle(sets), 3):
            function(tensors, kernel)
        end.record(stream)
    stream.synchronize()
    repeats = int(min(max(_REPLAY_SECONDS / max(begin.elapsed_time(end) / 3e3, 1e-6), copies, 5), 200))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for tensors in itertools.islice(itertools.cycle(sets), repeats):
            function(tensors, kernel)
    graph.replay()
    found = []
    for _ in range(_REPLAYS):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3 / repeats)
    return statistics.median(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Times as many of the kernels in a file as a time allows, in their order."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernels", help="the file of `python -m benchmarks.gpu`")
    parser.add_argument("--output", default="times.json", help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=300.0, help="for all of them (default: %(default)s)")
    flags = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("error: PyTorch sees no GPU; run this on a computer that has one", file=sys.stderr)
        return 2
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    kernels = json.loads(pathlib.Path(flags.kernels).read_text(encoding="utf-8"))["kernels"]
    begun, seconds, failed = time.monotonic(), [], dict[str, str]()
    for number, kernel in enumerate(kernels):
        if time.monotonic() - begun > flags.seconds:
            break
        try:
            with torch.no_grad():
                seconds.append(timed(kernel))
        except (KeyError, RuntimeError, TypeError, ValueError, IndexError) as error:
            seconds.append(None)
            failed.setdefault(kernel["operation"], f"{type(error).__name__}: {str(error).splitlines()[0]}")
        if number % 200 == 0:
            torch.cuda.empty_cache()
            print(f"{number + 1} of {len(kernels)} kernels, {time.monotonic() - begun:.0f} s", flush=True)
    for operation, reason in failed.items():
        print(f"not timed: {operation}, {reason}")
    written = pathlib.Path(f"{flags.output}.part")
    written.write_text(json.dumps({
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda,
        "seconds": seconds}), encoding="utf-8")
    os.replace(written, flags.output)
    print(f"{sum(second is not None for second in seconds)} of {len(kernels)} kernels timed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
