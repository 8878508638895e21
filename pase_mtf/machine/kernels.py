"""Kernels, and the times they took on a machine: what a step is priced by where it was measured.

A kernel is a TensorFlow node as the lowering emits it on one device, known by its operation, its attributes and the
tensors it works on. It holds all that is needed to make that node again, and to time it.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pase_mtf.errors import FormatError, shortened

__all__ = ["Block", "Kernel", "KernelTimes", "Timing", "float_of_size", "sum_kernel"]

_BITS = {"bool": 8, "string": 64, "complex64": 64, "complex128": 128, "half": 16, "resource": 64}
"""Of the types whose names do not end in their bits. A variable is read and written: twice its four bytes."""


class Block(NamedTuple):
    """A tensor of a kernel, as one device holds it.

    Attributes:
      dtype: TensorFlow's name of its type; "resource": a variable of this shape.
      shape: its sizes.
      value: what stands in it where the kernel depends on that (axes, shapes): the numbers, flat. Else None.
    """

    dtype: str
    shape: tuple[int, ...]
    value: tuple[int, ...] | None = None

    @property
    def elements(self) -> int:
        """How many."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """What reading or writing it moves; nothing where it is a constant."""
        if self.value is not None:
            return 0
        digits = "".join(letter for letter in self.dtype if letter.isdigit())
        return self.elements * (_BITS.get(self.dtype) or int(digits or 32)) // 8

    def __str__(self) -> str:
        text = f"{self.dtype}[{','.join(map(str, self.shape))}]"
        return text if self.value is None else f"{text}={','.join(map(str, self.value))}"


class Kernel(NamedTuple):
    """A TensorFlow node on one device.

    Attributes:
      operation: TensorFlow's name of it.
      inputs, outputs: the tensors it reads and writes.
      attributes: (name, value) in the order of their names, without those that the tensors tell (types, counts).
      apart: its inputs lie on devices of their own, as what is summed or put together after a split does.
    """

    operation: str
    inputs: tuple[Block, ...]
    outputs: tuple[Block, ...]
    attributes: tuple[tuple[str, Any], ...] = ()
    apart: bool = False

    @property
    def nbytes(self) -> int:
        """What it reads and writes."""
        return sum(block.nbytes for block in (*self.inputs, *self.outputs))

    @property
    def family(self) -> str:
        """The kind of operation that becomes such a kernel: "matmul", "convolution", "filter gradient", "pointwise"."""
        if self.operation.startswith(("Conv2D", "Conv3D", "DepthwiseConv")):
            return "filter gradient" if "Filter" in self.operation else "convolution"
        return "matmul" if self.operation == "Einsum" or "MatMul" in self.operation else "pointwise"

    @property
    def by_reference(self) -> bool:
        """Whether it may hand on what it reads without a copy."""
        return self.operation in _BY_REFERENCE

    @property
    def flops(self) -> float:
        """Its arithmetic: 2 per multiply-add of a product or convolution, else 1 per element of its largest tensor."""
        if self.operation == "Einsum":
            return _einsum_flops(self)
        if self.operation.startswith(("Conv2D", "Conv3D")):
            return _convolution_flops(self)
        if "MatMul" in self.operation and len(self.inputs) == 2 and self.outputs[0].elements:
            # batch m k, batch k n -> batch m n: the root of the product of all three is batch m n k, up to the batch.
            batch = math.prod(self.outputs[0].shape[:-2])
            sizes = math.prod(block.elements // max(batch, 1) for block in (*self.inputs, *self.outputs))
            return 2.0 * batch * math.sqrt(sizes)
        return float(max((block.elements for block in (*self.inputs, *self.outputs)), default=0))

    def __str__(self) -> str:
        text = (f"{self.operation}({', '.join(map(str, self.inputs))})"
                f"{' from other devices' if self.apart else ''} -> {', '.join(map(str, self.outputs)) or 'nothing'}")
        return "; ".join([text, *(f"{name}={value}" for name, value in self.attributes)])

    def to_json(self) -> dict[str, Any]:
        """As plain values, which `from_json` takes back."""
        return {"operation": self.operation, "inputs": [_plain_block(block) for block in self.inputs],
                "outputs": [_plain_block(block) for block in self.outputs],
                **({"attributes": dict(self.attributes)} if self.attributes else {}),
                **({"apart": True} if self.apart else {})}

    @classmethod
    def from_json(cls, data: Any) -> Kernel:
        """The reverse of `to_json`.

        Raises:
          FormatError: no kernel.
        """
        try:
            attributes = {str(name): _frozen(value) for name, value in data.get("attributes", {}).items()}
            return cls(str(data["operation"]), tuple(map(_block, data["inputs"])), tuple(map(_block, data["outputs"])),
                       tuple(sorted(attributes.items())), bool(data.get("apart", False)))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FormatError(f"no kernel: {shortened(data)}; leave it out") from error


def float_of_size(itemsize: int) -> str:
    """The floating point type of so many bytes per element, as most tensors have it."""
    return {2: "bfloat16", 4: "float32", 8: "float64", 1: "bool"}.get(itemsize, "float32")


def sum_kernel(members: int, elements: int, itemsize: int) -> Kernel:
    """What adds up the partial sums of so many devices, whatever their shape."""
    block = Block(float_of_size(itemsize), (elements,))
    return Kernel("AddN", (block,) * members, (block,), apart=True)


_BY_REFERENCE = frozenset({"Reshape", "ExpandDims", "Squeeze", "Split", "SplitV", "Slice", "StridedSlice", "Unpack",
                           "AssignVariableOp", "ReadVariableOp"})
_ALONG_AXES = frozenset({"All", "Any", "ArgMax", "ArgMin", "ConcatV2", "Cumsum", "ExpandDims", "GatherV2", "Max",
                         "Mean", "Min", "Prod", "Split", "SplitV", "Sum", "Transpose"})
"""What their small constants tell are axes; those of others are sizes, and where something begins."""


def _without_sizes(kernel: Kernel) -> Hashable:
    """Equal for kernels that do the same to tensors of other sizes."""
    axes = kernel.operation in _ALONG_AXES
    return (kernel.operation, kernel.attributes, kernel.apart, tuple(
        (block.dtype, len(block.shape), block.value if axes else block.value is None)
        for block in (*kernel.inputs, *kernel.outputs)))


def _sizes_of(kernel: Kernel) -> tuple[int, ...]:
    return tuple(size for block in (*kernel.inputs, *kernel.outputs) for size in block.shape)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


def _plain_block(block: Block) -> list[Any]:
    return [block.dtype, list(block.shape), *([list(block.value)] if block.value is not None else [])]


def _block(data: Sequence[Any]) -> Block:
    dtype, shape, *value = data
    return Block(str(dtype), tuple(map(int, shape)), tuple(map(int, value[0])) if value else None)


def _einsum_flops(kernel: Kernel) -> float:
    equation = str(dict(kernel.attributes).get("equation", ""))
    terms, _, made = equation.partition("->")
    sizes: dict[str, int] = {}
    for letters, block in zip(terms.split(","), kernel.inputs, strict=False):
        sizes.update(zip(letters, block.shape, strict=False))
    return (1.0 if set(sizes) <= set(made) else 2.0) * math.prod(sizes.values())


def _convolution_flops(kernel: Kernel) -> float:
    """Of a convolution or one of its gradients: every element of its output, or of the gradient of that, takes part in
    as many multiply-adds as a filter has taps and channels that it reads."""
    if kernel.operation.endswith("Input") or kernel.operation.endswith("InputV2"):
        filters, image = kernel.inputs[1], kernel.inputs[2]
    elif "Filter" in kernel.operation:
        filters, image = kernel.outputs[0], kernel.inputs[2]
    else:
        filters, image = kernel.inputs[1], kernel.outputs[0]
    return 2.0 * image.elements * math.prod(filters.shape[:-1])


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """What a kernel took.

    Attributes:
      seconds: of one run; of devices that share cores, its share of the time of all of them.
      spread: half the distance between the quartiles, relative to the median.
      runs: how many runs that is the median of.
    """

    seconds: float
    spread: float = 0.0
    runs: int = 1


class KernelTimes:
    """Kernels and what they took on one machine.

    Attributes:
      on: what they were measured on (processor, devices, threads, TensorFlow, ...).
      damaged: lines of a file that could not be read.
    """

    def __init__(self, on: Mapping[str, Any] | None = None, timings: Mapping[Kernel, Timing] | None = None,
                 damaged: int = 0) -> None:
        self.on, self.damaged = dict(on or {}), damaged
        self._timings = dict(timings or {})

    def __len__(self) -> int:
        return len(self._timings)

    def __contains__(self, kernel: object) -> bool:
        return kernel in self._timings

    def items(self) -> Iterable[tuple[Kernel, Timing]]:
        """All kernels with their times."""
        return self._timings.items()

    def get(self, kernel: Kernel) -> Timing | None:
        """What a kernel took; None where it was not measured."""
        return self._timings.get(kernel)

    def update(self, timings: Mapping[Kernel, Timing]) -> None:
        """Takes in what was measured; what was known before is replaced."""
        self._timings.update(timings)
        for name in ("_rates", "_sizes"):
            vars(self).pop(name, None)

    def scaled(self, factor: float) -> KernelTimes:
        """The same kernels, all times multiplied."""
        return KernelTimes(self.on, {kernel: dataclasses.replace(timing, seconds=factor * timing.seconds)
                                     for kernel, timing in self._timings.items()}, self.damaged)

    def bound(self, kernel: Kernel) -> float:
        """Seconds that the kernel takes at least, measured or not: its arithmetic at the best rate that any kernel of
        its family has reached here, its traffic at the best rate that any kernel has that copies; what the same kernel
        takes on smaller tensors; and no less than the shortest kernel took. No measured kernel is below its bound.

        Without any measurement: 0.
        """
        smaller = self._sizes.get(_without_sizes(kernel))
        return max(self._rates.seconds(kernel), smaller.bound(kernel) if smaller else 0.0)

    def estimate(self, kernel: Kernel) -> float:
        """Seconds of a kernel: measured, else by the efficiency of its operation: as many times what its arithmetic and
        traffic take at the best rates as the kernels of that operation take in the median (of all operations, where
        none of its own was measured); and no less than the same kernel takes on smaller tensors."""
        found = self._timings.get(kernel)
        if found is not None:
            return found.seconds
        factors = self._rates.factors
        return max(self.bound(kernel),
                   self._rates.seconds(kernel) * factors.get(kernel.operation, factors.get("", 1.0)))

    @functools.cached_property
    def _rates(self) -> _Rates:
        return _Rates.of(self._timings)

    @functools.cached_property
    def _sizes(self) -> dict[Hashable, _Sizes]:
        alike: dict[Hashable, list[tuple[tuple[int, ...], float]]] = {}
        for kernel, timing in self._timings.items():
            alike.setdefault(_without_sizes(kernel), []).append((_sizes_of(kernel), timing.seconds))
        return {key: _Sizes.of(found) for key, found in alike.items()}


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Measured kernels that differ in nothing but the sizes of their tensors.

    Attributes:
      sizes: N x dims.
      floors: the least that a kernel took that is no smaller in any dim, N: clocks err, and so one of larger tensors
        may seem to be shorter.
    """

    sizes: np.ndarray
    floors: np.ndarray

    @classmethod
    def of(cls, measured: Sequence[tuple[tuple[int, ...], float]]) -> _Sizes:
        sizes = np.array([entry for entry, _ in measured], dtype=np.int64).reshape(len(measured), -1)
        seconds = np.array([entry for _, entry in measured])
        return cls(sizes, np.array([seconds[(sizes >= own).all(axis=1)].min() for own in sizes]))

    def bound(self, kernel: Kernel) -> float:
        """What the longest of those takes that are no larger in any dim; 0 where there is none."""
        smaller = (self.sizes <= np.array(_sizes_of(kernel), dtype=np.int64)).all(axis=1)
        return float(self.floors[smaller].max(initial=0.0))


