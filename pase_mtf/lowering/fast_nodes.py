"""TensorFlow nodes without what TensorFlow's Python does before it has one: types, attributes, decorators, constants.

That is most of the time of a lowering. Here it is done once for all nodes that are alike: `make_node` makes one node by
what it was found to need the first time, and `Copier` copies all that a function of slices made on one device to
others.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeAlias

from pase_mtf.compat import tf
from pase_mtf.lowering.new_node import Maker, Pattern

__all__ = ["Copier", "flat", "make_node"]

_Source: TypeAlias = "tuple[str, Any]"
"""Where a tensor comes from: ("row", its place among the function's arguments), ("constant", what makes it anew), or
("node", (which of the copied nodes, which of its outputs))."""

_FEW = 64  # elements of a constant, which are read and compared
_PLAIN = (bool, int, float, str, bytes, type(None), tf.DType)
# They belong to the loop they are in, or stand for what another graph holds.
_BOUND = {"Enter", "RefEnter", "Exit", "RefExit", "Switch", "RefSwitch", "Merge", "RefMerge", "NextIteration",
          "RefNextIteration", "LoopCond", "Placeholder", "PlaceholderWithDefault"}


@dataclasses.dataclass(frozen=True)
class _Node:
    """A node to be copied: what it is, the name it asks for, and where its inputs come from."""

    pattern: Pattern
    name: str
    inputs: tuple[_Source, ...]


@dataclasses.dataclass(frozen=True)
class _Made:
    """What a function made on one device: nodes in their order, where its results come from, their static shapes."""

    nodes: tuple[_Node, ...]
    results: tuple[_Source, ...]
    shapes: tuple[tf.TensorShape, ...]
    is_tuple: bool


_known: dict[Hashable, Pattern] = {}


def make_node(kind: str, **arguments: Any) -> Any:
    """What tf.raw_ops makes under that name of these arguments: a tensor, a list of them, or an operation without any.

    Args:
      kind: the type of the node, such as "Slice".
      arguments: its inputs in the order of its definition, tensors or lists of them, and its attributes, values.
    """
    key = (kind, *((name, x.dtype) if isinstance(x, tf.Tensor) else (name, len(x), x[0].dtype) if isinstance(x, list)
                   else (name, x) for name, x in arguments.items()))
    known = _known.get(key)
    if known is None:
        results = getattr(tf.raw_ops, kind)(**arguments)
        first = results[0] if isinstance(results, list) else results
        _known[key] = Pattern.of(first if isinstance(first, tf.Operation) else first.op)
        return results
    inputs: list[tf.Tensor] = []
    for x in arguments.values():
        inputs += x if isinstance(x, list) else [x] if isinstance(x, tf.Tensor) else []
    with Maker(tf.get_default_graph()) as maker:
        operation = maker.make(known, kind, inputs)
    if not operation.outputs:
        return operation
    (made,) = known.op_def.output_arg
    return operation.outputs if made.number_attr else operation.outputs[0]


class Copier:
    """Calls a function once for all devices on which it makes the same nodes, and copies them.

    Functions of slices are called once per device by some mesh implementations of Mesh-TF and once for all by others:
    they do not depend on which it is. Nothing is copied that could tell the copies apart: what keeps a state (a
    generator of random numbers), what belongs to a loop or another graph, what waits for a node of the function, or
    has an attribute of its own (such as a gradient's); then the function is called.
    """

    def __init__(self, constant_of: Callable[[tf.Tensor], tuple[Any, ...] | None],
                 constant: Callable[[str, tuple[Any, ...]], tf.Tensor]) -> None:
        """Takes how constants are shared.

        Args:
          constant_of: what a shared constant is, or None for another tensor.
          constant: that on another device.
        """
        self._constant_of, self._constant = constant_of, constant

    def per_device(self, devices: Sequence[str], call: Callable[[str, Sequence[object]], Any],
                   rows: Sequence[Sequence[object]]) -> list[Any]:
        """The results of a function on every device.

        Args:
          devices: their names.
          call: a function of a device and its row to a tensor or a tuple of them, which it makes on that device.
          rows: per device what the function is given: tensors, tuples or lists of them, and other values.

        Returns:
          call(device, row) for every device.
        """
        graph = tf.get_default_graph()
        kinds = [_kind(row) for row in rows]
        counts = collections.Counter(kinds)
        made: dict[Hashable, _Made | None] = {}
        results = []
        for device, row, kind in zip(devices, rows, kinds, strict=True):
            known = made.get(kind)
            if known is not None:
                results.append(self._copy(graph, known, device, list(flat(row))))
                continue
            before = graph.version
            results.append(call(device, row))
            if kind is not None and kind not in made and counts[kind] > 1:
                made[kind] = self._made(graph, before, device, list(flat(row)), results[-1])
        return results

    def _made(self, graph: tf.Graph, before: int, device: str, row: Sequence[object], results: Any) -> _Made | None:
        """What was made since the graph had so many nodes; None where it cannot be copied."""
        found = results if isinstance(results, tuple) else (results,)
        if not all(isinstance(x, tf.Tensor) for x in found):
            return None
        sources: dict[int, _Source] = {id(x): ("row", place) for place, x in reversed(list(enumerate(row)))
                                       if isinstance(x, tf.Tensor)}
        operations, constants = self._operations(graph, before, [x for x in found if id(x) not in sources], sources)
        if operations is None or graph.version - before != len(operations) + constants:
            return None
        scope, waits = f"{graph.get_name_scope()}/", graph._current_control_dependencies()
        place = tf.DeviceSpec.from_string(device).to_string() if device else ""
        nodes = []
        for number, operation in enumerate(sorted(operations, key=lambda operation: operation._id)):
            pattern = Pattern.of(operation)
            if (operation.type in _BOUND or pattern.op_def.is_stateful
                    or any(name[0] == "_" for name in operation.node_def.attr)
                    or not waits.issuperset(operation.control_inputs)
                    or tf.DeviceSpec.from_string(operation.device).to_string() != place):
                return None
            nodes.append(_Node(pattern, operation.name.removeprefix(scope),
                               tuple(sources[id(x)] for x in operation.inputs)))
            sources.update((id(x), ("node", (number, index))) for index, x in enumerate(operation.outputs))
        return _Made(tuple(nodes), tuple(sources[id(x)] for x in found), tuple(x.shape for x in found),
                     isinstance(results, tuple))

    def _operations(self, graph: tf.Graph, before: int, tensors: Sequence[tf.Tensor], sources: dict[int, _Source],
                    ) -> tuple[list[tf.Operation] | None, int]:
        """What was made for tensors, and how many shared constants besides; `sources` learns of the constants.

        None where something was made earlier, so that it is unknown what stands in its place on another device.
        """
        operations: dict[int, tf.Operation] = {}
        constants = 0
        open_ = list(tensors)
        while open_:
            x = open_.pop()
            operation = x.op
            if id(x) in sources or operation._id in operations:
                continue
            constant = self._constant_of(x)
            if constant is not None:
                sources[id(x)] = ("constant", constant)
                constants += operation._id > before
                continue
            if x.graph is not graph or operation._id <= before:
                return None, 0
            operations[operation._id] = operation
            open_.extend(operation.inputs)
        return list(operations.values()), constants

    def _copy(self, graph: tf.Graph, made: _Made, device: str, row: Sequence[object]) -> Any:
        outputs: list[Sequence[tf.Tensor]] = []

        def tensor(source: _Source) -> Any:
            where, which = source
            if where == "row":
                return row[which]
            if where == "constant":
                return self._constant(device, which)
            return outputs[which[0]][which[1]]

        with graph.device(device), Maker(graph) as maker:
            for node in made.nodes:
                outputs.append(maker.make(node.pattern, node.name, [tensor(source) for source in node.inputs]).outputs)
            results = tuple(tensor(source) for source in made.results)
        for x, shape in zip(results, made.shapes, strict=True):
            if not x.shape.is_fully_defined():
                x.set_shape(shape)  # as a function may have done that knows more than the node
        return results if made.is_tuple else results[0]


def flat(xs: object) -> Iterator[object]:
    """What a function is given, out of tuples and lists."""
    if isinstance(xs, (tuple, list)):
        yield from itertools.chain.from_iterable(map(flat, xs))
    else:
        yield xs


def _kind(row: Sequence[object]) -> Hashable | None:
    """What has to be alike for a function to make the same nodes: types and static shapes of tensors, which of them are
    the same, the values of constants and of what is no tensor. None where it is unknown."""
    places: dict[int, int] = {}

    def of(x: object) -> Hashable:
        if isinstance(x, (tuple, list)):
            return (type(x), *map(of, x))
        if isinstance(x, tf.Tensor):
            shape, constant = x.shape, None
            if x.op.type == "Const":  # functions ask for a constant's value, if only for a shape
                is_small = shape.num_elements() <= _FEW and x.dtype != tf.string
                # `tf.get_static_value` would tell TensorFlow that nobody may feed it.
                constant = tf.make_ndarray(x.op.get_attr("value")).tobytes() if is_small else id(x)
            return (x.dtype, None if shape.rank is None else tuple(shape.as_list()),
                    places.setdefault(id(x), len(places)), constant)
        if isinstance(x, _PLAIN):
            return type(x), x
        raise TypeError

    try:
        return of(tuple(row))
    except TypeError:
        return None
