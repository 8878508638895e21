"""What passes of message passing know of a network, and what can be told from that.

Where layers repeat, so do potentials, configurations that are active, and reduced costs: whoever has equal ones points
to the same place. That place is where the first of them would have its own, in one of two halves of an array: a sweep
reads what the last one wrote in the one half, and writes to the other.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pase_mtf.search.compiled import compiled
from pase_mtf.search.packed import Packed, Potentials

__all__ = ["PassState", "active_domains", "cheap", "count_below", "promising", "prune", "set_flags"]


class PassState(NamedTuple):
    """What passes of message passing read and change; every array in place.

    Attributes:
      messages: float64 [2 * potentials]: the potentials, in either half those of edge ends that have no equal before
        them where `potentials_at` says.
      messages_at: int64 [2, edges], where those of an edge's end begin.
      active: bool [most configurations of a vertex + 2 * configurations]: cleared where a configuration is pruned, as
        it cannot be part of an assignment that matters. Begins with as many that are set as any vertex can have, which
        stay; then the two halves.
      active_at: int64 [vertices], where those of a vertex begin.
      reduced_costs: float64 [2 * configurations]: how much more than the bound of its vertex every assignment costs
        that holds the configuration.
      reduced_at: int64 [vertices], where those of a vertex begin.
      bounds: float64 [vertices]: the bound at the moment when the reduced costs of that vertex were found.
      minimum: float64 [vertices]: the least cost at the vertex when it was last visited; with the network's constant,
        they add up to a bound. NaN before the first sweep.
      best: int64 [vertices], the best assignment known; replaced when a cheaper one is found.
      kinds: int64 [vertices], which vertices are alike (repeats.vertex_kinds), so that what is visited alike is visited
        once; empty: nobody looks.
      halves: int64 [2], where messages and reduced costs are written to next, and where active flags.
    """

    messages: np.ndarray
    messages_at: np.ndarray
    active: np.ndarray
    active_at: np.ndarray
    reduced_costs: np.ndarray
    reduced_at: np.ndarray
    bounds: np.ndarray
    minimum: np.ndarray
    best: np.ndarray
    kinds: np.ndarray
    halves: np.ndarray

    @classmethod
    def start(cls, p: Packed, messages: Potentials, costs: np.ndarray | None = None,
              bounds: np.ndarray | None = None) -> PassState:
        """Everything active, nothing known but the messages; and, if given, reduced costs and their bounds.

        The messages lie in one half, as `messages.laid_out` and `reduce` leave them: the first pass writes the other.
        """
        configurations, widest = len(p.unary), int(p.domains.max(initial=0))
        room = np.empty(2 * p.potentials)  # memory that is never written to costs nothing
        room[:len(messages.values)] = messages.values
        active = np.empty(widest + 2 * configurations, bool)
        active[:widest] = True
        reduced = np.empty(2 * configurations)
        reduced[:widest if costs is None else configurations] = 0.0 if costs is None else costs
        return cls(room, messages.at.copy(), active, np.zeros(p.vertices, np.int64), reduced,
                   np.zeros(p.vertices, np.int64) if costs is None else p.first[:-1].copy(),
                   np.zeros(p.vertices) if bounds is None else bounds, np.full(p.vertices, np.nan),
                   np.zeros(p.vertices, np.int64), np.zeros(0, np.int64), np.array([1, 0]))

    @property
    def potentials(self) -> Potentials:
        """The messages as potentials; not copied."""
        return Potentials(self.messages, self.messages_at)

    def go_on_from(self, p: Packed, messages: Potentials) -> None:
        """Goes on with other potentials, as `laid_out` leaves them; of the bound nothing is known then."""
        half = (1 - self.halves[0]) * p.potentials
        self.messages[half:half + p.potentials] = messages.values
        self.messages_at[:] = half + p.potentials_at
        self.minimum[:] = np.nan

    def forget_pruned(self) -> None:
        """Everything is active again, and nothing known but the messages."""
        self.active_at[:] = 0
        self.bounds[:] = -np.inf  # by which nothing is pruned
        self.minimum[:] = np.nan

    def flags(self, p: Packed) -> np.ndarray:
        """bool [configurations]: those that are active."""
        return _laid_out(p.first, self.active, self.active_at)

    def costs(self, p: Packed) -> np.ndarray:
        """float64 [configurations]: the reduced costs."""
        return _laid_out(p.first, self.reduced_costs, self.reduced_at)


@compiled
def _laid_out(first: np.ndarray, values: np.ndarray, at: np.ndarray) -> np.ndarray:  # pragma: no cover (compiled)
    """What every vertex has, one after another."""
    found = np.empty(first[-1], values.dtype)
    for v in range(len(at)):
        found[first[v]:first[v + 1]] = values[at[v]:at[v] + first[v + 1] - first[v]]
    return found


@compiled
def _first_alike(first: np.ndarray, one: np.ndarray, other: np.ndarray) -> np.ndarray:  # pragma: no cover (compiled)
    """int64 [vertices]: of each the first one with as many configurations and the same two places."""
    places = 2
    while places < 2 * len(one):
        places *= 2
    table, found = np.full(places, -1), np.empty(len(one), np.int64)
    for v in range(len(one)):
        mixed = (np.uint64(one[v]) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(other[v])) * np.uint64(
            0xBF58476D1CE4E5B9)
        place, found[v] = np.int64(mixed >> np.uint64(20)) & (places - 1), v
        while table[place] >= 0:
            u = table[place]
            if one[u] == one[v] and other[u] == other[v] and first[u + 1] - first[u] == first[v + 1] - first[v]:
                found[v] = u
                break
            place = (place + 1) & (places - 1)
        else:
            table[place] = v
    return found


@compiled
def active_domains(first: np.ndarray, active: np.ndarray, active_at: np.ndarray
                   ) -> np.ndarray:  # pragma: no cover (compiled)
    """Active configurations per vertex (see PassState)."""
    found, alike = np.zeros(len(active_at), np.int64), _first_alike(first, active_at, active_at)
    for v in range(len(found)):
        if alike[v] == v:
            found[v] = np.count_nonzero(active[active_at[v]:active_at[v] + first[v + 1] - first[v]])
        else:
            found[v] = found[alike[v]]
    return found


@compiled
def count_below(p: Packed, state: PassState, most: float) -> np.ndarray:  # pragma: no cover (compiled)
    """int64 [vertices]: how many configurations have reduced costs below `most`."""
    found, alike = np.zeros(len(p.first) - 1, np.int64), _first_alike(p.first, state.reduced_at, state.reduced_at)
    for v in range(len(found)):
        if alike[v] == v:
            at = state.reduced_at[v]
            found[v] = np.count_nonzero(state.reduced_costs[at:at + p.first[v + 1] - p.first[v]] < most)
        else:
            found[v] = found[alike[v]]
    return found


@compiled(allocates=False)
def set_flags(p: Packed, state: PassState, v: int, flags: np.ndarray) -> None:  # pragma: no cover (compiled)
    """Gives a vertex a place of its own for its active flags, in the half that is written to, unless all are set."""
    for k in range(len(flags)):
        if not flags[k]:
            break
    else:
        state.active_at[v] = 0
        return
    place = len(state.active) - 2 * p.first[-1] + state.halves[1] * p.first[-1] + p.first[v]
    state.active_at[v] = place
    for k in range(len(flags)):
        state.active[place + k] = flags[k]


@compiled
def prune(p: Packed, state: PassState, most: float, alike: bool) -> None:  # pragma: no cover (compiled)
    """Prunes the configurations that are only in assignments that cost more than `most`; with `alike`, by one bound for
    all vertices: where layers repeat, they go on repeating."""
    least = np.inf
    for bound in state.bounds:
        least = min(least, bound)
    before, like = state.active_at.copy(), np.arange(len(p.first) - 1)
    if alike:
        like = _first_alike(p.first, before, state.reduced_at)
    for v in range(len(p.first) - 1):
        if like[v] != v:
            state.active_at[v] = state.active_at[like[v]]
            continue
        room, size, at = most - (least if alike else state.bounds[v]), p.first[v + 1] - p.first[v], state.reduced_at[v]
        flags = state.active[before[v]:before[v] + size].copy()
        for k in range(size):
            if state.reduced_costs[at + k] > room:
                flags[k] = False
        set_flags(p, state, v, flags)
    state.halves[1] = 1 - state.halves[1]


@compiled
def cheap(p: Packed, state: PassState, most: float) -> np.ndarray:  # pragma: no cover (compiled)
    """bool [configurations]: those whose reduced costs are at most so much."""
    found = np.empty(p.first[-1], np.bool_)
    for v in range(len(p.first) - 1):
        for k in range(p.first[v + 1] - p.first[v]):
            found[p.first[v] + k] = state.reduced_costs[state.reduced_at[v] + k] <= most
    return found


@compiled
def promising(p: Packed, state: PassState, count: int) -> np.ndarray:  # pragma: no cover (compiled)
    """bool [configurations]: so many per vertex, those of the least reduced costs, active ones first."""
    found, best, least = np.zeros(p.first[-1], np.bool_), np.empty((len(p.first) - 1, count), np.int64), np.empty(count)
    kept, alike = np.zeros(len(p.first) - 1, np.int64), _first_alike(p.first, state.active_at, state.reduced_at)
    for v in range(len(p.first) - 1):
        chosen, u = best[alike[v]], alike[v]
        for k in range(p.first[v + 1] - p.first[v] if u == v else 0):
            value = state.reduced_costs[state.reduced_at[v] + k] if state.active[state.active_at[v] + k] else np.inf
            if kept[v] == count and not value < least[count - 1]:
                continue
            kept[v] = min(kept[v] + 1, count)
            place = kept[v] - 1
            while place > 0 and value < least[place - 1]:
                chosen[place], least[place] = chosen[place - 1], least[place - 1]
                place -= 1
            chosen[place], least[place] = k, value
        for place in range(kept[u]):
            found[p.first[v] + chosen[place]] = True
    return found
