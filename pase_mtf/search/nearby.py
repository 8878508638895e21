"""Assignments that hold less at their peak, or cost less within a limit of it, by changes to one layer or to two.

A peak is known of whole assignments alone, and takes long to tell; the sums that are part of it are known of all
changes at once. So changes are tried in the order of what they promise, those alone that keep every sum low enough.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pase_mtf.search.budget import Budget
from pase_mtf.search.network import CostNetwork

__all__ = ["Nearby"]

_Choice = tuple[int, ...]

_TRIES = 200
"""Peaks at most of the changes to one assignment, where none of them is what is sought."""

_ENTRIES = 1 << 22
"""Changes to two layers that are looked at, at most, of one assignment: neighbours come first."""

_KICKED = 3
"""Layers at most that a random change gives another configuration."""


class _Changes(NamedTuple):
    """Changes to the same one or two layers of an assignment, each another entry.

    Attributes:
      layers: which.
      choices: their configurations, an array for each of them.
      costs: of the changed assignments.
    """

    layers: tuple[int, ...]
    choices: tuple[np.ndarray, ...]
    costs: np.ndarray


class Nearby:
    """What is found near assignments of a network, of which each peak is asked for once.

    Attributes:
      peaks: assignment -> (its peak in bytes, the key of the largest sum), of all that were looked at.
      budget: until when changes are tried.
    """

    def __init__(self, network: CostNetwork, memory: Callable[[int], Sequence[np.ndarray]],
                 peak: Callable[[Sequence[int]], tuple[float, int]], most: int,
                 copies: Callable[[Sequence[int], int], Sequence[np.ndarray]] | None = None, seed: int = 0) -> None:
        """Looks at nothing yet.

        Args:
          network: where costs are.
          memory: key of a sum -> per layer, bytes of every configuration.
          peak: assignment -> (its peak in bytes, the key of the sum that is largest).
          most: peaks, after which no changes are tried.
          copies: (assignment, key of a sum) -> what the peak holds beside that sum, estimated: per layer, bytes of
            every configuration were all other layers to stay.
          seed: of random changes.
        """
        self._network, self._memory, self._peak, self._copies = network, memory, peak, copies
        self._most, self._rng, self.budget = most, np.random.default_rng(seed), Budget()
        self.peaks: dict[_Choice, tuple[float, int]] = {}
        self._keys: list[int] = []

    @functools.cached_property
    def _vectors(self) -> tuple[np.ndarray, ...]:
        return self._network.normalized().vectors

    @functools.cached_property
    def _adjacent(self) -> list[dict[int, list[tuple[np.ndarray, np.ndarray, np.ndarray]]]]:
        """Per layer, neighbour -> the edges between them: matrix, its row per configuration, column per other's."""
        found: list[dict[int, list[tuple[np.ndarray, np.ndarray, np.ndarray]]]] = [{} for _ in self._vectors]
        for edge in self._network.normalized().edges:
            ways = ((edge.source, edge.target, edge.matrix, edge.rows, edge.columns),
                    (edge.target, edge.source, edge.matrix.T, edge.columns, edge.rows))
            for one, other, matrix, own, others in ways:
                found[one].setdefault(other, []).append((matrix, own, others))
        return found

    @property
    def over(self) -> bool:
        """Whether no more is looked at: time or peaks are used up."""
        return self.budget.over or len(self.peaks) >= self._most

    def look(self, choice: Sequence[int]) -> tuple[float, int]:
        """The bytes that an assignment holds at its peak, and the key of the sum that is largest then."""
        choice = tuple(map(int, choice))
        if choice not in self.peaks:
            self.peaks[choice] = self._peak(choice)
            if (key := self.peaks[choice][1]) not in self._keys:
                self._keys.append(key)
        return self.peaks[choice]

    def keeps(self, choice: _Choice, limit: float, since: int = 0) -> bool:
        """Whether every sum is within the limit that was ever a largest one; of those since so many were known."""
        return all(self._sum(choice, key) <= limit for key in self._keys[since:])

    def at_least(self, choice: _Choice) -> float:
        """Bytes that an assignment holds at its peak, or at least, where that was not looked at."""
        return self.peaks[choice][0] if choice in self.peaks else max(self._sum(choice, key) for key in self._keys)

    def within(self, choice: _Choice, limit: float) -> _Choice | None:
        """An assignment whose peak is within the limit, by changes that each lower the peak of the one before; None
        where they end above it."""
        while (at := self.look(choice))[0] > limit:
            if self.over:
                return None
            used, key = at
            lower = self._first(choice, np.nextafter(used, 0.0), np.inf, key)
            if lower is None:
                return None
            choice = lower
        return choice

    def cheaper(self, choice: _Choice, limit: float) -> _Choice:
        """An assignment within the limit that no change makes cheaper, as far as they are tried, by changes of one that
        is within it."""
        cost = self._network.cost(choice)
        while not self.over and (found := self._first(choice, limit, cost, None)) is not None:
            less = self._network.cost(found)
            if not less < cost:  # by rounding alone
                break
            choice, cost = found, less
        return choice

    def kicked(self, choice: _Choice) -> _Choice:
        """The assignment with other configurations of some layers, at random, neighbours if there are any."""
        changed, layer = list(choice), int(self._rng.integers(len(choice)))
        for _ in range(int(self._rng.integers(1, _KICKED + 1))):
            possible = np.flatnonzero(np.isfinite(self._around(tuple(changed), layer)))
            if len(possible):
                changed[layer] = int(self._rng.choice(possible))
            around = sorted(self._adjacent[layer])
            layer = int(self._rng.choice(around)) if around else int(self._rng.integers(len(choice)))
        return tuple(changed)

    def _first(self, choice: _Choice, limit: float, cost: float, key: int | None) -> _Choice | None:
        """The first of the changes of an assignment that costs less and whose peak is within the limit: of one layer,
        and where there is none, of two; None where none is found. They are tried in the order of the sum with that key;
        without one, of their costs."""
        for changes in (self._of_one(choice), self._of_two(choice)):
            tries, known = 0, len(self._keys)
            copies = self._copies(choice, key) if self._copies and key is not None else None
            found: list[tuple[float, float, tuple[int, ...], tuple[int, ...]]] = []
            for change in changes:
                few = np.flatnonzero(self._kept(choice, change, limit, cost))
                by = change.costs[few] if key is None else self._added(choice, change, self._memory(key), copies)[few]
                if len(few) > _TRIES:
                    least = np.argpartition(by, _TRIES)[:_TRIES]
                    few, by = few[least], by[least]
                found += zip(by.tolist(), change.costs[few].tolist(), itertools.repeat(change.layers),
                             zip(*(column[few].tolist() for column in change.choices), strict=True))
                if self.over:
                    return None
            for _, _, layers, choices in sorted(found):
                changed = list(choice)
                for layer, new in zip(layers, choices, strict=True):
                    changed[layer] = new
                # Keys that were met since tell more of it.
                if not self.keeps(tuple(changed), limit, known):
                    continue
                if self.look(changed)[0] <= limit:
                    return tuple(changed)
                tries += 1
                if tries == _TRIES or self.over:
                    break
        return None

    def _kept(self, choice: _Choice, change: _Changes, limit: float, cost: float) -> np.ndarray:
        """Which of some changes cost less, and keep every sum within the limit that was ever a largest one."""
        kept = change.costs < cost  # inf: forbidden
        for key in self._keys:
            if not kept.any():
                break
            kept &= self._added(choice, change, self._memory(key)) <= limit
        return kept

    def _sum(self, choice: _Choice, key: int) -> float:
        return float(sum(vector[one] for vector, one in zip(self._memory(key), choice, strict=True)))

    @staticmethod
    def _added(choice: _Choice, change: _Changes, *sums: Sequence[np.ndarray] | None) -> np.ndarray:
        """What some sums add up to, for every change."""
        total = np.float64(0.0)
        for vectors in filter(None, sums):
            total = total + sum(vector[one] for vector, one in zip(vectors, choice, strict=True))
            for layer, choices in zip(change.layers, change.choices, strict=True):
                total = total + (vectors[layer][choices] - vectors[layer][choice[layer]])
        return np.asarray(total)

    def _around(self, choice: _Choice, layer: int, without: int = -1) -> np.ndarray:
        """What the configurations of a layer cost beside those of the others, but for one of these."""
        costs = self._vectors[layer].copy()
        for other, edges in self._adjacent[layer].items():
            if other != without:
                for matrix, own, others in edges:
                    costs += matrix[own, others[choice[other]]]
        return costs

    def _of_one(self, choice: _Choice) -> Iterator[_Changes]:
        total = self._network.cost(choice)
        for layer, vector in enumerate(self._vectors):
            costs = self._around(choice, layer)
            yield _Changes((layer,), (np.arange(len(vector)),), total + (costs - costs[choice[layer]]))

    def _of_two(self, choice: _Choice) -> Iterator[_Changes]:
        total, entries = self._network.cost(choice), 0
        layers = range(len(self._vectors))
        neighbours = ((u, v) for u in layers for v in sorted(self._adjacent[u]) if u < v)
        apart = ((u, v) for u, v in itertools.combinations(layers, 2) if v not in self._adjacent[u])
        for u, v in itertools.chain(neighbours, apart):
            sizes = len(self._vectors[u]), len(self._vectors[v])
            entries += sizes[0] * sizes[1]
            if entries > _ENTRIES:
                return
            costs = self._around(choice, u, v)[:, None] + self._around(choice, v, u)[None, :]
            for matrix, own, others in self._adjacent[u].get(v, ()):
                costs += matrix[own[:, None], others[None, :]]
            costs = total + (costs - costs[choice[u], choice[v]])
            rows, columns = np.divmod(np.arange(costs.size), sizes[1])
            yield _Changes((u, v), (rows, columns), costs.ravel())