@dataclasses.dataclass(frozen=True)
class _Rates:
    """The best that was reached: FLOP/s per family and over all (""), bytes/s of kernels that copy, and of each
    operation that may not; the shortest kernel; how far the others are from it, per operation and over all ("")."""

    flops: Mapping[str, float]
    nbytes: Mapping[str, float]
    least: float
    factors: Mapping[str, float]

    @classmethod
    def of(cls, timings: Mapping[Kernel, Timing]) -> _Rates:
        flops, nbytes = collections.defaultdict[str, float](float), collections.defaultdict[str, float](float)
        for kernel, timing in timings.items():
            for name in (kernel.family, ""):
                flops[name] = max(flops[name], kernel.flops / timing.seconds)
            name = kernel.operation if kernel.by_reference else ""
            nbytes[name] = max(nbytes[name], kernel.nbytes / timing.seconds)
        best = cls(flops, nbytes, min((timing.seconds for timing in timings.values()), default=0.0), {})
        times: dict[str, list[float]] = {}
        for kernel, timing in timings.items():
            for name in (kernel.operation, ""):
                times.setdefault(name, []).append(timing.seconds / best.seconds(kernel))
        return dataclasses.replace(best, factors={
            name: sorted(found)[len(found) // 2] for name, found in times.items()})

    def seconds(self, kernel: Kernel) -> float:
        """What a kernel takes at the best rates; 0 where nothing was measured."""
        flops = self.flops.get(kernel.family) or self.flops.get("") or math.inf
        nbytes = self.nbytes.get(kernel.operation if kernel.by_reference else "") or math.inf
        return max(kernel.flops / flops, kernel.nbytes / nbytes, self.least)
