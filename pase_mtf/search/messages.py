"""Bounds by sequential tree-reweighted message passing (TRW-S: Kolmogorov 2006, section 5), on classes instead of
configurations.

Every edge has a potential per row class and per column class, taken from the edge and given to its ends; whatever they
are, the sum of the minima of the remainders at every vertex and edge bounds every assignment from below. A pass visits
the vertices in order: a vertex receives all it can from the edges behind it, then sends what its configurations cost
above their minimum (their reduced costs) in equal parts to the edges ahead. A reduced cost is a bound as well: a
configuration whose reduced cost exceeds the gap between the best known assignment and the bound is in no better one,
and is pruned.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pase_mtf.search.budget import Budget, DoesNotFitError
from pase_mtf.search.compiled import compiled, seconds_now
from pase_mtf.search.neighbourhood import improve, lines
from pase_mtf.search.packed import Packed, Potentials, reduce
from pase_mtf.search.pass_state import PassState, prune, set_flags
from pase_mtf.search.pulls import EXACTLY, Steps, pull, pull_steps
from pase_mtf.search.repeats import (
    Seen,
    copy_visit,
    forget,
    nothing_seen,
    pulled_alike,
    share_flags,
    share_messages,
    undo,
    visited_alike,
)

__all__ = ["PassResult", "message_passes", "reduced_costs"]

# Entries of a matrix from where on it pays to look for an edge that has been pulled with the same potentials.
_SHARED = 1 << 12
# By how many grains potentials may be rounded up to what was sent before.
_HELD = 4.0


@compiled(allocates=False)
def _add(out: np.ndarray, values: np.ndarray, classes: np.ndarray, some: np.ndarray
         ) -> None:  # pragma: no cover (compiled)
    """Adds to some configurations (ascending) the value of their class."""
    if len(some) == len(classes):
        for k in range(len(out)):
            out[k] += values[np.uint32(classes[k])]  # an unsigned index is never counted from the end
    else:
        for k in range(len(out)):
            out[k] += values[np.uint32(classes[some[k]])]


@compiled(allocates=False)
def _send_to(theta: np.ndarray, delta: float, share: float, classes: np.ndarray, some: np.ndarray, found: np.ndarray,
             sent: np.ndarray, least: np.ndarray, grain: float, latest: np.ndarray
             ) -> None:  # pragma: no cover (compiled)
    """Moves a share of the reduced costs of some configurations of a vertex (theta - delta) to an edge, whose
    potentials are `found` before and `sent` afterwards. These are rounded up: to what was sent the latest along an edge
    like it, where that is a few grains away, so that little changes end somewhere; else to multiples of `grain` (0: not
    at all). The vertex keeps what that is more, so that its minimum never falls below delta, which counts in the
    bound."""
    for r in range(len(found)):
        least[r] = np.inf
    for k in range(len(theta)):
        c = np.uint32(classes[k if len(some) == len(classes) else some[k]])
        least[c] = min(least[c], theta[k])
    per_grain = 1.0 / grain if grain > 0.0 else 0.0  # that is a power of two
    for r in range(len(found)):
        left = found[r] - share * (least[r] - delta)
        rounded = grain * np.ceil(left * per_grain) if grain > 0.0 else left
        if len(latest):
            rounded = latest[r] if left <= latest[r] < left + _HELD * grain else rounded
        sent[r] = rounded if least[r] < np.inf else found[r]


@compiled(allocates=False)
def _active_classes(active: np.ndarray, classes: np.ndarray, used: np.ndarray, listed: np.ndarray
                    ) -> int:  # pragma: no cover (compiled)
    """Lists the classes that some active configuration has. Returns how many."""
    used[:len(listed)] = False
    for k in range(len(active)):
        if active[k]:
            used[np.uint32(classes[k])] = True
    count = 0
    for c in range(len(listed)):
        listed[count] = c
        count += used[c]
    return count


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
      theta, score: float64 [most configurations of a vertex].
      some: int64, likewise.
      flags: bool, likewise.
      choice: int64 [vertices], the configurations that the pass chooses.
      other_used, wanted: as `used` and `listed`.
      pulled: int64 [1], matrix entries that pulls have read.
    """

    least: np.ndarray
    lifts: np.ndarray
    sums: np.ndarray
    used: np.ndarray
    listed: np.ndarray
    theta: np.ndarray
    score: np.ndarray
    some: np.ndarray
    flags: np.ndarray
    choice: np.ndarray
    other_used: np.ndarray
    wanted: np.ndarray
    pulled: np.ndarray


