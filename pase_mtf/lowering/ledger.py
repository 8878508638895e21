"""What a process knows of tensors that it may not have: where they are, and which transfers they depend on.

Every process lowers the same program and enters the same tensors here in the same order; those on devices of others are
`StandIn`s. TensorFlow prunes the graph of every process by itself, so a transfer whose other end is pruned elsewhere
would wait for ever. Therefore the transfers that a fetch needs, on whatever device, are told from here, where all
processes see the same: each of them then runs its own ends of all of them (`pins`), and no others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias, TypeVar

from pase_mtf.compat import tf

__all__ = ["AnyTensor", "Ledger", "StandIn"]

_Made = TypeVar("_Made")

AnyTensor: TypeAlias = "tf.Tensor | StandIn"
"""A tensor; or what stands for it, where another process has it."""


class StandIn:
    """A tensor on a device of another process: it has a shape and a type, and no node here.

    Attributes:
      shape, dtype: as of a tf.Tensor.
      device: where it is.
    """

    def __init__(self, shape: Sequence[int] | tf.TensorShape, dtype: tf.DType, device: str):
        self.shape, self.dtype, self.device = tf.TensorShape(shape), tf.as_dtype(dtype).base_dtype, device

    def get_shape(self) -> tf.TensorShape:
        """Its shape."""
        return self.shape

    def ref(self) -> StandIn:
        """Itself, which can be a key."""
        return self

    @property
    def _graph_element(self) -> StandIn:
        """Where it stands for a variable: for the value that is read."""
        return self


@dataclasses.dataclass
class _Entry:
    """What is known of a tensor or an operation.

    Attributes:
      made: itself, so that nothing else gets its id.
      device: where it is; empty of an operation.
      needs: the transfers that it depends on, a bit each.
    """

    made: object
    device: str
    needs: int


@dataclasses.dataclass
class _Loop:
    """A loop while its condition and its body are lowered.

    Attributes:
      needs: the transfers outside of it that anything in it depends on.
      pins: this process's ends of the transfers in the part that is being lowered.
    """

    needs: int = 0
    pins: list[tf.Operation] = dataclasses.field(default_factory=list)


class Ledger:
    """The tensors of a lowering, and its transfers in the order in which all processes make them.

    Attributes:
      needed: the transfers that an update may need, a bit each.
      idle: whether what is entered serves no update.
    """

    def __init__(self) -> None:
        self.needed = 0
        # Bits of updates that something waits for: who runs a part of one, by a send or by what holds an old value, has
        # all ranks run theirs.
        self.of_updates = 0
        self.idle = False
        self._entries: dict[int, _Entry] = {}
        self._digest = hashlib.sha256()
        self._transfers = 0
        self._own: dict[int, list[tf.Operation]] = {}
        self._loops: list[_Loop] = []
        self._waiting = [0]
        self._of_turns: list[int] = []
        self._of_turn = 0
        self._waited = 0

    def device_of(self, x: object) -> str | None:
        """The device that a tensor is on; None where every process has it: it was made outside of the lowering."""
        entry = self._entries.get(id(x))
        return None if entry is None else entry.device

    def needs(self, xs: Iterable[object]) -> int:
        """The transfers that tensors or operations depend on, a bit each."""
        found = 0
        for x in xs:
            entry = self._entries.get(id(x))
            if entry is not None:
                found |= entry.needs
        return found

    def enter(self, made: _Made, device: str, needs: int) -> _Made:
        """Enters a tensor, or an operation, that depends on transfers (besides those of what it waits for)."""
        needs |= self._waiting[-1]
        self._entries[id(made)] = _Entry(made, device, needs)
        self._use(needs)
        return made

    def use(self, xs: Iterable[object], *, assigned: bool = False) -> list[tf.Operation]:
        """Something that is not entered, an assignment or what goes round in a loop, takes tensors as they are.

        Returns:
          the parts here of updates that an assignment waits for: its value may come from another process.
        """
        needs = self.needs(xs)
        if assigned:
            self._waited |= needs & self.of_updates
        self._use(needs)
        return self.pins(needs & self.of_updates) if assigned and not self._loops else []

    def take_waited(self) -> int:
        """The updates that what was assigned since the last call waits for, a bit each: who assigns it runs these."""
        waited, self._waited = self._waited, 0
        return waited

    def _use(self, needs: int) -> None:
        self._of_turn |= needs
        if self._loops:
            self._loops[-1].needs |= needs
        elif not self.idle:
            self.needed |= needs

    @contextlib.contextmanager
    def waiting_for(self, control: Iterable[object], besides: int = 0) -> Iterator[None]:
        """What is entered in this context waits for tensors and operations, and for these bits."""
        self._waiting.append(self._waiting[-1] | self.needs(control) | besides)
        try:
            yield
        finally:
            self._waiting.pop()

    @property
    def waited_for(self) -> int:
        """The transfers that what is entered now waits for, a bit each."""
        return self._waiting[-1]

    @contextlib.contextmanager
    def turn(self, after: Iterable[int]) -> Iterator[None]:
        """What is entered in this context is of the next turn, and waits for what was entered in earlier ones.

        A device waits for its own part of these; as others do not see that, all are said to wait for all of it.

        Args:
          after: numbers of these turns, counted from 0.
        """
        waits = functools.reduce(operator.or_, (self._of_turns[number] for number in after), 0)
        self._of_turn = 0
        self._waiting.append(self._waiting[-1] | waits)
        try:
            yield
        finally:
            self._waiting.pop()
            self._of_turns.append(self._of_turn)

    # Transfers

    def transfer(self, *what: object) -> int:
        """The number of the next transfer, given all that the processes have to agree about."""
        self._transfers += 1
        self._digest.update(repr((self._transfers, self._loops and tf.get_default_graph().get_name_scope(), what)
                                 ).encode())
        return self._transfers

    def bit(self, number: int) -> int:
        """A transfer as what tensors depend on; none in a loop, all of whose transfers run in every iteration."""
        return 0 if self._loops else 1 << number

    def pin(self, number: int, operation: tf.Operation) -> None:
        """An end of a transfer that is in this process."""
        if self._loops:
            self._loops[-1].pins.append(operation)
        else:
            self._own.setdefault(number, []).append(operation)

    def pins(self, needs: int) -> list[tf.Operation]:
        """The ends in this process of transfers, given as bits."""
        return [operation for number, own in self._own.items() if needs >> number & 1 for operation in own]

    @property
    def transfers(self) -> int:
        """How many there were so far, of all processes."""
        return self._transfers

    def digest(self) -> bytes:
        """32 bytes that differ where processes made other transfers, or in another order."""
        return self._digest.digest()

    # Loops

    @property
    def in_loop(self) -> bool:
        """Whether a loop is being lowered."""
        return bool(self._loops)

    @contextlib.contextmanager
    def loop(self) -> Iterator[_Loop]:
        """A loop is lowered in this context."""
        loop = _Loop()
        self._loops.append(loop)
        self._waiting.append(0)
        try:
            yield loop
        finally:
            self._waiting.pop()
            self._loops.pop()

    def take_pins(self) -> list[tf.Operation]:
        """The ends of transfers made since the last call in the part of a loop that is being lowered."""
        pins, self._loops[-1].pins = self._loops[-1].pins, []
        return pins
