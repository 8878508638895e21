"""What crosses devices of several processes, as TensorFlow's collectives.

Every process calls the same methods in the same order, for all devices, and makes nodes for its own. A collective knows
its group by a key, and itself by another: the first follows from the devices, the second from a counter. Sends and
receives are broadcasts in a group of two. There is no reduce-scatter on processors: it is an all-to-all, and a sum in
the order of the devices, as that of one process is; only sums that go round a ring (`graph.all_reduces`) are in an
order of their own, another one for every piece.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from pase_mtf.compat import tf
from pase_mtf.errors import UsageError
from pase_mtf.graph.all_reduces import RING, way_of
from pase_mtf.lowering.emit import Scope, device_specs, on, scopes
from pase_mtf.lowering.ledger import AnyTensor, Ledger, StandIn

__all__ = ["Collectives", "process_of"]

_AS_IT_IS = frozenset({tf.float16, tf.float32, tf.float64, tf.int32, tf.int64})
_CARRIED_AS = {tf.bfloat16: tf.float32, **dict.fromkeys((tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16), tf.int32)}
"""Types that collectives do not know, and larger ones that hold all their values."""

_KEYS = itertools.count(1)
"""Of collectives, for all lowerings of a process: TensorFlow remembers them as long as the process lives."""

_MERGE = {"SUM": "Add", "MAX": "Max", "MIN": "Min"}


def process_of(device: str) -> tuple[str, int, int]:
    """Job, replica and task of a device's full name."""
    (spec,) = device_specs([device])
    return spec.job, spec.replica, spec.task


class _Chain:
    """Collectives that run one after another on every device, as NCCL wants them: what is fetched together.

    Attributes:
      last: the last one of this process on a device, in a scope of control flow.
      needs: the transfers that the last one on a device depends on, whatever process that is of. Who runs it runs all
        before it, so that the others have to run theirs.
    """

    def __init__(self) -> None:
        self.last: dict[tuple[Scope, str], tf.Operation] = {}
        self.needs: dict[str, int] = {}