@compiled
def _scratch(p: Packed) -> _Scratch:  # pragma: no cover (compiled)
    widest = 1
    for e in range(len(p.matrix)):
        widest = max(widest, p.extents[0, e], p.extents[1, e])
    vertices, most = len(p.first) - 1, 0
    choice = np.full(vertices, -1)  # where no pass comes to a vertex in time
    for v in range(vertices):
        most = max(most, p.first[v + 1] - p.first[v])
    return _Scratch(np.empty(widest), np.empty(widest, np.uint16), np.empty(widest, np.uint16),
                    np.zeros(widest, np.bool_), np.empty(widest, np.int64), np.empty(most), np.empty(most),
                    np.empty(most, np.int64), np.empty(most, np.bool_), choice,
                    np.zeros(widest, np.bool_), np.empty(widest, np.int64), np.zeros(1, np.int64))


@compiled(inline=True)
def _flags(p: Packed, state: PassState, v: int) -> np.ndarray:  # pragma: no cover (compiled)
    """Which configurations of a vertex are active."""
    flags: np.ndarray = state.active[state.active_at[v]:state.active_at[v] + p.first[v + 1] - p.first[v]]
    return flags


@compiled(allocates=False)
def _look_at(active: np.ndarray, everything: bool, some: np.ndarray) -> int:  # pragma: no cover (compiled)
    """Lists the configurations of a vertex that a visit looks at: those that are active, or all. Returns how many."""
    count = 0
    for k in range(len(active)):
        some[count] = k
        count += everything or active[k]
    return count


@compiled(inline=True)
def _classes(p: Packed, e: int, side: int) -> np.ndarray:  # pragma: no cover (compiled)
    """The classes of the configurations of an end of an edge."""
    v, begin = p.ends[side, e], p.classes_at[side, e]
    own: np.ndarray = p.classes[begin:begin + p.first[v + 1] - p.first[v]]
    return own


@compiled(allocates=False)
def _receive(p: Packed, steps: Steps, state: PassState, scratch: _Scratch, seen: Seen, e: int, side: int, narrow: bool
             ) -> None:  # pragma: no cover (compiled)
    """Sets the potentials of one side of an edge to all that the edge can give; to be narrow, in steps, of its rows
    only those of active configurations, which then are no other edge's."""
    place, before = state.halves[0] * p.potentials + p.potentials_at[side, e], state.messages_at[side, e]
    other, exactly = state.messages_at[1 - side, e], len(steps.counts) == 0
    given = state.messages[other:other + p.extents[1 - side, e]]
    taken = state.messages[place:place + p.extents[side, e]]
    begin, end = p.matrix[e], p.matrix[e] + p.extents[0, e] * p.extents[1, e]
    state.messages_at[side, e] = place
    wanted = scratch.wanted[:len(taken)]
    if narrow and side == 0 and not exactly:
        for r in range(len(taken)):
            taken[r] = state.messages[before + r]
        wanted = wanted[:_active_classes(_flags(p, state, p.ends[0, e]), p.classes[p.classes_at[0, e]:],
                                         scratch.other_used, wanted)]
    elif end - begin >= _SHARED:
        twin = pulled_alike(p, state, seen, e, side, exactly)
        if twin >= 0:
            state.messages_at[side, e] = state.messages_at[side, twin]
            return
    if exactly:
        scratch.pulled[0] += end - begin
        pull(p.values[begin:end], given, taken, side == 0)
    else:
        count = _active_classes(_flags(p, state, p.ends[1 - side, e]), p.classes[p.classes_at[1 - side, e]:],
                                scratch.used, scratch.listed[:len(given)])
        if len(wanted) == len(taken):
            for c in range(len(wanted)):
                wanted[c] = c
        scratch.pulled[0] += pull_steps(
            steps, begin, steps.kind[e], given, scratch.listed[:count], taken, wanted, side == 0,
            scratch.lifts[:len(given)], scratch.sums[:len(taken)])
    if len(seen.kinds):
        share_messages(p, state, seen, e, side)


@compiled(allocates=False)
def _collect(p: Packed, steps: Steps, state: PassState, scratch: _Scratch, seen: Seen, v: int, behind: int,
             some: np.ndarray, theta: np.ndarray, score: np.ndarray, decode: bool, narrow: bool
             ) -> None:  # pragma: no cover (compiled)
    """Receives from the edges behind a vertex, and adds up what some of its configurations cost: with the potentials of
    all its edges (theta); to decode, with the choices made behind it and the potentials of the edges ahead (score)."""
    if decode:
        for k in range(len(some)):
            score[k] = p.unary[p.first[v] + some[k]]
        lines(p, v, behind, scratch.choice, some, score)
    for side in range(2):
        for position in range(p.adjacent_at[side, v], p.adjacent_at[side, v + 1]):
            e = p.adjacent[side, position]
            if side == behind:
                _receive(p, steps, state, scratch, seen, e, side, narrow)
            at = state.messages_at[side, e]
            potentials = state.messages[at:at + p.extents[side, e]]
            own = _classes(p, e, side)
            _add(theta, potentials, own, some)
            if decode and side != behind:
                _add(score, potentials, own, some)


