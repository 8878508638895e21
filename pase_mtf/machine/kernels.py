"""Kernels, and the times they took on a machine: what a step is priced by where it was measured.

A kernel is a TensorFlow node as the lowering emits it on one device, known by its operation, its attributes and the
tensors it works on. It holds all that is needed to make that node again, and to time it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

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
        vars(self).pop("_rates", None)

    def scaled(self, factor: float) -> KernelTimes:
        """The same kernels, all times multiplied."""
        return KernelTimes(self.on, {kernel: dataclasses.replace(timing, seconds=factor * timing.seconds)
                                     for kernel, timing in self._timings.items()}, self.damaged)

    def bound(self, kernel: Kernel) -> float:
        """Seconds that the kernel takes at least, measured or not: its arithmetic and its traffic at the best rates
        that any kernel of its operation has reached here (of all operations, where none of its own was measured), and
        no less than the shortest kernel took. No measured kernel is below its bound.

        Without any measurement: 0.
        """
        rates = self._rates
        if rates.least is None:
            return 0.0
        flops, nbytes = rates.best.get(kernel.operation, rates.pooled)
        return max(kernel.flops / flops, kernel.nbytes / nbytes, rates.least)

    def estimate(self, kernel: Kernel) -> float:
        """Seconds of a kernel: measured, else its bound at the efficiency of its operation: as many times the bound as
        the kernels of that operation take in the median (of all operations, where none of its own was measured)."""
        found = self._timings.get(kernel)
        if found is not None:
            return found.seconds
        factors = self._rates.factors
        return self.bound(kernel) * factors.get(kernel.operation, factors.get("", 1.0))

    @functools.cached_property
    def _rates(self) -> _Rates:
        return _Rates.of(self._timings)


@dataclasses.dataclass(frozen=True)
class _Rates:
    """The best that was reached: per operation and over all (FLOP/s, bytes/s); the shortest kernel; how far the others
    are from it."""

    best: dict[str, tuple[float, float]]
    pooled: tuple[float, float]
    least: float | None
    factors: dict[str, float]

    @classmethod
    def of(cls, timings: Mapping[Kernel, Timing]) -> _Rates:
        best: dict[str, tuple[float, float]] = {}
        for kernel, timing in timings.items():
            flops, nbytes = best.get(kernel.operation, (1.0, 1.0))
            best[kernel.operation] = (max(flops, kernel.flops / timing.seconds),
                                      max(nbytes, kernel.nbytes / timing.seconds))
        pooled = (max((rate for rate, _ in best.values()), default=1.0),
                  max((rate for _, rate in best.values()), default=1.0))
        least = min((timing.seconds for timing in timings.values()), default=None)
        times: dict[str, list[float]] = {}
        for kernel, timing in timings.items():
            flops, nbytes = best[kernel.operation]
            factor = timing.seconds / max(kernel.flops / flops, kernel.nbytes / nbytes, least or 0.0)
            times.setdefault(kernel.operation, []).append(factor)
            times.setdefault("", []).append(factor)
        return cls(best, pooled, least, {name: sorted(found)[len(found) // 2] for name, found in times.items()})
