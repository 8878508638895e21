"""Bounds by sequential tree-reweighted message passing (TRW-S: Kolmogorov 2006, section 5), on classes instead of
configurations.

Every edge has a potential per row class and per column class, taken from the edge and given to its ends; whatever they
are, the sum of the minima of what is left at every vertex and edge bounds every assignment from below. A pass visits
the vertices in order: a vertex receives all it can from the edges behind it, then sends what its configurations cost
above their minimum (their reduced costs) in equal parts to the edges ahead. A reduced cost is a bound as well: a
configuration whose reduced cost exceeds the gap between the best known assignment and the bound is in no better one,
and is pruned.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pase_mtf.search.budget import Budget
from pase_mtf.search.compiled import compiled, seconds_now
from pase_mtf.search.neighbourhood import improve, lines
from pase_mtf.search.packed import Packed, reduce
from pase_mtf.search.pulls import EXACTLY, Steps, pull, pull_steps
from pase_mtf.search.repeats import Visits, copy_visit, no_visits, visited_alike

__all__ = ["PassResult", "PassState", "message_passes", "promising", "prune", "reduced_costs"]

# Entries of a matrix from where on it pays to look for an edge that has been pulled with the same potentials.
_SHARED = 1 << 12


@compiled
def _add(out: np.ndarray, values: np.ndarray, classes: np.ndarray) -> None:  # pragma: no cover (compiled)
    """Adds to every configuration the value of its class."""
    for k in range(len(out)):
        out[k] += values[classes[k]]


@compiled
def _send_to(theta: np.ndarray, delta: float, share: float, classes: np.ndarray, potentials: np.ndarray,
             least: np.ndarray, grain: float) -> None:  # pragma: no cover (compiled)
    """Moves a share of the reduced costs of a vertex (theta - delta) to an edge, and rounds the edge's potentials up to
    multiples of `grain` (0: as they are): the vertex keeps what that is more, so that its minimum never falls below
    delta, which counts in the bound."""
    for r in range(len(potentials)):
        least[r] = np.inf
    for k in range(len(theta)):
        if theta[k] < least[classes[k]]:
            least[classes[k]] = theta[k]
    for r in range(len(potentials)):
        if least[r] < np.inf:
            potentials[r] -= share * (least[r] - delta)
            if grain > 0.0:
                potentials[r] = grain * np.ceil(potentials[r] / grain)


@compiled
def _active_classes(active: np.ndarray, classes: np.ndarray, used: np.ndarray, listed: np.ndarray
                    ) -> int:  # pragma: no cover (compiled)
    """Lists the classes that some active configuration has. Returns how many."""
    count = 0
    for c in range(len(listed)):
        used[c] = False
    for k in range(len(active)):
        if active[k]:
            used[classes[k]] = True
    for c in range(len(listed)):
        if used[c]:
            listed[count] = c
            count += 1
    return count


class PassState(NamedTuple):
    """What passes of message passing read and change; every array in place.

    Attributes:
      messages: float64 [p.potentials].
      active: bool [configurations]: cleared where a configuration is pruned, as it cannot be part of an assignment that
        matters.
      reduced_costs: float64 [configurations]: how much more than the bound of its vertex every assignment costs that
        holds the configuration.
      bounds: float64 [vertices]: the bound at the moment when the reduced costs of that vertex were found.
      best: int64 [vertices], the best assignment known; replaced when a cheaper one is found.
      kinds: int64 [vertices], which vertices are alike (repeats.vertex_kinds), so that what is visited alike is visited
        once; empty: nobody looks.
    """

    messages: np.ndarray
    active: np.ndarray
    reduced_costs: np.ndarray
    bounds: np.ndarray
    best: np.ndarray
    kinds: np.ndarray

    @classmethod
    def start(cls, p: Packed, messages: np.ndarray) -> PassState:
        """Everything active, nothing known but the messages."""
        return cls(messages, np.ones(len(p.unary), bool), np.zeros(len(p.unary)), np.zeros(p.vertices),
                   np.zeros(p.vertices, np.int64), np.zeros(0, np.int64))


class PassResult(NamedTuple):
    """What passes of message passing found.

    Attributes:
      bound: lower bound of the cost of every assignment.
      cost: of the best assignment known.
      passes: how many were made.
      pulled: matrix entries that were read for it.
    """

    bound: float
    cost: float
    passes: int
    pulled: int


class _Scratch(NamedTuple):
    """Room for intermediate results.

    Attributes:
      least: float64 [classes of an edge's side, at most].
      lifts, sums: uint16, likewise.
      used: bool, likewise.
      listed: int64, likewise.
      minimum: float64 [vertices], the least cost at a vertex when it was last visited.
      choice: int64 [vertices], the configurations that the pass chooses.
      other_used, other_listed, wanted: as `used` and `listed`.
      table: int64 [a power of two, at least twice the edges], a hash table of the edges that have been pulled in this
        sweep; -1 where it is empty. See `_twin`.
      pulled: int64 [1], matrix entries that pulls have read.
    """

    least: np.ndarray
    lifts: np.ndarray
    sums: np.ndarray
    used: np.ndarray
    listed: np.ndarray
    minimum: np.ndarray
    choice: np.ndarray
    other_used: np.ndarray
    other_listed: np.ndarray
    wanted: np.ndarray
    table: np.ndarray
    pulled: np.ndarray


@compiled
def _scratch(p: Packed) -> _Scratch:  # pragma: no cover (compiled)
    widest = 1
    for e in range(len(p.matrix)):
        widest = max(widest, p.extents[0, e], p.extents[1, e])
    vertices = len(p.first) - 1
    choice = np.empty(vertices, np.int64)  # for vertices that no pass comes to in time
    for v in range(vertices):
        choice[v] = np.argmin(p.unary[p.first[v]:p.first[v + 1]])
    places = 2
    while places < 2 * len(p.matrix):
        places *= 2
    return _Scratch(np.empty(widest), np.empty(widest, np.uint16), np.empty(widest, np.uint16),
                    np.zeros(widest, np.bool_), np.empty(widest, np.int64), np.zeros(vertices), choice,
                    np.zeros(widest, np.bool_), np.empty(widest, np.int64), np.empty(widest, np.int64),
                    np.full(places, -1), np.zeros(1, np.int64))


@compiled
def _hash(start: int, given: np.ndarray, listed: np.ndarray) -> np.int64:  # pragma: no cover (compiled)
    """Of a matrix, by where it begins, and of the listed entries of the potentials of one side."""
    found, bits = np.uint64(start), given.view(np.uint64)
    for c in listed:
        found = (found ^ bits[c] ^ (np.uint64(c) << np.uint64(48))) * np.uint64(0x9E3779B97F4A7C15)
        found ^= found >> np.uint64(29)
    return np.int64(found >> np.uint64(1))


@compiled
def _pulled_alike(p: Packed, state: PassState, scratch: _Scratch, e: int, other: int, side: int, exactly: bool
                  ) -> bool:  # pragma: no cover (compiled)
    """Whether two edges have one matrix and equal potentials of their other sides, in the classes that count: those in
    scratch.used, or with `exactly` all."""
    if p.matrix[other] != p.matrix[e] or p.extents[0, other] != p.extents[0, e] or (
            p.extents[1, other] != p.extents[1, e]):
        return False
    size, far = p.extents[1 - side, e], 1 - side
    given, others = p.potentials_at[far, e], p.potentials_at[far, other]
    u = p.ends[far, other]
    if not exactly:
        _active_classes(state.active[p.first[u]:p.first[u + 1]], p.classes[p.classes_at[far, other]:],
                        scratch.other_used, scratch.other_listed[:size])
    for c in range(size):
        if not exactly and scratch.used[c] != scratch.other_used[c]:
            return False
        if (exactly or scratch.used[c]) and state.messages[given + c] != state.messages[others + c]:
            return False
    return True


@compiled
def _twin(p: Packed, state: PassState, scratch: _Scratch, e: int, side: int, listed: np.ndarray, exactly: bool
          ) -> np.int64:  # pragma: no cover (compiled)
    """An edge that has been pulled alike in this sweep, or -1; then this one is put into the table.

    The potentials of both sides of an edge stay as they are until the next sweep, and so do the active configurations
    of its other end: nothing else has to be remembered.
    """
    far = p.potentials_at[1 - side, e]
    mask = len(scratch.table) - 1
    place = _hash(p.matrix[e], state.messages[far:far + p.extents[1 - side, e]], listed) & mask
    while scratch.table[place] >= 0:
        if _pulled_alike(p, state, scratch, e, scratch.table[place], side, exactly):
            return np.int64(scratch.table[place])
        place = (place + 1) & mask
    scratch.table[place] = e
    return np.int64(-1)


@compiled
def _receive(p: Packed, steps: Steps, state: PassState, scratch: _Scratch, e: int, side: int, narrow: bool
             ) -> None:  # pragma: no cover (compiled)
    """Sets the potentials of one side of an edge to all that the edge can give; to be narrow, in steps, of its rows
    only those of active configurations, which then are no other edge's."""
    place, other = p.potentials_at[side, e], p.potentials_at[1 - side, e]
    given = state.messages[other:other + p.extents[1 - side, e]]
    taken = state.messages[place:place + p.extents[side, e]]
    begin, end = p.matrix[e], p.matrix[e] + p.extents[0, e] * p.extents[1, e]
    exactly, count = len(steps.counts) == 0, len(given)
    if not exactly:
        u = p.ends[1 - side, e]
        count = _active_classes(state.active[p.first[u]:p.first[u + 1]], p.classes[p.classes_at[1 - side, e]:],
                                scratch.used, scratch.listed[:len(given)])
    wanted = scratch.wanted[:len(taken)]
    if narrow and side == 0 and not exactly:
        v = p.ends[0, e]
        wanted = wanted[:_active_classes(state.active[p.first[v]:p.first[v + 1]], p.classes[p.classes_at[0, e]:],
                                         scratch.other_used, wanted)]
    elif end - begin >= _SHARED:
        if exactly:
            for c in range(count):
                scratch.listed[c] = c
        twin = _twin(p, state, scratch, e, side, scratch.listed[:count], exactly)
        if twin >= 0:
            taken[:] = state.messages[p.potentials_at[side, twin]:p.potentials_at[side, twin] + len(taken)]
            return
    scratch.pulled[0] += count * len(wanted)
    if exactly:
        pull(p.values[begin:end], given, taken, side == 0)
        return
    if len(wanted) == len(taken):
        for c in range(len(wanted)):
            wanted[c] = c
    pull_steps(steps, begin, given, scratch.listed[:count], taken, wanted, side == 0, scratch.lifts[:len(given)],
               scratch.sums[:len(taken)])


@compiled
def _collect(p: Packed, steps: Steps, state: PassState, scratch: _Scratch, v: int, behind: int,
             theta: np.ndarray, score: np.ndarray, decode: bool, narrow: bool) -> None:  # pragma: no cover (compiled)
    """Receives from the edges behind a vertex, and adds up what its configurations cost: with the potentials of all its
    edges (theta); to decode, with the choices made behind it and the potentials of the edges ahead (score)."""
    if decode:
        lines(p, v, behind, scratch.choice, score)
    for side in range(2):
        for position in range(p.adjacent_at[side, v], p.adjacent_at[side, v + 1]):
            e = p.adjacent[side, position]
            if side == behind:
                _receive(p, steps, state, scratch, e, side, narrow)
            potentials = state.messages[p.potentials_at[side, e]:p.potentials_at[side, e] + p.extents[side, e]]
            own = p.classes[p.classes_at[side, e]:p.classes_at[side, e] + len(theta)]
            _add(theta, potentials, own)
            if decode and side != behind:
                _add(score, potentials, own)


@compiled
def _decide(theta: np.ndarray, score: np.ndarray, active: np.ndarray, exactly: bool
            ) -> tuple[float, int]:  # pragma: no cover (compiled)
    """The least entry of theta, and the configuration of the best score; without `exactly`, among the active."""
    delta, pick, lowest = np.inf, 0, np.inf
    for k in range(len(theta)):
        if exactly or active[k]:
            delta = min(delta, theta[k])
            if score[k] < lowest:
                lowest, pick = score[k], k
    return delta, pick


@compiled
def _prune_rough(theta: np.ndarray, delta: float, room: float, active: np.ndarray) -> None:  # pragma: no cover
    """Prunes configurations of one vertex whose reduced cost is above `room`, and makes all inactive ones infinite.
    Never the last one: where nothing cheaper can be, the bound says so."""
    for k in range(len(theta)):
        if theta[k] > delta and theta[k] - delta > room:
            active[k] = False
        if not active[k]:
            theta[k] = np.inf


@compiled
def prune(p: Packed, state: PassState, most: float, alike: bool) -> None:  # pragma: no cover (compiled)
    """Prunes the configurations that are only in assignments that cost more than `most`; with `alike`, by one bound for
    all vertices: where layers repeat, they go on repeating."""
    least = np.inf
    for bound in state.bounds:
        least = min(least, bound)
    for v in range(len(p.first) - 1):
        room = most - (least if alike else state.bounds[v])
        for position in range(p.first[v], p.first[v + 1]):
            if state.reduced_costs[position] > room:
                state.active[position] = False


@compiled
def promising(first: np.ndarray, active: np.ndarray, reduced_costs: np.ndarray, count: int
               ) -> np.ndarray:  # pragma: no cover (compiled)
    """bool [configurations]: so many per vertex, those of the least reduced costs, active ones first."""
    found, best, least = np.zeros(len(active), np.bool_), np.empty(count, np.int64), np.empty(count)
    for v in range(len(first) - 1):
        kept = 0
        for position in range(first[v], first[v + 1]):
            value = reduced_costs[position] if active[position] else np.inf
            if kept == count and not value < least[kept - 1]:
                continue
            kept = min(kept + 1, count)
            place = kept - 1
            while place > 0 and value < least[place - 1]:
                best[place], least[place] = best[place - 1], least[place - 1]
                place -= 1
            best[place], least[place] = position, value
        for place in range(kept):
            found[best[place]] = True
    return found


@compiled
def _send(p: Packed, state: PassState, least: np.ndarray, v: int, ahead: int, theta: np.ndarray, delta: float,
          grain: float) -> None:  # pragma: no cover (compiled)
    """Sends the reduced costs of a vertex to the edges ahead, in equal parts."""
    share = 1.0 / max(p.adjacent_at[0, v + 1] - p.adjacent_at[0, v], p.adjacent_at[1, v + 1] - p.adjacent_at[1, v], 1)
    for position in range(p.adjacent_at[ahead, v], p.adjacent_at[ahead, v + 1]):
        e = p.adjacent[ahead, position]
        place, begin = p.potentials_at[ahead, e], p.classes_at[ahead, e]
        _send_to(theta, delta, share, p.classes[begin:begin + len(theta)],
                 state.messages[place:place + p.extents[ahead, e]], least, grain)


@compiled
def _visited(p: Packed, state: PassState, scratch: _Scratch, visits: Visits, v: int, behind: int, exactly: bool,
             before: float, bound: float, most: float) -> bool:  # pragma: no cover (compiled)
    """Copies what a visit of another vertex came to, if this sweep found that as it now finds v, and pruned it by the
    same bound. `bound` is what the sweep has come to without v; for the others see `_sweep`."""
    if len(visits.kinds) == 0:
        return False
    twin = visited_alike(p, visits, state.messages, state.active, v, behind, exactly)
    if twin < 0 or (not exactly and most < np.inf and min(before, bound + scratch.minimum[twin]) != min(
            before, state.bounds[twin])):
        return False
    copy_visit(p, state.messages, state.active, state.reduced_costs, v, twin, exactly)
    scratch.minimum[v], scratch.choice[v] = scratch.minimum[twin], scratch.choice[twin]
    return True


@compiled
def _sweep(p: Packed, steps: Steps, state: PassState, scratch: _Scratch, visits: Visits, behind: int, most: float,
           end: float, grain: float, decode: bool) -> tuple[float, bool]:  # pragma: no cover (compiled)
    """Visits every vertex once, in the order in which its edges at the side `behind` come first. Returns the bound, and
    whether all were visited before the clock showed `end`.

    Passes in steps prune at once: what is only in assignments that cost more than `most`. Without `decode` every vertex
    chooses what costs it least, whatever was chosen behind it.
    """
    vertices, exactly = len(p.first) - 1, len(steps.counts) == 0
    running, rest = p.constant, scratch.minimum.sum()
    # Where layers repeat, they are pruned by the bound before the sweep: one like the other.
    before = running + rest if grain > 0.0 else np.inf
    scratch.table[:] = -1
    visits.table[:] = -1
    for step in range(vertices):
        if end < np.inf and seconds_now() > end:
            return running + rest, False
        v = step if behind == 1 else vertices - 1 - step
        rest -= scratch.minimum[v]
        if _visited(p, state, scratch, visits, v, behind, exactly, before, running + rest, most):
            running += scratch.minimum[v]
            state.bounds[v] = running + rest
            continue
        theta = p.unary[p.first[v]:p.first[v + 1]].copy()
        score = theta.copy() if decode else theta
        _collect(p, steps, state, scratch, v, behind, theta, score, decode, grain == 0.0)
        active = state.active[p.first[v]:p.first[v + 1]]
        delta, pick = _decide(theta, score, active, exactly)
        scratch.choice[v] = pick
        running += delta
        scratch.minimum[v] = delta
        state.bounds[v] = running + rest
        for k in range(len(theta)):
            state.reduced_costs[p.first[v] + k] = theta[k] - delta
        if not exactly:
            _prune_rough(theta, delta, most - min(before, state.bounds[v]), active)
        # Whole steps are pulled without any loss: what is least anywhere stays as it is.
        _send(p, state, scratch.least, v, 1 - behind, theta, delta, grain if exactly else max(grain, steps.step))
    return running, True


@compiled
def message_passes(p: Packed, steps: Steps, state: PassState, best_cost: float, margin: float, enough: float,
                   passes: int, seconds: float = np.inf, grain: float = 0.0, sweeps: int = 2
                   ) -> PassResult:  # pragma: no cover (compiled)
    """Runs passes there and back.

    Args:
      p: the network; every entry of every domain can be part of a finite assignment of each edge (see packed.reduce).
      steps: EXACTLY, or `in_steps` for large networks: potentials are then whole steps, and the bound is that of the
        active configurations (not of the whole network).
      state: changed in place. Configurations are pruned that no assignment cheaper than best_cost + margin holds.
      best_cost: the cost of `state.best` (inf: none known).
      margin: how much cheaper than best_cost an assignment must be to matter: negative, or 0.
      enough: stop once best_cost - bound is at most this.
      passes: at most so many.
      seconds: stop in the middle of a pass after so many. A first pass that is not finished has no bound (-inf).
      grain: what the potentials are rounded up to multiples of as they are sent (0: not at all). Where layers repeat,
        rounded ones soon repeat too, and what repeats is computed once; the bound holds, but is lower for it.
      sweeps: of `improve`, for what every pass chooses; 0 where nobody looks at that: what it chooses is then poor.
    """
    end = seconds_now() + seconds
    scratch = _scratch(p)
    visits = no_visits(p, state.kinds if sweeps == 0 else state.kinds[:0])
    bound, known, made = -np.inf, False, 0
    for half in range(2 * passes):
        # The side at which a vertex stands on the edges behind it, and on those ahead.
        behind, ahead = 1 - half % 2, half % 2
        most = best_cost + margin if known else np.inf
        running, finished = _sweep(p, steps, state, scratch, visits, behind, most, end, grain, sweeps > 0)
        cost = improve(p, scratch.choice, sweeps * ahead if finished else 1)
        if cost < best_cost:
            best_cost = cost
            state.best[:] = scratch.choice
        if not finished:
            bound = max(bound, running) if known else bound
            break
        if known and len(steps.counts) == 0:
            prune(p, state, best_cost + margin, False)
        bound, known = max(bound, running), True
        made += ahead
        if best_cost - bound <= enough:
            break
    return PassResult(bound, best_cost, made, scratch.pulled[0])


def reduced_costs(p: Packed, passes: int = 6, budget: Budget | None = None) -> tuple[float, np.ndarray]:
    """How expensive every configuration makes an assignment.

    Args:
      p: the network.
      passes: of message passing.
      budget: time and memory that it may take; no limit if not given.

    Returns:
      a lower bound, and float64 [configurations], how much more than it every assignment costs that holds the
      configuration (inf: it is in no finite one).

    Raises:
      InfeasibleError: no finite assignment can exist.
      TimeoutError, MemoryError: the budget is not enough.
    """
    budget = budget or Budget(memory=np.inf)
    network, messages, *_ = reduce(p, np.ones(len(p.unary), bool), budget=budget)
    state = PassState.start(network, messages)
    first = message_passes(network, EXACTLY, state, np.inf, 0.0, -np.inf, passes, budget.seconds)
    # The reduced costs of a pass are counted from a bound at least as good as that before it.
    last = message_passes(network, EXACTLY, state, np.inf, 0.0, -np.inf, 1, budget.seconds)
    if first.passes + last.passes <= passes:
        raise TimeoutError
    found = np.full(len(p.unary), np.inf)
    owner = np.repeat(np.arange(network.vertices), network.domains)
    found[p.first[owner] + network.original] = state.reduced_costs
    return first.bound, found
