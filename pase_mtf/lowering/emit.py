"""TensorFlow nodes, emitted one at a time and with shared constants.

The price of a lowering is the number of TensorFlow nodes it makes (about 0.2 ms of Python each). `tf.slice`,
`tf.concat` or `tf.reduce_sum` make a node for themselves and one for every shape, axis or permutation; here those
constants are made once per graph, device and value.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from pase_mtf.compat import random_seed, tf
from pase_mtf.errors import UsageError, shortened
from pase_mtf.lowering.exchange import Copies, Exchange
from pase_mtf.lowering.fast_nodes import Copier, make_node

__all__ = ["Emitter", "Scope", "device_specs", "drawing_apart", "on", "scopes"]

Scope: TypeAlias = "tuple[tf.Graph, object | None]"
"""Where a node is made: the graph, and the control-flow context (of a loop) in it."""

_SHORT_ROW = 32  # elements; a longer one is copied as fast as any
_MANY_ROWS = 1 << 12  # in all: the pass in one go takes a dozen nodes more


def scopes() -> Iterator[Scope]:
    """Where nodes are being made now, then what encloses it: (graph, control-flow context) pairs, inside out.

    A tensor made in one of them may be used here; a tensor made elsewhere (in the body of a finished loop) may not.
    """
    graph = tf.get_default_graph()
    while graph is not None:
        context = graph._get_control_flow_context()
        while context is not None:
            yield graph, context
            context = context.outer_context
        yield graph, None
        graph = getattr(graph, "outer_graph", None)


def device_specs(devices: Iterable[str]) -> list[tf.DeviceSpec]:
    """What the names of devices say; an empty name says nothing.

    Raises:
      UsageError: one is no name of a device.
    """
    specs = []
    for device in devices:
        try:
            specs.append(tf.DeviceSpec.from_string(device))
        except (TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"device {shortened(device)}: no name of a device; write it as in "
                             "/device:CPU:0") from error
    return specs


def on(device: str) -> contextlib.AbstractContextManager[None]:
    """What is made in this context is on a device.

    As by `tf.device`, which first looks whether TensorFlow is eager outside of the graph. That takes longer than all
    the rest of it, and nearly every node has a context of its own.
    """
    return tf.get_default_graph().device(device)


def drawing_apart(fn: Callable) -> Callable:
    """A function (device, ...) that draws random numbers of its own on every device. TensorFlow tells them apart by
    counting them in a graph: processes with a graph each count alike, and all would draw the same. What has a seed of
    its own is not counted: it draws what it draws in one process, the same on all devices."""
    def call(device: str, *row: object) -> Any:
        graph, counts = tf.get_default_graph(), random_seed._graph_to_seed_dict
        before = counts.get(graph, 0)
        counts[graph] = start = zlib.crc32(f"{before}/{device}".encode()) & 0x7fffffff
        try:
            return fn(device, *row)
        finally:
            counts[graph] += before - start
    return call


class Emitter:
    """Emits nodes for one list of devices.

    Attributes:
      devices: their names.
      shared: whether all devices are processors of one host, which share its memory: what one of them holds, all can
        read, and nothing is gained by computing it twice.
      exchange: what crosses devices.
      nodes: how many devices each process has, where there are several processes; else empty. Which of them share a
        host names do not tell.
      first_devices: the number of the first device of every process, where every process has a graph of its own; None
        where one process makes all nodes.
      first_own: the first device of this process.
      idle: whether what is being lowered serves no update.
    """

    exchange: Exchange
    first_devices: tuple[int, ...] | None = None
    idle = False

    def __init__(self, devices: Sequence[str], shared: bool | None = None):
        """Takes the names of the devices; `shared` is found out from them unless it is given."""
        self.devices = tuple(devices)
        specs = [] if shared else device_specs(filter(None, self.devices))
        processes = collections.Counter((spec.job, spec.replica, spec.task) for spec in specs)
        if shared is None:
            shared = all((spec.device_type or "CPU").upper() == "CPU" for spec in specs) and len(processes) <= 1
        self.shared = shared
        self.nodes = (max(processes.values()),) if len(processes) > 1 else ()
        self.exchange = Copies()
        self.first_own = self.devices[0] if self.devices else ""
        self._constants: dict[Hashable, tf.Tensor] = {}
        self._constant_of: dict[int, tuple[Any, ...]] = {}
        self._copier = Copier(lambda x: self._constant_of.get(id(x)), lambda device, key: self.constant(device, *key))
        self._turn = itertools.count()
        self._extended: dict[str, Emitter] = {}

    def with_device(self, device: str) -> tuple[Emitter, int]:
        """An emitter that knows this device as well, and the number it has there."""
        if device in self.devices:
            return self, self.devices.index(device)
        if device not in self._extended:
            self._extended[device] = Emitter((*self.devices, device), self.shared)
            self._extended[device].nodes = self.nodes
        return self._extended[device], len(self.devices)

    def turn(self, members: Sequence[int]) -> int:
        """One of the members, each in its turn: spreads the work that one of several has to do."""
        return members[next(self._turn) % len(members)]

    # What a graph per rank does otherwise (`ranks.RankEmitter`).

    def owns(self, device: str) -> bool:
        """Whether nodes on this device are made here: all are, in one process."""
        return True

    def per_device(self, devices: Sequence[str], fn: Callable, columns: Sequence[Sequence[object]]) -> list[Any]:
        """The results of fn(device, ...), a tensor or a tuple of them, on every device with its row of the columns."""
        results = []
        for position, device in enumerate(devices):
            with on(device):
                results.append(fn(device, *(column[position] for column in columns)))
        return results

    def of_slices(self, devices: Sequence[str], fn: Callable, columns: Sequence[Sequence[object]]) -> list[Any]:
        """As `per_device`, for a function that makes the same nodes of what is alike on several devices: it is called
        for one of them, and copied for the others."""
        def call(device: str, row: Sequence[object]) -> Any:
            with on(device):
                return fn(device, *row)

        return self._copier.per_device(devices, call, [
            tuple(column[position] for column in columns) for position in range(len(devices))])

    def run_on(self, device: str, fn: Callable, *xs: object) -> Any:
        """The result of fn(...) on one device."""
        return self.per_device([device], lambda _, *row: fn(*row), [[x] for x in xs])[0]

    def held_on(self, device: str, make: Callable[[], tf.Tensor | tf.Variable], shape: Sequence[int],
                dtype: tf.DType) -> tf.Tensor | tf.Variable:
        """What `make` makes on a device, such as the slice of a variable: it has this shape and type."""
        return make()

    def after(self, control: Iterable[object]) -> contextlib.AbstractContextManager:
        """What is made in this context waits for tensors and operations."""
        return tf.control_dependencies(list(control))

    def behind_turns(self, after: Sequence[int]) -> contextlib.AbstractContextManager:
        """What is made in this context is of the next turn, and waits for what is of earlier ones, given by their
        numbers: the graph itself says so (`turns.TurnTaking`)."""
        del after
        return contextlib.nullcontext()

    def group(self, operations: Sequence[tf.Operation]) -> tf.Operation:
        """One operation that runs all of them, and what other processes need to run theirs."""
        return tf.group(operations)

    def group_for(self, x: tf.Tensor, operations: Sequence[tf.Operation]) -> tf.Operation:
        """One operation that runs all of them, and what other processes need to compute x."""
        return tf.group(operations)

    def fetchable(self, copies: Sequence[tf.Tensor]) -> tf.Tensor:
        """Of the copies of a tensor on the first devices of all processes, this process's, to be fetched by all."""
        return copies[0]

    def apart(self) -> contextlib.AbstractContextManager[None]:
        """What is made in this context is fetched without what is made outside of it."""
        return contextlib.nullcontext()

    def known(self, device: str, x: tf.Tensor) -> tf.Tensor:
        """A tensor that is on a device and was made there, such as what a variable was read as."""
        return x

    def use(self, xs: Iterable[tf.Tensor]) -> Sequence[tf.Operation]:
        """Tells that an assignment, which makes no tensor, takes these as they are; what it has to wait for besides."""
        return ()

    def while_loop(self, condition: Callable, body: Callable, starts: Sequence[Sequence[tf.Tensor]],
                   devices: Sequence[Sequence[str]], options: Mapping[str, object]) -> Sequence[Sequence[tf.Tensor]]:
        """A loop over lists of slices.

        Args:
          condition: a function of the lists; whether to go on, a scalar per device, and the devices.
          body: a function of the lists to the lists after an iteration.
          starts: the lists at first.
          devices: per list the device of every slice.
          options: of tf.while_loop.
        """
        # By default a loop over one slice of one variable would return that alone.
        return tf.while_loop(lambda *lists: condition(*lists)[0][0], body, starts, back_prop=False,
                             return_same_structure=True, **options)

    def constant(self, device: str, value: float | tuple[float, ...], dtype: tf.DType = tf.int32,
                 shape: Sequence[int] | None = None) -> tf.Tensor:
        """A constant on a device, made once: a scalar (repeated to `shape`) or a tuple of numbers."""
        scope = next(scopes())
        sign = isinstance(value, (float, np.floating)) and math.copysign(1.0, value)  # -0.0 equals 0.0
        key = (scope, device, dtype, value, type(value), sign, shape and tuple(shape))
        found = self._constants.get(key)
        if found is None:
            # Shared with whoever comes later: it must not inherit the control dependencies of the moment (dropping
            # them would also leave a loop, where there is one).
            free = tf.control_dependencies(None) if scope[1] is None else contextlib.nullcontext()
            with free, on(device):
                # A number is one element: more than a tensor without elements takes.
                given = () if shape and 0 in shape else value
                found = tf.constant(np.asarray(given, dtype.as_numpy_dtype), dtype, shape)
            self._constants[key] = found
            self._constant_of[id(found)] = (value, dtype, shape and tuple(shape))
        return found

    def slice(self, device: str, x: tf.Tensor, begin: Sequence[int], size: Sequence[int]) -> tf.Tensor:
        """A region of x."""
        begin, size = self.constant(device, tuple(begin)), self.constant(device, tuple(size))
        with on(device):
            return make_node("Slice", input=x, begin=begin, size=size)

    def split(self, device: str, x: tf.Tensor, parts: int, axis: int) -> list[tf.Tensor]:
        """Equal parts of x along an axis."""
        if parts == 1:
            return [x]
        if self._split_is_fine(x, parts, axis):
            return self._split_in_order(device, x, parts, axis)
        return self.emit_split(device, x, parts, axis)

    def emit_split(self, device: str, x: tf.Tensor, parts: int, axis: int) -> list[tf.Tensor]:
        """Equal parts of x along an axis, in one node."""
        axis = self.constant(device, axis)
        with on(device):
            return make_node("Split", axis=axis, value=x, num_split=parts)

    def _split_is_fine(self, x: tf.Tensor, parts: int, axis: int) -> bool:
        """Whether a part is many short rows of x, which a processor's Split copies one by one, at some 5 ns each."""
        if not self.shared or x.shape.rank is None or None in x.shape.as_list():
            return False
        shape = x.shape.as_list()
        rows = math.prod(shape[:axis])
        return math.prod(shape[axis:]) // parts <= _SHORT_ROW and rows > 1 and rows * parts >= _MANY_ROWS

    def _split_in_order(self, device: str, x: tf.Tensor, parts: int, axis: int) -> list[tf.Tensor]:
        """Brings the parts one after the other, in one pass over x, and gives them out without a copy."""
        shape = x.shape.as_list()
        part = [*shape[:axis], shape[axis] // parts, *shape[axis + 1:]]
        x = self.reshape(device, x, (math.prod(shape[:axis]), parts, math.prod(shape[axis:]) // parts))
        blocks = self.emit_split(device, self.transpose(device, x, (1, 0, 2)), parts, 0)
        return [self.reshape(device, block, part) for block in blocks]

    def split_sizes(self, device: str, x: tf.Tensor, sizes: Sequence[int], axis: int) -> list[tf.Tensor]:
        """Parts of x of these sizes along an axis."""
        if len(set(sizes)) == 1:
            return self.split(device, x, len(sizes), axis)
        sizes_, axis = self.constant(device, tuple(sizes)), self.constant(device, axis)
        with on(device):
            return make_node("SplitV", value=x, size_splits=sizes_, axis=axis, num_split=len(sizes))

    def concat(self, device: str, xs: Sequence[tf.Tensor], axis: int) -> tf.Tensor:
        """The tensors one after the other along an axis."""
        if len(xs) == 1:
            return xs[0]
        axis = self.constant(device, axis)
        with on(device):
            return make_node("ConcatV2", values=list(xs), axis=axis)

    def reshape(self, device: str, x: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
        """x in another shape; x itself where it has that shape."""
        if x.shape.rank is not None and x.shape.as_list() == list(shape):
            return x
        shape = self.constant(device, tuple(shape))
        with on(device):
            return make_node("Reshape", tensor=x, shape=shape)

    def transpose(self, device: str, x: tf.Tensor, perm: Sequence[int]) -> tf.Tensor:
        """x with its dims in another order; x itself where it is the same order."""
        if list(perm) == list(range(len(perm))):
            return x
        perm = self.constant(device, tuple(perm))
        with on(device):
            return make_node("Transpose", x=x, perm=perm)

    def broadcast(self, device: str, x: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
        """x repeated to a shape (by NumPy's rules)."""
        if x.shape.rank is not None and x.shape.as_list() == list(shape):
            return x
        shape = self.constant(device, tuple(shape))
        with on(device):
            return make_node("BroadcastTo", input=x, shape=shape)

    def combine(self, device: str, xs: Sequence[tf.Tensor], kind: str) -> tf.Tensor:
        """The elementwise "SUM", "MAX" or "MIN" of tensors of one shape."""
        if len(xs) == 1:
            return xs[0]
        with on(device):
            if kind == "SUM":
                return make_node("AddN", inputs=list(xs))
            binary = {"MAX": "Maximum", "MIN": "Minimum"}[kind]
            if len(xs) <= 3:
                result = xs[0]
                for x in xs[1:]:
                    result = make_node(binary, x=result, y=x)
                return result
            stacked = make_node("Pack", values=list(xs), axis=0)
        return self.reduce(device, stacked, [0], kind)

    def reduce(self, device: str, x: tf.Tensor, axes: Sequence[int], kind: str) -> tf.Tensor:
        """The "SUM", "MAX" or "MIN" of x along axes, which vanish."""
        if not axes:
            return x
        axes = self.constant(device, tuple(axes))
        with on(device):
            return make_node({"SUM": "Sum", "MAX": "Max", "MIN": "Min"}[kind], input=x, axis=axes, keep_dims=False)