@compiled(allocates=False)
def _decide(theta: np.ndarray, score: np.ndarray) -> tuple[float, int]:  # pragma: no cover (compiled)
    """The least entry of theta, and where the best score is."""
    delta, pick, lowest = np.inf, 0, np.inf
    for k in range(len(theta)):
        delta = min(delta, theta[k])
        if score[k] < lowest:
            lowest, pick = score[k], k
    return delta, pick


@compiled(allocates=False)
def _prune_rough(some: np.ndarray, theta: np.ndarray, delta: float, room: float, active: np.ndarray
                 ) -> None:  # pragma: no cover (compiled)
    """Prunes those of the active configurations of a vertex whose reduced cost is above `room`, and makes them
    infinite. Never the last one: where nothing cheaper can be, the bound says so."""
    for k in range(len(theta)):
        if theta[k] > delta and theta[k] - delta > room:
            active[some[k]] = False
            theta[k] = np.inf


@compiled(allocates=False)
def _send(p: Packed, state: PassState, seen: Seen, least: np.ndarray, v: int, ahead: int, some: np.ndarray,
          theta: np.ndarray, delta: float, grain: float, step: float) -> None:  # pragma: no cover (compiled)
    """Sends the reduced costs of some configurations of a vertex to the edges ahead, in equal parts, rounded to grains
    or to steps."""
    share = 1.0 / max(p.adjacent_at[0, v + 1] - p.adjacent_at[0, v], p.adjacent_at[1, v + 1] - p.adjacent_at[1, v], 1)
    for number in range(p.adjacent_at[ahead, v + 1] - p.adjacent_at[ahead, v]):
        e = p.adjacent[ahead, p.adjacent_at[ahead, v] + number]
        size, at = p.extents[ahead, e], state.messages_at[ahead, e]
        place, latest = state.halves[0] * p.potentials + p.potentials_at[ahead, e], state.messages[:0]
        if len(seen.kinds) and grain > 0.0:
            like = p.adjacent[ahead, p.adjacent_at[ahead, seen.kinds[v]] + number]
            if seen.latest[like] >= 0:
                begin = state.messages_at[ahead, seen.latest[like]]
                latest = state.messages[begin:begin + size]
            seen.latest[like] = e
        _send_to(theta, delta, share, _classes(p, e, ahead), some, state.messages[at:at + size],
                 state.messages[place:place + size], least, max(grain, step), latest)
        state.messages_at[ahead, e] = place
        if len(seen.kinds) or size * p.extents[1 - ahead, e] >= _SHARED:
            share_messages(p, state, seen, e, ahead)


@compiled(allocates=False)
def _visited(p: Packed, state: PassState, scratch: _Scratch, seen: Seen, v: int, behind: int, exactly: bool,
             before: float, bound: float, most: float) -> bool:  # pragma: no cover (compiled)
    """Copies what a visit of another vertex came to, if this sweep found that as it now finds v, and pruned it by the
    same bound. `bound` is what the sweep has come to without v; for the others see `_sweep`."""
    if len(seen.kinds) == 0:
        return False
    twin = visited_alike(p, state, seen, v, behind, exactly)
    if twin < 0 or (not exactly and most < np.inf and min(before, bound + state.minimum[twin]) != min(
            before, state.bounds[twin])):
        return False
    copy_visit(p, state, v, twin, exactly)
    state.minimum[v], scratch.choice[v] = state.minimum[twin], scratch.choice[twin]
    return True