class Collectives:
    """An `Exchange` between processes.

    By NCCL, collectives are in a chain: each is behind the one before it on its device.

    Attributes:
      ledger: where tensors and transfers are entered.
      groups: the devices of every group so far, in the order in which TensorFlow counts its members.
    """

    has_hubs = False

    def __init__(self, own: Sequence[str], hint: str, timeout_seconds: float, ledger: Ledger):
        """Takes the devices of this process, what to tell TensorFlow of the collectives, and where to enter them."""
        self.ledger = ledger
        self.groups: dict[tuple[str, ...], int] = {}
        self._own, self._hint, self._timeout = frozenset(own), hint, timeout_seconds
        self._key_of: dict[int, int] = {}
        self._brought: dict[tuple[Scope, int, object], tuple[object, object]] = {}
        self._constants: dict[object, tf.Tensor] = {}
        self._chain: _Chain | None = _Chain() if hint == "nccl" else None
        self._apart: _Chain | None = _Chain() if hint == "nccl" else None

    # The interface

    def bring(self, device: str, x: tf.Tensor) -> tf.Tensor:
        """The tensor on a device: received, where it is in another process; sent once to every process."""
        owner = self.ledger.device_of(x)
        if owner is None or process_of(owner) == process_of(device):
            return x
        here = list(scopes())
        for scope in here:
            found = self._brought.get((scope, id(x), process_of(device)))
            if found is not None:
                return found[1]
        number = self._transfer("send", (owner, device), x)
        got = StandIn(x.shape, x.dtype, device)
        if owner in self._own:
            self._make(owner, number, tf.raw_ops.CollectiveBcastSendV2, (owner, device), input=_carried(x))
        elif device in self._own:
            shape = self._constant(device, tuple(x.shape.as_list()))
            made = self._make(device, number, tf.raw_ops.CollectiveBcastRecvV2, (owner, device), T=_carrier(x.dtype),
                              shape=shape)
            made.outputs[0].set_shape(x.shape)
            got = _as(x.dtype, made.outputs[0], device)
        self.ledger.enter(got, device, self._needs((owner, device), [x], number))
        self._brought[here[0], id(x), process_of(device)] = x, got
        return got

    def all_gather(self, devices: Sequence[str], xs: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
        """The tensors of all, on every device."""
        if self._within_a_process(devices):
            return [list(xs) for _ in devices]
        xs = [self.bring(device, x) for device, x in zip(devices, xs, strict=True)]
        if not _alike(xs):
            return [[self.bring(device, x) for x in xs] for device in devices]
        shape = xs[0].shape.as_list()

        def gather(device: str, number: int, x: tf.Tensor) -> tf.Operation:
            with on(device):
                x = tf.reshape(_carried(x), [1, *shape])
            return self._make(device, number, tf.raw_ops.CollectiveGatherV2, devices, input=x, ordering_token=[])

        return self._collect("gather", devices, xs, gather)

    def all_to_all(self, devices: Sequence[str], rows: Sequence[Sequence[tf.Tensor]]) -> list[list[tf.Tensor]]:
        """Its pieces of all, on every device."""
        columns = [[row[number] for row in rows] for number in range(len(devices))]
        if self._within_a_process(devices):
            return columns
        rows = [[self.bring(device, x) for x in row] for device, row in zip(devices, rows, strict=True)]
        if not _alike([x for row in rows for x in row]):
            return [[self.bring(device, x) for x in column] for device, column in zip(devices, columns, strict=True)]
        places = [devices.index(member) for member in self._members(devices)]

        def exchange(device: str, number: int, row: Sequence[tf.Tensor]) -> tf.Operation:
            with on(device):
                x = tf.raw_ops.Pack(values=[_carried(row[place]) for place in places], axis=0)
            return self._make(device, number, tf.raw_ops.CollectiveAllToAllV2, devices, input=x, ordering_token=[])

        return self._collect("all-to-all", devices, rows, exchange)

    def all_reduce(self, devices: Sequence[str], xs: Sequence[tf.Tensor], kind: str) -> list[tf.Tensor] | None:
        """The combined tensor on every device, by NCCL or round TensorFlow's ring; None where it has too few elements
        for a ring."""
        by_itself = self._hint == "nccl" or (xs[0].shape.is_fully_defined() and way_of(
            math.prod(xs[0].shape.as_list()), len(devices)) == RING)
        if not by_itself or self._within_a_process(devices) or not xs[0].dtype.is_floating:
            return None
        xs = [self.bring(device, x) for device, x in zip(devices, xs, strict=True)]
        number = self._transfer(f"reduce {kind}", devices, xs[0])
        needs, result = self._needs(devices, xs, number), []
        for device, x in zip(devices, xs, strict=True):
            total = StandIn(x.shape, x.dtype, device)
            if device in self._own:
                made = self._make(device, number, tf.raw_ops.CollectiveReduceV2, devices, input=_carried(x),
                                  ordering_token=[], merge_op=_MERGE[kind], final_op="Id")
                total = _as(x.dtype, made.outputs[0], device)
                total.set_shape(x.shape)
            result.append(self.ledger.enter(total, device, needs))
        return result

    # In which order

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """What is made in this context is fetched by itself: it is in a chain of its own."""
        self._chain, self._apart = self._apart, self._chain
        try:
            yield
        finally:
            self._chain, self._apart = self._apart, self._chain

    def behind(self, xs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Tensors of this process, with which a loop begins: behind the last collectives before it."""
        lasts = self._lasts(self._own)
        with tf.control_dependencies(lasts):
            return [tf.identity(x) for x in xs] if lasts else list(xs)

    def passed(self, devices: Sequence[str], end: tf.Operation, needs: int) -> int:
        """A loop over these devices, whose end is this in this process, is the last in the chain.

        Returns:
          The transfers that its results depend on, given those that it depends on itself.
        """
        for device in self._own:
            self._set_last(device, end)
        return self._chained(devices, needs)

    def in_order(self, made: Sequence[tf.Tensor], pins: Sequence[tf.Operation]) -> list[tf.Tensor]:
        """What an iteration of a loop hands to the next: where there is a chain, when its own transfers are done."""
        if self._chain is None:
            return list(made)
        with tf.control_dependencies(pins):
            return [tf.identity(x) for x in made]

    def _lasts(self, devices: Iterable[str]) -> list[tf.Operation]:
        """The last of the chain in the current scope, on devices of this process."""
        scope, last = next(scopes()), {} if self._chain is None else self._chain.last
        return [last[scope, device] for device in devices if (scope, device) in last]

    def _set_last(self, device: str, operation: tf.Operation) -> None:
        if self._chain is not None:
            self._chain.last[next(scopes()), device] = operation

    def _needs(self, devices: Sequence[str], xs: Sequence[AnyTensor], number: int) -> int:
        """The transfers that what comes out of one depends on."""
        return self._chained(devices, self.ledger.needs(xs) | self.ledger.bit(number))

    def _chained(self, devices: Sequence[str], needs: int) -> int:
        """Transfers, and those that they are behind in the chain. In a loop all run in every iteration."""
        if self._chain is not None and not self.ledger.in_loop:
            needs |= self.ledger.waited_for
            for device in devices:
                needs |= self._chain.needs.get(device, 0)
            self._chain.needs.update(dict.fromkeys(devices, needs))
        return needs

    # How it is made

    def _collect(self, kind: str, devices: Sequence[str], given: Sequence, make: Callable[..., tf.Operation],
                 ) -> list[list[tf.Tensor]]:
        """What a collective gives every device: a tensor from each, in the order of the devices."""
        flat = [x for entry in given for x in (entry if isinstance(entry, list) else [entry])]
        number = self._transfer(kind, devices, flat[0])
        needs, result = self._needs(devices, flat, number), []
        members, shape, dtype = self._members(devices), flat[0].shape.as_list(), flat[0].dtype
        for device, entry in zip(devices, given, strict=True):
            if device in self._own:
                made = make(device, number, entry)
                with on(device):
                    pieces = tf.raw_ops.Unpack(value=made.outputs[0], num=len(devices), axis=0)
                    for piece in pieces:
                        piece.set_shape(shape)
                row = [_as(dtype, pieces[members.index(other)], device) for other in devices]
            else:
                row = [StandIn(shape, dtype, device) for _ in devices]
            result.append([self.ledger.enter(x, device, needs) for x in row])
        return result

    def _transfer(self, kind: str, devices: Sequence[str], x: tf.Tensor) -> int:
        if x.dtype not in _AS_IT_IS and x.dtype not in _CARRIED_AS:
            raise UsageError(f"tensors of {x.dtype.name} cannot be sent between processes; cast them to one of "
                             f"{', '.join(sorted(dtype.name for dtype in _AS_IT_IS))}")
        self._group(devices)
        key = next(_KEYS)
        number = self.ledger.transfer(kind, key, tuple(devices), x.shape.as_list(), x.dtype.name)
        self._key_of[number] = key
        return number

    def _make(self, device: str, number: int, kind: Callable[..., tf.Operation | tf.Tensor], devices: Sequence[str],
              **attributes: object) -> tf.Operation:
        """A collective of this process."""
        scope = next(scopes())
        keys = {name: self._constant(device, value) for name, value in self.keys(devices, number).items()}
        # Whoever comes later shares it: it must not wait for what is waited for at the moment.
        with _free(scope), tf.control_dependencies(self._lasts([device])), on(device):
            made = kind(**keys, **attributes, communication_hint=self._hint, timeout_seconds=self._timeout)
        made = made if isinstance(made, tf.Operation) else made.op
        self._set_last(device, made)
        self.ledger.pin(number, made)
        return made

    def keys(self, devices: Sequence[str], number: int) -> dict[str, int]:
        """What tells TensorFlow which collective of which group it is."""
        return {"group_size": len(devices), "group_key": self._group(devices),
                "instance_key": self._key_of.get(number, number)}

    def settings(self, devices: Sequence[str], number: int) -> dict[str, object]:
        """The attributes of a collective that is not one of the lowering's transfers."""
        return {**self.keys(devices, number), "communication_hint": self._hint, "timeout_seconds": self._timeout}

    def _constant(self, device: str, value: int | tuple[int, ...]) -> tf.Tensor:
        """An int32 on a device, made once."""
        scope = next(scopes())
        if (scope, device, value) not in self._constants:
            with _free(scope), on(device):
                self._constants[scope, device, value] = tf.constant(value, tf.int32, [len(value)] if isinstance(
                    value, tuple) else [])
        return self._constants[scope, device, value]

    def _group(self, devices: Sequence[str]) -> int:
        """The key of a group: TensorFlow keeps groups as long as a process lives, so it follows from the devices."""
        members = self._members(devices)
        if members not in self.groups:
            key = zlib.crc32("|".join(members).encode()) & 0x7fffffff
            while key in self.groups.values():
                key = (key + 1) & 0x7fffffff
            self.groups[members] = key
        return self.groups[members]

    @staticmethod
    def _members(devices: Sequence[str]) -> tuple[str, ...]:
        """The devices of a group in the order in which TensorFlow counts them."""
        return tuple(sorted(devices, key=_counted))

    @staticmethod
    def _within_a_process(devices: Sequence[str]) -> bool:
        return len(set(map(process_of, devices))) == 1


def _counted(device: str) -> tuple[str, int]:
    """What TensorFlow orders the devices of a group by: processes by the letters of their names (task:10 is before
    task:2), the devices of one by their numbers (CPU:2 is before CPU:10)."""
    process, _, place = device.rpartition("/device:")
    return process, int(place.rpartition(":")[2])


def _free(scope: Scope) -> contextlib.AbstractContextManager:
    """What is made in this context waits for nothing that is waited for at the moment."""
    return tf.control_dependencies(None) if scope[1] is None else contextlib.nullcontext()


def _alike(xs: Sequence[tf.Tensor]) -> bool:
    return len({tuple(x.shape.as_list()) for x in xs}) == 1


def _carrier(dtype: tf.DType) -> tf.DType:
    return _CARRIED_AS.get(dtype, dtype)


def _carried(x: tf.Tensor) -> tf.Tensor:
    """A tensor in a type that collectives know."""
    return tf.cast(x, _carrier(x.dtype))


def _as(dtype: tf.DType, x: tf.Tensor, device: str) -> tf.Tensor:
    """A tensor that was carried in another type, in its own."""
    with on(device):
        return tf.cast(x, dtype)
