"""Kernels: what a step consists of, and is priced by where they were measured.

A kernel is a TensorFlow node as the lowering emits it on one device, known by its operation, its attributes and the
tensors it works on. It holds all that is needed to make that node again, and to time it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from pase_mtf.errors import FormatError, shortened

__all__ = ["SENT", "TINY", "Block", "Kernel", "Timing", "float_of_size", "send_kernel", "sum_kernel"]

SENT = "Identity"
"""TensorFlow's name of what only forwards what it reads: where that lies apart, it is sent and nothing else."""
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
      again: it reads a tensor that a kernel like it has just read on its device, as the time steps of a recurrent layer
        read the weights: that lies in the caches by then.
    """

    operation: str
    inputs: tuple[Block, ...]
    outputs: tuple[Block, ...]
    attributes: tuple[tuple[str, object], ...] = ()
    apart: bool = False
    again: bool = False

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
        """Whether it may forward what it reads without a copy, as a sum over a single element does."""
        return self.operation in _BY_REFERENCE or (
            self.operation in _REDUCTIONS and self.inputs[0].elements == self.outputs[0].elements) or (
            self.operation == "Transpose" and _keeps_order(self.inputs[0].shape, self.inputs[1].value))

    @property
    def width(self) -> int:
        """How wide its arithmetic is: the least of the rows, the columns and the terms of a product, the fewer channels
        of a convolution, else 1. What is narrow cannot keep a processor's vectors and caches at work."""
        if self.operation == "Einsum" and len(self.inputs) == 2:
            return _einsum_width(self)
        if self.operation.startswith(("Conv2D", "Conv3D")):
            return min(_filters_and_image(self)[0].shape[-2:])
        if "MatMul" in self.operation and len(self.inputs) == 2 and self.outputs[0].elements:
            *batch, rows, columns = self.outputs[0].shape
            return min(rows, columns, self.inputs[0].elements // max(math.prod(batch) * rows, 1))
        return 1

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
                f"{' from other devices' if self.apart else ''}"
                f"{' once more' if self.again else ''} -> {', '.join(map(str, self.outputs)) or 'nothing'}")
        return "; ".join([text, *(f"{name}={value}" for name, value in self.attributes)])

    def to_json(self) -> dict[str, object]:
        """As plain values, which `from_json` takes back."""
        return {"operation": self.operation, "inputs": [_plain_block(block) for block in self.inputs],
                "outputs": [_plain_block(block) for block in self.outputs],
                **({"attributes": dict(self.attributes)} if self.attributes else {}),
                **({"apart": True} if self.apart else {}), **({"again": True} if self.again else {})}

    @classmethod
    def from_json(cls, data: Any) -> Kernel:
        """The reverse of `to_json`.

        Raises:
          FormatError: no kernel.
        """
        try:
            attributes = {str(name): _frozen(value) for name, value in data.get("attributes", {}).items()}
            return cls(str(data["operation"]), tuple(map(_block, data["inputs"])), tuple(map(_block, data["outputs"])),
                       tuple(sorted(attributes.items())), *(bool(data.get(name, False)) for name in ("apart", "again")))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FormatError(f"no kernel: {shortened(data)}; leave it out") from error


def float_of_size(itemsize: int) -> str:
    """The floating point type of so many bytes per element, as most tensors have it."""
    return {2: "bfloat16", 4: "float32", 8: "float64", 1: "bool"}.get(itemsize, "float32")


def sum_kernel(members: int, elements: int, itemsize: int) -> Kernel:
    """What adds up the partial sums of so many devices, whatever their shape."""
    block = Block(float_of_size(itemsize), (elements,))
    return Kernel("AddN", (block,) * members, (block,), apart=True)


TINY = Kernel("AddV2", (Block("float32", (16,)),) * 2, (Block("float32", (16,)),))
"""A kernel that does next to nothing: its time is what TensorFlow takes for any."""


def send_kernel(elements: int, itemsize: int) -> Kernel:
    """What takes a tensor to another device as it is. Kept for every power of two: it takes about as long for all that
    have about as many bytes."""
    block = Block(float_of_size(itemsize), (1 << max(elements - 1, 0).bit_length(),))
    return Kernel(SENT, (block,), (block,), apart=True)


_BY_REFERENCE = frozenset({SENT, "Reshape", "ExpandDims", "Squeeze", "Split", "SplitV", "Slice", "StridedSlice",
                           "Unpack", "AssignVariableOp", "ReadVariableOp"})
_REDUCTIONS = frozenset({"Max", "Mean", "Min", "Prod", "Sum"})


def _keeps_order(shape: Sequence[int], axes: Sequence[int] | None) -> bool:
    """Whether all dims of more than one element stay in order: then a transpose is another shape, and no copy."""
    left = [axis for axis in axes or () if shape[axis] != 1]
    return axes is not None and left == sorted(left)


def _frozen(value: object) -> object:
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


def _plain_block(block: Block) -> list[object]:
    return [block.dtype, list(block.shape), *([list(block.value)] if block.value is not None else [])]


def _block(data: Sequence[Any]) -> Block:
    dtype, shape, *value = data
    return Block(str(dtype), tuple(map(int, shape)), tuple(map(int, value[0])) if value else None)


def _einsum_sizes(kernel: Kernel) -> tuple[Sequence[str], str, dict[str, int]]:
    """The letters of what an einsum reads and of what it makes, and their sizes."""
    terms, _, made = str(dict(kernel.attributes).get("equation", "")).partition("->")
    sizes: dict[str, int] = {}
    for letters, block in zip(terms.split(","), kernel.inputs, strict=False):
        sizes.update(zip(letters, block.shape, strict=False))
    return terms.split(","), made, sizes


def _einsum_flops(kernel: Kernel) -> float:
    _, made, sizes = _einsum_sizes(kernel)
    return (1.0 if set(sizes) <= set(made) else 2.0) * math.prod(sizes.values())


def _einsum_width(kernel: Kernel) -> int:
    (left, right), made, sizes = _einsum_sizes(kernel)
    one_side = (set(left) - set(right), set(right) - set(left), set(sizes) - set(made))
    return min(math.prod(sizes[letter] for letter in letters) for letters in one_side)


def _filters_and_image(kernel: Kernel) -> tuple[Block, Block]:
    """The filters of a convolution or one of its gradients, and its output, or the gradient of that."""
    if kernel.operation.endswith("Input") or kernel.operation.endswith("InputV2"):
        return kernel.inputs[1], kernel.inputs[2]
    if "Filter" in kernel.operation:
        return kernel.outputs[0], kernel.inputs[2]
    return kernel.inputs[1], kernel.outputs[0]


def _convolution_flops(kernel: Kernel) -> float:
    """Every element of the output takes part in as many multiply-adds as a filter has taps and channels that it
    reads."""
    filters, image = _filters_and_image(kernel)
    return 2.0 * image.elements * math.prod(filters.shape[:-1])


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """What a kernel took.

    Attributes:
      seconds: of one run; of devices that share cores, its share of the time of all of them.
      spread: half the distance between the quartiles, relative to the median.
      runs: how many runs that is the median of.
      probed: seconds of the probes of the session in which it was timed: they tell whether others slowed the machine
        then. Empty: nobody knows.
    """

    seconds: float
    spread: float = 0.0
    runs: int = 1
    probed: tuple[float, ...] = ()

    def scaled(self, factor: float) -> Timing:
        """The same where everything takes so many times as long."""
        return dataclasses.replace(self, seconds=factor * self.seconds,
                                   probed=tuple(factor * seconds for seconds in self.probed))