@compiled(allocates=False)
def _sweep(p: Packed, steps: Steps, state: PassState, scratch: _Scratch, seen: Seen, behind: int, most: float,
           end: float, grain: float, decode: bool) -> tuple[float, bool]:  # pragma: no cover (compiled)
    """Visits every vertex once, in the order in which its edges at the side `behind` come first. Returns the bound, and
    whether all were visited before the clock showed `end`; if not, the state is that before the sweep.

    Passes in steps prune at once: what is only in assignments that cost more than `most`. Without `decode` every vertex
    chooses what costs it least, whatever was chosen behind it.
    """
    vertices, exactly = len(p.first) - 1, len(steps.counts) == 0
    running, rest = p.constant, state.minimum.sum()
    # Where layers repeat, they are pruned by the bound before the sweep: one like the other.
    before = running + rest if grain > 0.0 else np.inf
    # What is not looked at keeps potentials that a copied visit need not have.
    narrow = grain == 0.0 and len(seen.kinds) == 0
    forget(seen, state)
    for step in range(vertices):
        if end < np.inf and seconds_now() > end:
            undo(seen, state)
            return running + rest, False
        v = step if behind == 1 else vertices - 1 - step
        rest -= state.minimum[v]
        if _visited(p, state, scratch, seen, v, behind, exactly, before, running + rest, most):
            running += state.minimum[v]
            state.bounds[v] = running + rest
            continue
        active = _flags(p, state, v)
        count = _look_at(active, exactly or state.active_at[v] == 0, scratch.some)
        some, theta = scratch.some[:count], scratch.theta[:count]
        for k in range(count):
            theta[k] = p.unary[p.first[v] + some[k]]
        score = scratch.score[:count] if decode else theta
        _collect(p, steps, state, scratch, seen, v, behind, some, theta, score, decode, narrow)
        delta, pick = _decide(theta, score)
        scratch.choice[v] = some[pick] if len(some) else 0
        running += delta
        state.minimum[v] = delta
        state.bounds[v] = running + rest
        state.reduced_at[v] = state.halves[0] * len(p.unary) + p.first[v]
        if len(some) < len(active):
            state.reduced_costs[state.reduced_at[v]:state.reduced_at[v] + len(active)] = np.inf
        for k in range(len(theta)):
            state.reduced_costs[state.reduced_at[v] + some[k]] = theta[k] - delta
        if not exactly:
            flags = scratch.flags[:len(active)]
            for k in range(len(flags)):
                flags[k] = active[k]
            _prune_rough(some, theta, delta, most - min(before, state.bounds[v]), flags)
            set_flags(p, state, v, flags)
            share_flags(p, state, seen, v)
        # Whole steps are pulled without any loss: what is least anywhere stays as it is.
        _send(p, state, seen, scratch.least, v, 1 - behind, some, theta, delta, grain, 0.0 if exactly else steps.step)
    state.halves[0] = 1 - state.halves[0]
    if not exactly:
        state.halves[1] = 1 - state.halves[1]
    return running, True


@compiled
def message_passes(p: Packed, steps: Steps, state: PassState, best_cost: float, margin: float, enough: float,
                   passes: int, seconds: float, grain: float, sweeps: int
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
    # What is chosen for the sake of what was chosen before depends on more than what is compared.
    seen = nothing_seen(p, state.kinds if sweeps == 0 else state.kinds[:0])
    everything = np.ones(len(p.unary) if sweeps else 0, np.bool_)
    bound, known, made = -np.inf, not np.isnan(state.minimum.sum()), 0
    if not known:
        state.minimum[:] = 0.0
    for half in range(2 * passes):
        # The side at which a vertex stands on the edges behind it, and on those ahead.
        behind, ahead = 1 - half % 2, half % 2
        most = best_cost + margin if known else np.inf
        running, finished = _sweep(p, steps, state, scratch, seen, behind, most, end, grain, sweeps > 0)
        if not finished:  # what is cut off is improved on once among all, whoever looks at it
            for v in range(len(p.first) - 1):
                if scratch.choice[v] < 0:
                    scratch.choice[v] = np.argmin(p.unary[p.first[v]:p.first[v + 1]])
            everything = np.ones(len(p.unary), np.bool_)
        cost = improve(p, scratch.choice, sweeps * ahead if finished else 1, everything)
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
    if not known:
        state.minimum[:] = np.nan
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
    try:
        network, messages, *_ = reduce(p, np.ones(len(p.unary), bool), budget=budget)
    except DoesNotFitError:
        if p.values.max() == np.inf:
            raise
        network, messages = p, Potentials.none(p)  # only vertices forbid anything: see Minimiser
    state = PassState.start(network, messages)
    first = message_passes(network, EXACTLY, state, np.inf, 0.0, -np.inf, passes, budget.seconds, 0.0, 2)
    # The reduced costs of a pass are counted from a bound at least as good as that before it.
    last = message_passes(network, EXACTLY, state, np.inf, 0.0, -np.inf, 1, budget.seconds, 0.0, 2)
    if first.passes + last.passes <= passes:
        raise TimeoutError
    found = np.full(len(p.unary), np.inf)
    owner = np.repeat(np.arange(network.vertices), network.domains)
    found[p.first[owner] + network.original] = state.costs(network)
    return first.bound, found
