"""A graph per process: every process runs the same lowering, and makes nodes for its own devices only.

Tensors on devices of other processes are stand-ins (`ledger.StandIn`), and what crosses processes is a collective
(`collectives.Collectives`). Nothing here may depend on which process it runs in but whether a node is made: all make
the same transfers in the same order, which `check_agreement` lets them compare before the first step.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from pase_mtf.compat import func_graph, tf
from pase_mtf.errors import MismatchError, UsageError
from pase_mtf.lowering.collectives import Collectives, process_of
from pase_mtf.lowering.emit import Emitter, device_specs, drawing_apart, on, scopes
from pase_mtf.lowering.fast_nodes import flat
from pase_mtf.lowering.ledger import AnyTensor, Ledger, StandIn

__all__ = ["Agreement", "Rank", "RankEmitter", "run_options"]

_Result: TypeAlias = "AnyTensor | tuple[AnyTensor, ...]"
"""What a function of tensors returns on a device."""

_GRAPH_KEY = 1
_DIGEST, _ORDER = (1 << 30), (1 << 30) + 1  # instance keys of the comparison: beyond those of any transfer


def run_options(**options: object) -> tf.RunOptions:
    """Options of every `session.run` of steps, exports and copies to masters, on all ranks alike.

    They tell TensorFlow that the graphs of the ranks belong together; without them some collectives fail, and others
    meet those of another step.
    """
    made = tf.RunOptions(**options)
    made.experimental.collective_graph_key = _GRAPH_KEY
    return made


@dataclasses.dataclass(frozen=True)
class Rank:
    """Which devices of a lowering belong to this process.

    Attributes:
      own: their full names, as in "/job:worker/replica:0/task:1/device:CPU:0".
      communication_hint: what TensorFlow is to make the collectives with: "auto", "ring", or "nccl", which is for GPUs,
        one per process; sums by NCCL are in an order of its own.
      timeout_seconds: after which a collective that another process did not join fails; 0: never. TensorFlow starts a
        thread for each, which sleeps as long: hundreds of collectives a step soon are more threads than a host gives.
    """

    own: tuple[str, ...]
    communication_hint: str = "auto"
    timeout_seconds: float = 0.0

    def __post_init__(self) -> None:
        """Refuses what NCCL cannot do.

        Raises:
          UsageError: a device that is no GPU, or more than one.
        """
        kinds = {spec.device_type for spec in device_specs(self.own)}
        if self.communication_hint == "nccl" and (kinds != {"GPU"} or len(self.own) != 1):
            raise UsageError(f"communication_hint='nccl' with {', '.join(self.own) or 'no device'}: NCCL takes one GPU "
                             "per process; give one, or take communication_hint='auto'")

    @classmethod
    def of(cls, devices: Sequence[str], number: int, **options: Any) -> Rank:
        """The rank with this number, counting the processes as they come first among the devices.

        Args:
          devices: full names of all.
          number: of the rank.
          options: the other attributes.

        Raises:
          UsageError: there is no such rank.
        """
        processes = list(dict.fromkeys(map(process_of, devices)))
        if not 0 <= number < len(processes):
            raise UsageError(f"rank {number}: the devices belong to {len(processes)} processes; give a number from 0 "
                             f"to {len(processes) - 1}")
        return cls(tuple(device for device in devices if process_of(device) == processes[number]), **options)


class RankEmitter(Emitter):
    """Emits nodes for the devices of one process, and stand-ins for the others.

    Attributes:
      first_devices: the number of the first device of every process.
      first_own: the first device of this one.
      ledger: what is known of all tensors.
    """

    first_devices: tuple[int, ...]

    def __init__(self, devices: Sequence[str], rank: Rank):
        """Takes the full names of all devices, and which of them are this process's.

        Raises:
          UsageError: a name without a job, a replica and a task, or a device of the rank that is not among them.
        """
        super().__init__([_full_name(device) for device in devices], shared=False)
        strangers = (own := set(map(_full_name, rank.own))) - set(self.devices)
        if strangers or not own:
            raise UsageError(f"the rank's devices {sorted(strangers)} are not among the devices of the lowering; add "
                             "them to `devices`")
        self.ledger = Ledger()
        self._own = tuple(device for device in self.devices if device in own)
        self.exchange = self._collectives = Collectives(self._own, rank.communication_hint, rank.timeout_seconds,
                                                        self.ledger)
        self._made_by_function = False
        processes: dict[tuple[str, int, int], int] = {}
        for number, device in enumerate(self.devices):
            processes.setdefault(process_of(device), number)
        self.first_devices = tuple(processes.values())
        self.first_own = self._own[0]
        self._stand_ins: dict[object, StandIn] = {}
        self._exchanged: tuple[int, tf.Operation] | None = None

    @property
    def idle(self) -> bool:
        """Whether what is being lowered serves no update."""
        return self.ledger.idle

    @idle.setter
    def idle(self, value: bool) -> None:
        self.ledger.idle = value

    def owns(self, device: str) -> bool:
        """Whether a device is this process's."""
        return device in self._own

    # Functions of tensors

    def per_device(self, devices: Sequence[str], fn: Callable, columns: Sequence[Sequence[object]]) -> list[Any]:
        """The results of fn on this process's devices; like them, stand-ins on the others."""
        if self._made_by_function:
            return super().per_device(devices, fn, columns)
        rows = [tuple(self._bring(device, column[position]) for column in columns)
                for position, device in enumerate(devices)]
        made = {position: self._call(fn, device, row) for position, (device, row) in enumerate(zip(
            devices, rows, strict=True)) if self.owns(device)}
        like = next(iter(made.values())) if made else self._traced(fn, devices[0], rows[0])
        results = []
        for position, (device, row) in enumerate(zip(devices, rows, strict=True)):
            needs = self.ledger.needs(flat(row))
            mine = made.get(position)
            tensors = [self.ledger.enter(
                StandIn(x.shape, x.dtype, device) if mine is None else _each(mine)[number], device, needs)
                for number, x in enumerate(_each(like))]
            results.append(tuple(tensors) if isinstance(like, tuple) else tensors[0])
        return results

    def of_slices(self, devices: Sequence[str], fn: Callable, columns: Sequence[Sequence[object]]) -> list[Any]:
        """As `per_device`: a process has few devices. What they draw at random differs, though ranks count alike."""
        return self.per_device(devices, drawing_apart(fn), columns)

    def _bring(self, device: str, x: object) -> object:
        if isinstance(x, (tuple, list)):
            return type(x)(self._bring(device, entry) for entry in x)
        return self.exchange.bring(device, x) if isinstance(x, (tf.Tensor, StandIn)) else x

    @contextlib.contextmanager
    def _in_function(self) -> Iterator[None]:
        """What is emitted in this context is a function's own: nobody else hears of it."""
        self._made_by_function = True
        try:
            yield
        finally:
            self._made_by_function = False

    def _call(self, fn: Callable, device: str, row: Sequence[object]) -> _Result:
        before = (graph := tf.get_default_graph()).version
        with on(device), self._in_function():
            result = fn(device, *row)
            # One that is known already, or comes twice, has another name here: each is sent by itself, on every rank.
            fresh = [x if isinstance(x, tf.Tensor) and x.graph is graph and x.op._id > before
                     and self.ledger.device_of(x) is None and not any(x is other for other in _each(result)[:number])
                     else tf.identity(x) for number, x in enumerate(_each(result))]
        return tuple(fresh) if isinstance(result, tuple) else fresh[0]

    def _traced(self, fn: Callable, device: str, row: Sequence[object]) -> _Result:
        """What fn returns, in a graph that is thrown away: this process has none of the devices."""
        kept, self._constants = self._constants, {}
        try:
            with func_graph.FuncGraph("shapes").as_default(), on(self.first_own), self._in_function():
                return fn(device, *(_placeholders(x) for x in row))
        finally:
            self._constants = kept

    def held_on(self, device: str, make: Callable[[], tf.Tensor | tf.Variable], shape: Sequence[int],
                dtype: tf.DType) -> AnyTensor | tf.Variable:
        """What `make` makes on a device of this process; a stand-in on another."""
        return make() if self.owns(device) else StandIn(shape, dtype, device)

    def known(self, device: str, x: AnyTensor) -> AnyTensor:
        """A tensor that is on a device and depends on no transfer, such as what a variable was read as."""
        return self.ledger.enter(x, device, 0)

    def use(self, xs: Iterable[AnyTensor]) -> Sequence[tf.Operation]:
        """What they need of other processes has to be run with what takes them, and updates they wait for before."""
        return self.ledger.use(xs, assigned=True)

    # Single nodes

    def _emit(self, device: str, xs: Sequence[AnyTensor], make: Callable[[list[tf.Tensor]], tf.Tensor],
              shape: Sequence[int]) -> AnyTensor:
        if self._made_by_function:
            return make(list(xs))
        xs = [self.exchange.bring(device, x) for x in xs]
        made = make(xs) if self.owns(device) else StandIn(shape, xs[0].dtype, device)
        return self.ledger.enter(made, device, self.ledger.needs(xs))

    def constant(self, device: str, value: float | tuple[float, ...], dtype: tf.DType = tf.int32,
                 shape: Sequence[int] | None = None) -> tf.Tensor:
        """A constant on a device, made once."""
        if self._made_by_function or self.owns(device):
            found = super().constant(device, value, dtype, shape)
            if not self._made_by_function and self.ledger.device_of(found) is None:
                self.ledger.enter(found, device, 0)
            return found
        key = (next(scopes()), device, dtype, value, type(value), shape and tuple(shape))
        if key not in self._stand_ins:
            size = np.shape(value) if shape is None else shape
            self._stand_ins[key] = self.ledger.enter(StandIn(size, dtype, device), device, 0)
        return self._stand_ins[key]

    def slice(self, device: str, x: tf.Tensor, begin: Sequence[int], size: Sequence[int]) -> tf.Tensor:
        """A region of x."""
        return self._emit(device, [x], lambda xs: super(RankEmitter, self).slice(device, xs[0], begin, size), size)

    def emit_split(self, device: str, x: tf.Tensor, parts: int, axis: int) -> list[tf.Tensor]:
        """Equal parts of x along an axis, in one node."""
        if self._made_by_function:
            return super().emit_split(device, x, parts, axis)
        return self._parts(device, x, [x.shape.as_list()[axis] // parts] * parts, axis,
                           lambda x: super(RankEmitter, self).emit_split(device, x, parts, axis))

    def split_sizes(self, device: str, x: tf.Tensor, sizes: Sequence[int], axis: int) -> list[tf.Tensor]:
        """Parts of x of these sizes along an axis."""
        if self._made_by_function or len(set(sizes)) == 1:
            return super().split_sizes(device, x, sizes, axis)
        return self._parts(device, x, sizes, axis,
                           lambda x: super(RankEmitter, self).split_sizes(device, x, sizes, axis))

    def _parts(self, device: str, x: AnyTensor, sizes: Sequence[int], axis: int,
               make: Callable[[tf.Tensor], list[tf.Tensor]]) -> list[AnyTensor]:
        x = self.exchange.bring(device, x)
        shape = x.shape.as_list()
        if self.owns(device):
            parts = make(x)
        else:
            parts = [StandIn([*shape[:axis], size, *shape[axis + 1:]], x.dtype, device) for size in sizes]
        needs = self.ledger.needs([x])
        return [self.ledger.enter(part, device, needs) for part in parts]

    def concat(self, device: str, xs: Sequence[tf.Tensor], axis: int) -> tf.Tensor:
        """The tensors one after the other along an axis."""
        if len(xs) == 1:
            return xs[0]
        shape = xs[0].shape.as_list()
        shape[axis] = sum(x.shape.as_list()[axis] for x in xs)
        return self._emit(device, xs, lambda xs: super(RankEmitter, self).concat(device, xs, axis), shape)

    def reshape(self, device: str, x: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
        """x in another shape; x itself where it has that shape."""
        if x.shape.rank is not None and x.shape.as_list() == list(shape):
            return x
        return self._emit(device, [x], lambda xs: super(RankEmitter, self).reshape(device, xs[0], shape), shape)

    def transpose(self, device: str, x: tf.Tensor, perm: Sequence[int]) -> tf.Tensor:
        """x with its dims in another order; x itself where it is the same order."""
        if list(perm) == list(range(len(perm))):
            return x
        shape = [x.shape.as_list()[axis] for axis in perm] if x.shape.is_fully_defined() else []
        return self._emit(device, [x], lambda xs: super(RankEmitter, self).transpose(device, xs[0], perm), shape)

    def broadcast(self, device: str, x: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
        """x repeated to a shape (by NumPy's rules)."""
        if x.shape.rank is not None and x.shape.as_list() == list(shape):
            return x
        return self._emit(device, [x], lambda xs: super(RankEmitter, self).broadcast(device, xs[0], shape), shape)

    def combine(self, device: str, xs: Sequence[tf.Tensor], kind: str) -> tf.Tensor:
        """The elementwise "SUM", "MAX" or "MIN" of tensors of one shape."""
        if len(xs) == 1:
            return xs[0]

        def make(xs: list[tf.Tensor]) -> tf.Tensor:
            with self._in_function() if not self._made_by_function else contextlib.nullcontext():
                return super(RankEmitter, self).combine(device, xs, kind)

        return self._emit(device, xs, make, xs[0].shape)

    # What waits, what is fetched

    @contextlib.contextmanager
    def after(self, control: Iterable[object]) -> Iterator[None]:
        """What is made in this context waits for tensors and operations, those of this process."""
        control = list(control)
        own = [x for x in control if not isinstance(x, StandIn)]
        updates, bit = [x for x in own if isinstance(x, tf.Operation)], 0
        if updates and not self.ledger.in_loop:
            # Every process runs its part of an update that something waits for, whether it has a part of that or not.
            number = self.ledger.transfer("update")
            bit = self.ledger.bit(number)
            self.ledger.of_updates |= bit
            with tf.control_dependencies(None):
                self.ledger.pin(number, tf.group(updates))
        if not self.ledger.in_loop:  # a tensor of another process may wait for an update of which a part is here
            own += self.ledger.pins(self.ledger.needs(control) & self.ledger.of_updates)
        with self.ledger.waiting_for(control, bit), tf.control_dependencies(own):
            yield

    def behind_turns(self, after: Sequence[int]) -> contextlib.AbstractContextManager:
        """What is made in this context is of the next turn, and waits for what is of earlier ones."""
        return self.ledger.turn(after)

    def group(self, operations: Sequence[tf.Operation]) -> tf.Operation:
        """One operation that runs all of them, and this process's ends of all transfers that any process's need."""
        waited = self.ledger.take_waited()
        if self.ledger.in_loop:
            group = tf.group(operations)
            self.ledger.pin(0, group)
            return group
        needed = self.ledger.needed
        before, pins = (0, []) if self._exchanged is None else (self._exchanged[0], [self._exchanged[1]])
        if self._exchanged is None or needed != before:
            with tf.control_dependencies(None):
                self._exchanged = needed, tf.group([*pins, *self.ledger.pins(needed & ~before)])
        own = [*operations, self._exchanged[1], *self.ledger.pins(waited)]
        return self.ledger.enter(tf.group(own), "", needed | waited)

    def group_for(self, x: tf.Tensor, operations: Sequence[tf.Operation]) -> tf.Operation:
        """One operation that runs all of them, and this process's ends of the transfers that x needs anywhere."""
        return tf.group([*operations, *self.ledger.pins(self.ledger.needs([x]))])

    def fetchable(self, copies: Sequence[tf.Tensor]) -> tf.Tensor:
        """This process's copy, with its ends of the transfers that any process's copy needs: all fetch theirs."""
        own = next(copy for number, copy in zip(self.first_devices, copies, strict=True)
                   if self.devices[number] == self.first_own)
        with tf.control_dependencies(self.ledger.pins(self.ledger.needs(copies))), on(self.first_own):
            return tf.identity(own)

    def while_loop(self, condition: Callable, body: Callable, starts: Sequence[Sequence[tf.Tensor]],
                   devices: Sequence[Sequence[str]], options: Mapping[str, object]) -> Sequence[Sequence[tf.Tensor]]:
        """A loop over the slices of this process, and a number that holds its transfers together.

        All processes run it, whether they hold slices or not, and in every iteration all transfers that are in it.
        """
        shapes = [[(x.shape, x.dtype) for x in slices] for slices in starts]

        def lists(own: Iterable[tf.Tensor], needs: int = 0) -> list[list[AnyTensor]]:
            own = iter(own)
            return [[self.ledger.enter(next(own) if self.owns(device) else StandIn(*shape, device), device, needs)
                     for device, shape in zip(names, row, strict=True)]
                    for names, row in zip(devices, shapes, strict=True)]

        def own(slices_of: Sequence[Sequence[AnyTensor]]) -> list[tf.Tensor]:
            brought = [(device, self.exchange.bring(device, x)) for names, slices in zip(
                devices, slices_of, strict=True) for device, x in zip(names, slices, strict=True)]
            self.ledger.use(x for _, x in brought)
            mine = []
            for device, x in brought:
                if self.owns(device):
                    with on(device):
                        mine.append(tf.identity(x))
            return mine

        def go_on(turn: tf.Tensor, *mine: tf.Tensor) -> tf.Tensor:
            answer = self._everywhere(*condition(*lists(mine)))
            with tf.control_dependencies([turn, *self.ledger.take_pins()]):
                return tf.identity(answer)

        def iterate(turn: tf.Tensor, *mine: tf.Tensor) -> list[tf.Tensor]:
            made, pins = own(body(*lists(mine))), self.ledger.take_pins()
            with tf.control_dependencies(pins):
                return [tf.add(turn, 1), *self._collectives.in_order(made, pins)]

        number = self.ledger.transfer("loop", [list(names) for names in devices])
        bit, mine = self.ledger.bit(number), own(starts)
        needs = 0 if self.ledger.in_loop else self.ledger.needs(x for slices in starts for x in slices)
        with on(self.first_own), tf.control_dependencies(self.ledger.pins(needs & self.ledger.of_updates)):
            mine = self._collectives.behind([tf.constant(0), *mine])
        with self.ledger.loop() as loop, on(self.first_own):
            loop.needs |= self.ledger.needs(x for slices in starts for x in slices)
            turns, *results = tf.while_loop(go_on, iterate, mine, back_prop=False,
                                            return_same_structure=True, **options)
        self.ledger.pin(number, turns.op)
        return lists(results, self._collectives.passed(self.devices, turns.op, loop.needs | bit))

    def apart(self) -> contextlib.AbstractContextManager[None]:
        """What is made in this context is fetched without what is made outside of it."""
        return self._collectives.apart()

    def _everywhere(self, values: Sequence[AnyTensor], devices: Sequence[str]) -> tf.Tensor:
        """What all devices hold alike, in this process."""
        self.ledger.use(values)
        found = None
        for number in self.first_devices:
            device = self.devices[number]
            value = values[devices.index(device)] if device in devices else self.exchange.bring(device, values[0])
            if self.owns(device):
                found = value
        return found

    def agreement(self) -> Agreement:
        """The nodes by which the ranks compare what they lowered: make them last, on all ranks."""
        return Agreement(self.ledger, [self.devices[number] for number in self.first_devices], self.first_own,
                         self._own, self._collectives)


class Agreement:
    """Lets the ranks compare what they lowered before they run it: where they differ, a step would never end."""

    def __init__(self, ledger: Ledger, firsts: Sequence[str], own: str, mine: Sequence[str], exchange: Collectives):
        """Makes the nodes.

        Args:
          ledger: of the lowering.
          firsts: the first device of every process.
          own: that of this one.
          mine: all devices of this one.
          exchange: of the lowering.
        """
        self._ledger, self._firsts = ledger, sorted(firsts)
        self._digest = np.frombuffer(ledger.digest(), np.int32)
        self._digests = None
        self._orders: list[tuple[tuple[str, ...], tf.Tensor]] = []
        groups = dict(exchange.groups)
        last: dict[str, list[tf.Tensor]] = {}
        if len(firsts) > 1:
            with tf.control_dependencies(None), on(own):
                self._digests = tf.raw_ops.CollectiveGatherV2(
                    input=tf.constant(self._digest[None]), ordering_token=[],
                    **exchange.settings(tuple(self._firsts), _DIGEST))
        for members in groups:
            for device in set(members) & set(mine):
                # On a device one after the other, in the order in which all ranks know the groups: NCCL wants it.
                with tf.control_dependencies(None), tf.control_dependencies(last.get(device, [])), on(device):
                    order = tf.raw_ops.CollectiveGatherV2(
                        input=tf.constant([members.index(device)]), ordering_token=[],
                        **exchange.settings(members, _ORDER))
                self._orders.append((members, order))
                last[device] = [order]

    def check(self, session: tf.Session, timeout_seconds: float = 60.0) -> None:
        """Compares, in a session of every rank at once.

        Raises:
          MismatchError: the ranks lowered different programs, or a rank did not answer in time.
        """
        if self._digests is None:
            return
        options = run_options(timeout_in_ms=int(1e3 * timeout_seconds))
        try:
            digests = session.run(self._digests, options=options)
            others = [name for name, digest in zip(self._firsts, digests, strict=True)
                      if not np.array_equal(digest, self._digest)]
            if others:
                raise MismatchError(f"the ranks lowered different programs: {self._ledger.transfers} transfers here, "
                                    f"others on {', '.join(others)}; start all ranks with the same program, strategy "
                                    "and versions")
            orders = session.run([order for _, order in self._orders], options=options)
        except tf.errors.DeadlineExceededError as error:
            raise MismatchError(f"a rank did not compare its program with the others' within {timeout_seconds:g} s; "
                                "look whether all of them run") from error
        for (members, _), order in zip(self._orders, orders, strict=True):
            if list(order) != list(range(len(members))):
                raise MismatchError(f"TensorFlow counts the devices {', '.join(members)} in the order {list(order)}; "
                                    "give one device per process")


def _each(result: _Result) -> Sequence[AnyTensor]:
    return result if isinstance(result, tuple) else (result,)


def _placeholders(x: object) -> object:
    if isinstance(x, (tuple, list)):
        return type(x)(map(_placeholders, x))
    return tf.placeholder(x.dtype, x.shape) if isinstance(x, StandIn) else x


def _full_name(device: str) -> str:
    """A device's name as TensorFlow's runtime writes it.

    Raises:
      UsageError: a name without a job, a replica and a task.
    """
    (spec,) = device_specs([device])
    if None in (spec.job, spec.replica, spec.task, spec.device_type, spec.device_index):
        raise UsageError(f"device {device!r}: between processes devices have full names, such as "
                         "'/job:worker/replica:0/task:1/device:CPU:0'")
    return spec.to_string()
