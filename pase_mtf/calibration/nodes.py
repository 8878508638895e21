"""Nodes of kernels that are timed, and of what they read: TensorFlow's own, as the lowering emits them."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence

import numpy as np

from pase_mtf.compat import tf
from pase_mtf.lowering.nodes import node_of
from pase_mtf.machine.kernels import Block, Kernel
from pase_mtf.runtime import Devices

__all__ = ["BELONGS_TO", "Nodes"]

BELONGS_TO = {"MaxPoolGrad": "MaxPool"}
"""Operations whose second input is what another made of the first, which oneDNN does otherwise where it sees that: by
what the other has left for it, in a sixth of the time."""


class Nodes:
    """The nodes of some kernels, and of what they read.

    Attributes:
      definition: all of them.
      fills: those that give the variables their values.
    """

    def __init__(self, devices: Devices) -> None:
        """None yet, for devices of one process or of several."""
        self.definition = tf.GraphDef(versions={"producer": tf.version.GRAPH_DEF_VERSION})
        self.fills: list[str] = []
        self._devices, self._client = devices.names, devices.client
        self._group = devices.count // max(1, len(devices.tasks))  # what is apart stays within a process
        self._handles: dict[tuple[str, Block, int], str] = {}
        self._reads: dict[tuple[str, Block, int], str] = {}
        self._constants: dict[tuple[str, Block], str] = {}
        self._first: dict[tuple[str, Kernel], str] = {}

    def _add(self, operation: str, inputs: Sequence[str], device: str, **attributes: tf.AttrValue) -> str:
        name = f"n{len(self.definition.node)}"
        self.definition.node.add(name=name, op=operation, input=inputs, device=device, attr=attributes)
        return name

    def group(self, names: Sequence[str], device: str = "") -> str:
        """A node that waits for others."""
        return self._add("NoOp", [f"^{name}" for name in names], device or self._client)

    def sent(self, name: str, device: str) -> str:
        """What a node makes, on another device."""
        return self._add("Identity", [name], device, T=tf.AttrValue(type=tf.float32.as_datatype_enum))

    def _away(self, number: int, places: int) -> str:
        """The device so many places after that of a number, within its process."""
        first = number - number % self._group
        return self._devices[first + (number - first + places) % self._group]

    def idle(self) -> str:
        """What every run does besides: reading a variable on every device."""
        block = Block("float32", (1,))
        return self.group([self.group([self.read(device, block, 0)], device) for device in self._devices])

    def kernel(self, kernel: Kernel, repeats: int, beside: bool = False, fresh: bool = False) -> str:
        """A kernel so many times on every device; a node that waits for all of them.

        Args:
          kernel: which.
          repeats: how often.
          beside: all of them are ready at once, and what waits for all waits for each; else those of a device follow
            each other, and it waits for one of every device.
          fresh: each reads tensors that were made for it, where they lie; else all read the same.

        Raises:
          ValueError: TensorFlow has no such node.
        """
        ends, every = collections.defaultdict[str, list[str]](list), list[str]()
        for number, device in enumerate(self._devices):
            inputs, before = self._inputs(kernel, number), list[str]()
            rounds = self._made(kernel, number, inputs, repeats) if fresh else [inputs] * repeats
            for read in rounds:
                name = f"n{len(self.definition.node)}"
                self.definition.node.append(node_of(kernel, name, [*read, *(f"^{node}" for node in before)], device))
                for reader in self._readers(kernel, number):
                    dtype = tf.AttrValue(type=tf.as_dtype(kernel.outputs[0].dtype).as_datatype_enum)
                    ends[reader].append(self._add("Identity", [name], reader, T=dtype))
                if beside:
                    every.append(name)
                else:
                    before = [name]
            ends[device] += before
        return self.group(every) if beside else self._all_of(ends)

    def making(self, kernel: Kernel, repeats: int) -> str:
        """What `kernel` does for fresh tensors, or for one that belongs to another, without the kernel."""
        if kernel.operation in BELONGS_TO:
            return self.group([self.group([self._inputs(kernel, number)[1]], device)
                               for number, device in enumerate(self._devices)])
        made = collections.defaultdict[tuple[int, str], list[tuple[str, str]]](list)  # of a round, on a device
        for number in range(len(self._devices)):
            for turn, names in enumerate(self._made(kernel, number, self._inputs(kernel, number), repeats)):
                for place, (name, block) in enumerate(zip(names, kernel.inputs, strict=True)):
                    if _is_made(block):
                        made[turn, self._lies_on(kernel, number, place)].append((name, block.dtype))
        rounds = {key: self.group([name for name, _ in tensors], key[1]) for key, tensors in made.items()}
        ends = collections.defaultdict[str, list[str]](list)
        for (turn, device), tensors in made.items():
            # Held until all of the next round are made, as by the kernels: what is freed at once is made in place, and
            # of many large ones a few would go round in the caches.
            after = rounds[min(turn + 1, repeats - 1), device]
            ends[device] += [self._add("Identity", [name, f"^{after}"], device,
                                       T=tf.AttrValue(type=tf.as_dtype(dtype).as_datatype_enum))
                             for name, dtype in tensors]
        return self._all_of(ends)

    def _all_of(self, ends: Mapping[str, Sequence[str]]) -> str:
        """A node that waits for nodes of many devices: each device sends one message, whatever waits there."""
        return self.group([self.group(names, device) for device, names in ends.items()])

    def _made(self, kernel: Kernel, number: int, inputs: Sequence[str], repeats: int) -> list[list[str]]:
        """Inputs of a kernel on the device of a number, made so many times; each time after the last."""
        rounds, made = list[list[str]](), list(inputs)
        for turn in range(repeats):
            made = [self._add("Snapshot", [name, *([f"^{before}"] if turn else [])],
                              self._lies_on(kernel, number, place),
                              T=tf.AttrValue(type=tf.as_dtype(block.dtype).as_datatype_enum))
                    if _is_made(block) else name
                    for place, (name, before, block) in enumerate(zip(inputs, made, kernel.inputs, strict=True))]
            rounds.append(made)
        return rounds

    def _lies_on(self, kernel: Kernel, number: int, place: int) -> str:
        """The device of an input of a kernel on the device of a number; of several that lie apart, the first is its."""
        return self._away(number, (place or len(kernel.inputs) == 1) * kernel.apart)

    def _readers(self, kernel: Kernel, number: int) -> list[str]:
        """The other devices that read what a kernel makes: all whose parts a sum is of."""
        if kernel.operation != "AddN" or not kernel.apart:
            return []
        return [self._away(number, member) for member in range(1, len(kernel.inputs))]

    def _inputs(self, kernel: Kernel, number: int) -> list[str]:
        """Tensors for a kernel on the device of a number."""
        names = list[str]()
        for place, block in enumerate(kernel.inputs):
            device = self._lies_on(kernel, number, place)
            if place == 1 and kernel.operation in BELONGS_TO:
                names.append(self._made_of_first(kernel, names[0], device))
            elif block.value is not None:
                names.append(self._constant(self._devices[number], block))
            elif block.dtype == "resource":
                dtype = next((other.dtype for other in kernel.inputs if other.dtype != "resource"), "float32")
                # Nobody else reads what is assigned to: it would be copied first.
                names.append(self._handle(device, Block(dtype, block.shape), -1))
            elif not tf.as_dtype(block.dtype).is_floating and block.elements <= 1 << 12:
                names.append(self._constant(device, block._replace(value=(0,) * block.elements)))
            else:
                names.append(self.read(device, block, place))
        return names

    def _made_of_first(self, kernel: Kernel, first: str, device: str) -> str:
        """What the operation that a kernel belongs to makes of its first input, once on a device."""
        made = Kernel(BELONGS_TO[kernel.operation], kernel.inputs[:1], kernel.inputs[1:2], kernel.attributes)
        if (device, made) not in self._first:
            self._first[device, made] = f"n{len(self.definition.node)}"
            self.definition.node.append(node_of(made, self._first[device, made], [first], device))
        return self._first[device, made]

    def _constant(self, device: str, block: Block) -> str:
        if (device, block) not in self._constants:
            dtype = tf.as_dtype(block.dtype)
            value = tf.make_tensor_proto(np.reshape(np.array(block.value, dtype.as_numpy_dtype), block.shape), dtype)
            self._constants[device, block] = self._add(
                "Const", (), device, dtype=tf.AttrValue(type=dtype.as_datatype_enum), value=tf.AttrValue(tensor=value))
        return self._constants[device, block]

    def read(self, device: str, block: Block, place: int) -> str:
        """What a variable holds, which several kernels may read."""
        key = device, block, place
        if key not in self._reads:
            dtype = tf.AttrValue(type=tf.as_dtype(block.dtype).as_datatype_enum)
            self._reads[key] = self._add("ReadVariableOp", [self._handle(device, block, place)], device, dtype=dtype)
        return self._reads[key]

    def _handle(self, device: str, block: Block, place: int) -> str:
        """The handle of a variable on a device, filled with one number, 0 of integers."""
        key = device, block, place
        if key not in self._handles:
            dtype = tf.as_dtype(block.dtype)
            kind, shape = tf.AttrValue(type=dtype.as_datatype_enum), tf.TensorShape(block.shape).as_proto()
            self._handles[key] = self._add("VarHandleOp", (), device, dtype=kind, shape=tf.AttrValue(shape=shape),
                                           shared_name=tf.AttrValue(s=f"tensor{len(self._handles)}".encode()))
            number = np.full((), 0.75 if dtype.is_floating else 0).astype(dtype.as_numpy_dtype)
            scalar = self._add("Const", (), device, dtype=kind,
                               value=tf.AttrValue(tensor=tf.make_tensor_proto(number, dtype)))
            sizes = self._constant(device, Block("int32", (len(block.shape),), block.shape))
            value = self._add("Fill", [sizes, scalar], device, T=kind)
            self.fills.append(self._add("AssignVariableOp", [self._handles[key], value], device, dtype=kind))
        return self._handles[key]


def _is_made(block: Block) -> bool:
    """Whether an input of a kernel is computed, and neither a constant nor a variable."""
    return block.value is None and block.dtype != "resource"
