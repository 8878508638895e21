"""When tensors are there, in one order of the operations."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np

from pase_mtf.compat import mtf
from pase_mtf.export.steps import Early, Steps

__all__ = ["Found", "Intervals", "Spans", "lives"]


class Intervals(NamedTuple):
    """What is held from one place in the order of the step to another, both included: arrays of one length.

    Attributes:
      tensor: whose layout it has, by number.
      begin, end: the places.
      times: as much as so many of the tensor.
      waits_until: where devices have to sum it, the place until which it may be held; of what an update makes of a
        gradient, where devices have to sum that, the place at which it is there instead. -1: neither.
      shared_until: where one device makes it for several, the place until which it is there besides. -1: none.
      shared_from: the place from which it is: that at which what is made of it may lie where it lies.
      own_until: the place until which its own layer needs it, where other layers, too, read it as it lies or as copies.
        -1: unknown.
    """

    tensor: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    times: np.ndarray
    waits_until: np.ndarray
    shared_until: np.ndarray
    own_until: np.ndarray
    shared_from: np.ndarray


class Spans(NamedTuple):
    """When copies are there, in the order of `Steps.copies`: arrays of one length.

    Attributes:
      begin, end: the places, both included.
      shared_until: the place until which it is there where one device makes it for several, one of which writes in its
        place. -1: `end`.
      made: the place at which what it lies in is made. -1: unknown.
      taken: the place at which its last reader makes what it writes where the copy lies. -1: there is none.
    """

    begin: np.ndarray
    end: np.ndarray
    shared_until: np.ndarray
    made: np.ndarray
    taken: np.ndarray


class Found(NamedTuple):
    """When tensors are there, in one order of the operations.

    Attributes:
      intervals: of all tensors.
      copies: of all that layers read.
      updated: variable -> the place at which it is assigned.
      places: how many there are. The last is no operation's: all gradients that had to wait have been used.
      last_gradient: the place at which the backward pass is over.
      ended: the places at which loops end that add something up.
      in_place: steps that make a product where something lies that nobody reads any more -> the place of each.
    """

    intervals: Intervals
    copies: Spans
    updated: dict[mtf.Operation, int]
    places: int
    last_gradient: int
    ended: frozenset[int]
    in_place: dict[int, int]


def lives(steps: Steps, place: np.ndarray) -> Found:
    """When tensors are there.

    Args:
      steps: of the graph.
      place: of each step, its place in the order.
    """
    return _Lives(steps, place).found()


class _Lives:
    """What is found about one order; all arrays are of places, by the number of the tensor, -1 where there is none.

    Attributes:
      begin, end: of what takes memory.
      copy_begin, copy_end: by the number of the copy.
      waiting: see `Steps`; what lies in the place of another is waited for there.
      lies_in: of each tensor, that in whose place it lies; itself mostly.
    """

    def __init__(self, steps: Steps, place: np.ndarray) -> None:
        self._steps, self._place = steps, place
        self._maker_place = np.append(place, -1)[np.array(steps.tensors.step, np.int64)]
        self._nbytes = np.array(steps.tensors.nbytes)
        self._loops = {loop: (int(place[turning.members].min()), int(place[turning.members].max()))
                       for loop, turning in steps.loops.items() if turning.members}
        self._last_gradient = int(place[steps.is_backward].max(initial=-1))
        self.begin = np.full(len(self._nbytes), -1)
        step, tensor = steps.makes
        self.begin[tensor] = place[step]
        self.end = self.begin.copy()
        self.waiting = steps.waiting.copy()
        self._shown = steps.is_shown.copy()
        self.lies_in = np.arange(len(self._nbytes))
        self._read()
        self._ended = frozenset(self._add_up())

    def _read(self) -> None:
        """What is read is there until its last reader is done, and copied by then."""
        steps = self._steps
        step, source, leaves = steps.reads
        place, made = self._place[step], self.begin[source]
        for early in steps.early:
            place[list(early.read)] = self._early(early)
        is_made = (made >= 0) & (made < place)
        # What is made outside of a loop is there until the loop has ended.
        left = np.array([max((self._loops[loop][1] for loop in loops), default=-1) for loops in steps.leaves])
        done = np.maximum(place, left[leaves])
        # A grouped assignment changes every variable as soon as its value is known.
        assigns = np.zeros(steps.count, bool)
        assigns[[step for _, step, _ in steps.assigned]] = True
        done = np.where(assigns[step], np.where(is_made, made, place), done)
        np.maximum.at(self.end, source[is_made], done[is_made])
        read, copy = steps.names
        self.copy_begin = np.full(len(steps.copies.name), steps.count)
        self.copy_end = np.full(len(steps.copies.name), -1)
        np.minimum.at(self.copy_begin, copy, place[read])
        np.maximum.at(self.copy_end, copy, np.maximum(place, done)[read])
        # What shows a copy keeps it, and may be shown itself.
        last = np.full(len(self._nbytes), -1)
        np.maximum.at(last, steps.copies.name, self.copy_end)
        for shown, copied in reversed(steps.shows):
            name = steps.copies.name[copied]
            self.copy_end[copied] = max(self.copy_end[copied], last[shown])
            last[name] = max(last[name], self.copy_end[copied])
        self.copy_begin[steps.is_variable[steps.copies.name]] = 0
        self._updated = dict[mtf.Operation, int]()
        for variable, step, source in sorted(steps.assigned, key=lambda entry: int(self._place[entry[1]])):
            made, now = int(self.begin[source]), int(self._place[step])
            self._updated[variable] = made if 0 <= made < now else now

    def _add_up(self) -> Iterator[int]:
        """A sum that a loop makes is there from its first iteration on. What an iteration adds is there beside it until
        that has ended: TensorFlow may leave additions until then. Yields the places at which loops have ended."""
        for loop, turning in self._steps.loops.items():
            for inside, total in turning.added_up:
                self.begin[total] = self._loops[loop][0]
                if self.begin[inside] >= 0:
                    self.end[inside] = max(self.end[inside], int(self._place[turning.step]) - 1)
            if turning.added_up:
                yield int(self._place[turning.step])

    def found(self) -> Found:
        """All of it."""
        steps, settled = self._steps, self._steps.count
        taken, copies_taken = self._shared_taken_over()
        in_place = {step: int(self._place[step]) for step, source in steps.products
                    if self.end[source] == self._place[step]}
        taken_at = np.where(taken >= 0, self.end, -1)
        copies_taken_at = np.where(copies_taken >= 0, self.copy_end, -1)
        self._merge_taken_over()
        copies_taken_at[self.begin[copies_taken] < 0] = -1  # it lies elsewhere
        self._overlap(in_place)
        own, there = self._own_until(), np.flatnonzero(self.begin >= 0)
        waits = np.where(steps.of_waiting, settled, -1)
        waits = np.where(self.waiting, np.maximum(self._last_gradient, self.end), waits)
        intervals = [self._interval(there, self.begin[there], self.end[there], waits_until=waits[there],
                                    shared_until=self._until(taken[there]), own_until=own[there],
                                    shared_from=taken_at[there]),
                     *self._of_early(), *self._of_loops()]
        # A copy is made as soon as the tensor is, but of a gradient, when that has been summed.
        name = steps.copies.name
        early = ~self.waiting[name] & (self._maker_place[name] >= 0)
        begin = np.where(early, np.minimum(self.copy_begin, self._maker_place[name]), self.copy_begin)
        copies = Spans(begin, self.copy_end, self._until(copies_taken), self.begin[self.lies_in[name]],
                       copies_taken_at)
        return Found(Intervals(*map(np.concatenate, zip(*intervals, strict=True))), copies, self._updated, settled + 1,
                     self._last_gradient, self._ended, in_place)

    def _interval(self, tensor: np.ndarray, begin: np.ndarray, end: np.ndarray, *, times: float = 1.0,
                  waits_until: np.ndarray | None = None, shared_until: np.ndarray | None = None,
                  own_until: np.ndarray | None = None, shared_from: np.ndarray | None = None) -> Intervals:
        others = (np.full(len(tensor), -1) if places is None else places
                  for places in (waits_until, shared_until, own_until, shared_from))
        return Intervals(tensor, begin, end, np.full(len(tensor), times), *others)

    def _until(self, output: np.ndarray) -> np.ndarray:
        """Until when outputs are there; -1 of none (-1)."""
        return np.where(output >= 0, self.end[self.lies_in[output]], -1)

    def _of_early(self) -> list[Intervals]:
        found = []
        for early in self._steps.early:
            begin, place = self._early(early), int(self._place[early.step])
            found.append(self._interval(*_rows(early.tensor, begin, place), times=early.times))
        return found

    def _early(self, early: Early) -> int:
        """When it makes what it makes before gradients come."""
        awaited = (int(self._place[step]) if step >= 0 else 0 for step in early.awaited)
        return min(max(awaited), int(self._place[early.step]))

    def _of_loops(self) -> list[Intervals]:
        """What loops hold besides: what goes round, of the iteration before as well."""
        found = []
        for loop, turning in self._steps.loops.items():
            # What is written over something else is there as that.
            tensors = self.lies_in[np.array(turning.handed_on, np.int64)]
            tensors = tensors[self.begin[tensors] >= 0]
            if turning.step >= 0 and len(tensors):
                begin, end = (np.full(len(tensors), place) for place in self._loops[loop])
                found.append(self._interval(tensors, begin, end, waits_until=np.where(self.waiting[tensors], end, -1)))
        return found

    def _shared_taken_over(self) -> tuple[np.ndarray, np.ndarray]:
        """Where one device makes a sum, or a copy, for several, the last of them writes its output there, and the
        others, the one that made it among them, have theirs besides.

        Returns:
          Of every tensor, and of every copy, the output of its last reader, where that may lie in its place; -1: none.
        """
        step, output, source, copy = self._steps.over_shared
        taken, copies = np.full(len(self.begin), -1), np.full(len(self.copy_end), -1)
        last = self.end[source] == self._place[step]
        taken[source[last]] = output[last]
        last = self.copy_end[copy] == self._place[step]
        copies[copy[last]] = output[last]
        return taken, copies

    def _merge_taken_over(self) -> None:
        """An elementwise operation writes its output where an input lies of which it is the last reader: then that is
        there for as long as the output, which takes nothing."""
        begin, end, lies_in = self.begin.tolist(), self.end.tolist(), self.lies_in.tolist()
        place_of = self._place.tolist()
        for place, output, sources in sorted((place_of[over.step], over.output, over.own) for over in self._steps.over):
            for source in map(lies_in.__getitem__, sources):
                if 0 <= begin[source] < place and end[source] == place:
                    lies_in[output], end[source] = source, end[output]
                    begin[output] = end[output] = -1
                    self.waiting[source] |= self.waiting[output]
                    self._shown[source] |= self._shown[output]
                    break
        self.begin, self.end, self.lies_in = np.array(begin, int), np.array(end, int), np.array(lies_in, int)

    def _overlap(self, in_place: Collection[int]) -> None:
        """Lets all last until the next operation has begun; a gradient, until others have made as many bytes, for its
        update runs beside these; what these steps multiply in its place, as well; and what updates make, until the
        backward pass is over, for an update waits for its gradient, which may wait for other devices that long."""
        step, tensor = self._steps.makes
        after = np.minimum(np.arange(self._steps.count) + 1, self._steps.count - 1)
        made = np.cumsum(np.append(0.0, np.bincount(self._place[step], self._nbytes[tensor], self._steps.count)))
        updating, there = np.zeros(len(self.begin), bool), self.begin >= 0
        updating[tensor[self._steps.is_update[step]]] = True
        of_update, gradient = np.flatnonzero(there & updating), np.flatnonzero(there & ~updating & self.waiting)
        self.end[of_update] = np.maximum(self.end[of_update], self._last_gradient)
        end = self.end[gradient]
        beside = _beside(made, end, self._nbytes[gradient])
        self.end[gradient] = np.minimum(beside, np.maximum(end, self._last_gradient))
        self._linger(in_place, made)
        lasting = np.flatnonzero(there & (self.begin <= self.end))
        self.end[lasting] = after[self.end[lasting]]
        self.copy_end = after[self.copy_end]

    def _linger(self, in_place: Collection[int], made: np.ndarray) -> None:
        """Lets what these steps read be there until others have made as many bytes as the product has."""
        step, source, _ = self._steps.reads
        mine = np.flatnonzero(np.isin(step, list(in_place)))
        product = np.zeros(self._steps.count)  # as large as the largest that it is made of
        np.maximum.at(product, step[mine], self._nbytes[source[mine]])
        until, root = _beside(made, self._place[step[mine]], product[step[mine]]), self.lies_in[source[mine]]
        there = self.begin[root] >= 0
        np.maximum.at(self.end, root[there], until[there])
        read, copy = self._steps.names
        named = np.isin(read, mine)
        np.maximum.at(self.copy_end, copy[named], until[np.searchsorted(mine, read[named])])

    def _own_until(self) -> np.ndarray:
        """Of every tensor the last place at which its own layer needs it, where all is known of it: what others read
        otherwise than it lies they have as copies."""
        steps = self._steps
        known = (self.begin >= 0) & ~self.waiting & ~steps.of_waiting & ~self._shown
        last = np.where(known, self.begin, -1)
        output = np.flatnonzero(self.lies_in != np.arange(len(last)))
        output = output[known[self.lies_in[output]]]
        np.maximum.at(last, self.lies_in[output], self._maker_place[output] + 1)
        root, layer = self.lies_in[steps.copies.name], np.array(steps.tensors.layer, np.int64)
        own = known[root] & ((steps.copies.layer == layer[root]) | (steps.copies.layer == -1))
        np.maximum.at(last, root[own], self.copy_end[own])
        return np.where(known, np.minimum(last, self.end), -1)


def _beside(made: np.ndarray, end: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
    """The places before others have made so many bytes after `end`; made: how many are made before every place."""
    return np.minimum(np.maximum(np.searchsorted(made, made[end + 1] + nbytes), end + 1) - 1, len(made) - 2)


def _rows(*numbers: int) -> tuple[np.ndarray, ...]:
    return tuple(np.array([number]) for number in numbers)
