"""A cost network as flat arrays, for compiled code, and its reduction to the configurations that are still
active."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np

from pase_mtf.errors import InfeasibleError
from pase_mtf.search.budget import Budget, DoesNotFitError
from pase_mtf.search.compiled import compiled, seconds_now
from pase_mtf.search.network import CostNetwork

__all__ = ["Packed", "Potentials", "Reduction", "least_of_each", "lift", "pack", "quantum", "reduce", "simple_bound"]


class Packed(NamedTuple):
    """A normalized network in flat arrays.

    Edge e runs from a lower vertex, its side 0 (the rows of its matrix), to a higher one, its side 1 (the columns).
    Arrays of shape [2, edges] hold something per side.

    Attributes:
      first: int64 [vertices + 1], where the configurations of a vertex begin.
      unary: float64 [configurations], their cost.
      original: int32 [configurations], their index in the vertex's original domain.
      values: float64, all matrices, row-major, one after another; edges that are alike point to the same one.
      matrix: int64 [edges], where the edge's matrix begins in `values`.
      ends: int32 [2, edges], the vertices.
      extents: int64 [2, edges], the shape of the matrix.
      classes: int32, all class arrays.
      classes_at: int64 [2, edges], where the classes of the configurations of an end begin in `classes`.
      potentials_at: int64 [2, edges], where the potentials of the classes of an end begin among all.
      potentials: number of potentials.
      adjacent_at: int64 [2, vertices + 1], where the list of edges that have a vertex at that side begins.
      adjacent: int32 [2, edges], those lists.
      constant: cost of what has been decided already.
      least, most: no entry of `unary` and of the matrices is below the one or above the other.
    """

    first: np.ndarray
    unary: np.ndarray
    original: np.ndarray
    values: np.ndarray
    matrix: np.ndarray
    ends: np.ndarray
    extents: np.ndarray
    classes: np.ndarray
    classes_at: np.ndarray
    potentials_at: np.ndarray
    potentials: int
    adjacent_at: np.ndarray
    adjacent: np.ndarray
    constant: float
    least: float
    most: float

    @property
    def vertices(self) -> int:
        """Number of vertices."""
        return len(self.first) - 1

    @property
    def domains(self) -> np.ndarray:
        """Configurations per vertex."""
        return np.diff(self.first)

    @property
    def bytes(self) -> int:
        """Memory that the arrays take."""
        return sum(array.nbytes for array in self if isinstance(array, np.ndarray))

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The ends of every edge."""
        return list(zip(*self.ends.tolist(), strict=True))

    def cost(self, choice: np.ndarray) -> tuple[float, float]:
        """The cost of a configuration (counted in `first`) per vertex, and the sum of the absolute values added."""
        unary = self.unary[self.first[:-1] + choice]
        rows, columns = (self.classes[self.classes_at[side] + choice[self.ends[side]]] for side in (0, 1))
        between = self.values[self.matrix + rows * self.extents[1] + columns]
        return (float(self.constant + unary.sum() + between.sum()),
                float(abs(self.constant) + np.abs(unary).sum() + np.abs(between).sum()))


class Potentials(NamedTuple):
    """What is taken from the edges of a network and given to their ends.

    Attributes:
      values: float64.
      at: int64 [2, edges], where those of the classes of an end begin in `values`; ends may share them.
    """

    values: np.ndarray
    at: np.ndarray

    @classmethod
    def none(cls, p: Packed) -> Potentials:
        """Those that are all 0."""
        return cls(np.zeros(int(p.extents.max(initial=0))), np.zeros_like(p.potentials_at))

    def laid_out(self, p: Packed) -> np.ndarray:
        """float64 [p.potentials]: a copy, each where p.potentials_at says."""
        sizes, at = p.extents.T.ravel(), self.at.T.ravel()
        found: np.ndarray = self.values[np.arange(p.potentials) + np.repeat(at - p.potentials_at.T.ravel(), sizes)]
        return found


def _assemble(first: np.ndarray, unary: np.ndarray, original: np.ndarray, values: np.ndarray, matrix: np.ndarray,
              ends: np.ndarray, extents: np.ndarray, classes: np.ndarray, classes_at: np.ndarray,
              constant: float, extremes: tuple[float, float]) -> Packed:
    vertices, edges = len(first) - 1, len(matrix)
    bounds = np.zeros(2 * edges + 1, np.int64)
    np.cumsum(extents.T.ravel(), out=bounds[1:])
    adjacent_at = np.zeros((2, vertices + 1), np.int64)
    adjacent = np.zeros((2, edges), np.int32)
    for side in (0, 1):
        np.cumsum(np.bincount(ends[side], minlength=vertices), out=adjacent_at[side, 1:])
        adjacent[side] = np.argsort(ends[side], kind="stable")
    return Packed(first, unary, original, values, matrix, ends, extents, classes, classes_at,
                  np.ascontiguousarray(bounds[:-1].reshape(-1, 2).T), int(bounds[-1]), adjacent_at, adjacent,
                  float(constant), *extremes)


@compiled
def _places(first: np.ndarray) -> np.ndarray:  # pragma: no cover (compiled)
    """Of every configuration, its index in its vertex's domain."""
    found = np.empty(first[-1], np.int32)
    for v in range(len(first) - 1):
        for k in range(first[v + 1] - first[v]):
            found[first[v] + k] = k
    return found


def pack(network: CostNetwork) -> Packed:
    """Lays a normalized network out for compiled code. Its values and classes are not copied."""
    arrays = network.arrays
    values, = arrays.values
    return _assemble(
        arrays.first, arrays.unary, _places(arrays.first), values, arrays.matrix_at[arrays.edge_matrix],
        arrays.ends,
        np.ascontiguousarray(arrays.shapes[arrays.edge_matrix].T), arrays.classes,
        arrays.classes_at[arrays.edge_classes], 0.0, network.extremes)


def least_of_each(first: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Which configuration of every vertex costs least by itself: int64 [vertices], counted from its first one.

    Args:
      first: int64 [vertices + 1], where the configurations of a vertex begin.
      costs: float64 [configurations].
    """
    return np.array([int(np.argmin(costs[begin:end])) for begin, end in itertools.pairwise(first.tolist())], np.int64)


def simple_bound(p: Packed) -> float:
    """The least cost of every vertex and of every matrix, added up."""
    matrix, first, number = np.unique(p.matrix, return_index=True, return_inverse=True)
    sizes = p.extents[:, first].prod(axis=0)
    least = np.array([p.values[begin:begin + size].min() for begin, size in zip(
        matrix.tolist(), sizes.tolist(), strict=True)])
    return float(p.constant + np.minimum.reduceat(p.unary, p.first[:-1]).sum() + least[number].sum())


# Entries of all matrices from where on it does not pay to copy a network only to fold vertices.
_LARGE = 1 << 20


@compiled
def _supported(edge: np.ndarray, classes: np.ndarray, other: np.ndarray, active: np.ndarray, other_active: np.ndarray,
               step: int, other_step: int, extent: int, other_extent: int) -> bool:  # pragma: no cover (compiled)
    """Clears the configurations of one end of an edge that no configuration of the other end may go with. Whether
    there were any."""
    used = np.zeros(other_extent, np.bool_)
    for k in range(len(other)):
        if other_active[k]:
            used[other[k]] = True
    listed, count = np.empty(other_extent, np.int64), 0
    for c in range(other_extent):
        if used[c]:
            listed[count] = c
            count += 1
    good = np.zeros(extent, np.bool_)
    for k in range(len(classes)):
        r = classes[k]
        if active[k] and not good[r]:
            for position in range(count):
                if edge[r * step + listed[position] * other_step] < np.inf:
                    good[r] = True
                    break
    changed = False
    for k in range(len(classes)):
        if active[k] and not good[classes[k]]:
            active[k] = False
            changed = True
    return changed


@compiled
def _make_consistent(p: Packed, active: np.ndarray, end: float) -> bool:  # pragma: no cover (compiled)
    """Clears every configuration that some edge forbids with all configurations of its other end, until there is no
    such configuration. Returns whether that was done before the clock showed `end`."""
    first, unary, ends, extents = p.first, p.unary, p.ends, p.extents
    classes, classes_at, values, matrix = p.classes, p.classes_at, p.values, p.matrix
    for position in range(len(active)):
        if unary[position] == np.inf:
            active[position] = False
    # The round in which a vertex last lost a configuration: only its edges are looked at again.
    lost, rounds, changed = np.zeros(len(first) - 1, np.int64), 0, True
    while changed:
        changed = False
        rounds += 1
        for step in range(len(matrix)):
            # There and back, so that what one end of a chain forbids reaches the other in one round.
            e = step if rounds % 2 else len(matrix) - 1 - step
            if max(lost[ends[0, e]], lost[ends[1, e]]) < rounds - 1:
                continue
            if end < np.inf and seconds_now() > end:
                return False
            edge = values[matrix[e]:matrix[e] + extents[0, e] * extents[1, e]]
            for side in range(2):
                u, v = ends[side, e], ends[1 - side, e]
                begin, other = classes_at[side, e], classes_at[1 - side, e]
                if _supported(edge, classes[begin:begin + first[u + 1] - first[u]],
                              classes[other:other + first[v + 1] - first[v]], active[first[u]:first[u + 1]],
                              active[first[v]:first[v + 1]], extents[1, e] if side == 0 else 1,
                              1 if side == 0 else extents[1, e], extents[side, e], extents[1 - side, e]):
                    changed = True
                    lost[u] = rounds
    return True


@compiled
def _fold(p: Packed, kept: np.ndarray, first: np.ndarray, unary: np.ndarray
          ) -> np.ndarray:  # pragma: no cover (compiled)
    """Adds the edges of vertices with one configuration left to their other end. Returns the edges that remain."""
    old_first, ends, extents, matrix = p.first, p.ends, p.extents, p.matrix
    classes, classes_at, values = p.classes, p.classes_at, p.values
    left, count = np.empty(len(matrix), np.int64), 0
    for e in range(len(matrix)):
        u, v = ends[0, e], ends[1, e]
        if first[u + 1] - first[u] > 1 and first[v + 1] - first[v] > 1:
            left[count] = e
            count += 1
            continue
        for i in range(first[u], first[u + 1]):
            line = matrix[e] + classes[classes_at[0, e] + kept[i] - old_first[u]] * extents[1, e]
            for j in range(first[v], first[v + 1]):
                value = values[line + classes[classes_at[1, e] + kept[j] - old_first[v]]]
                unary[i if first[u + 1] - first[u] > 1 else j] += value
    return left[:count]


@compiled
def _renumber(p: Packed, left: np.ndarray, kept: np.ndarray, first: np.ndarray, new_classes: np.ndarray,
              old_class: np.ndarray, new_extents: np.ndarray, new_classes_at: np.ndarray
              ) -> int:  # pragma: no cover (compiled)
    """The classes that are still used, numbered anew in their old order. Fills in the last four; returns how many."""
    classes, extents = p.classes, p.extents
    class_end, potential_end = 0, 0
    for number in range(len(left)):
        for side in range(2):
            e = left[number]
            v = p.ends[side, e]
            place = p.classes_at[side, e] - p.first[v]
            new_classes_at[side, number] = class_end
            renumber = np.full(extents[side, e], -1, np.int32)
            for position in range(first[v], first[v + 1]):
                renumber[classes[place + kept[position]]] = 0
            seen = 0
            for old in range(extents[side, e]):
                if renumber[old] == 0:
                    renumber[old] = seen
                    old_class[potential_end] = old
                    potential_end += 1
                    seen += 1
            for position in range(first[v], first[v + 1]):
                new_classes[class_end] = renumber[classes[place + kept[position]]]
                class_end += 1
            new_extents[side, number] = seen
    return potential_end


@compiled
def _copy(values: np.ndarray, matrix: np.ndarray, stride: np.ndarray, kind: np.ndarray, extents: np.ndarray,
          begin: np.ndarray, old_class: np.ndarray, new_matrix: np.ndarray, most: float, until: float
          ) -> tuple[np.ndarray, int, float, float]:  # pragma: no cover (compiled)
    """The matrices of fewer classes, how many entries they have, the least and the greatest of these; nothing if they
    are more than `most`, and -1 of them where they are not copied when the clock shows `until`. Edges of one kind (they
    share a matrix) that keep the same classes go on sharing.

    Args:
      values: of the larger network.
      matrix, stride, kind: int64 [edges], where the edge's matrix began, its width then, and its kind.
      extents: int64 [2, edges], its shape now.
      begin: int64 [edges], where the old classes of its potentials begin in old_class.
      new_matrix: int64 [edges], filled in.
    """
    end = 0
    newest, older = np.full(len(matrix) + 1, -1, np.int64), np.empty(len(matrix), np.int64)  # edges of a kind, linked
    own = np.zeros(len(matrix), np.bool_)
    for e in range(len(matrix)):
        height, width = extents[0, e], extents[1, e]
        twin, tries = newest[kind[e]], 0
        while twin >= 0 and tries < 16:
            same = extents[0, twin] == height and extents[1, twin] == width
            position = 0
            while same and position < height + width:
                same = old_class[begin[twin] + position] == old_class[begin[e] + position]
                position += 1
            if same:
                break
            twin, tries = older[twin], tries + 1
        if twin >= 0 and tries < 16:
            new_matrix[e] = new_matrix[twin]
            continue
        older[e], newest[kind[e]] = newest[kind[e]], e
        new_matrix[e], own[e] = end, True
        end += height * width
    least, greatest = np.inf, -np.inf
    if end > most:
        return np.empty(0), end, least, greatest
    out = np.empty(end)  # of a large network most of the memory: never more than is needed
    for e in range(len(matrix)):
        if own[e]:
            if until < np.inf and seconds_now() > until:
                return np.empty(0), -1, least, greatest
            height, width = extents[0, e], extents[1, e]
            place = new_matrix[e]
            for r in range(height):
                line = matrix[e] + old_class[begin[e] + r] * stride[e]
                for c in range(width):
                    value = values[line + old_class[begin[e] + height + c]]
                    least, greatest = min(least, value), max(greatest, value)
                    out[place] = value
                    place += 1
    return out, end, least, greatest


class Reduction(NamedTuple):
    """A network reduced to fewer configurations.

    Attributes:
      network: the smaller network.
      messages: its potentials.
      edges: int64, the edge of the larger network that each edge of the smaller one was.
      classes: int64 [potentials], the class of that edge that each potential belongs to; empty where `network` is the
        larger network itself.
    """

    network: Packed
    messages: Potentials
    edges: np.ndarray
    classes: np.ndarray

    @classmethod
    def nothing(cls, packed: Packed, messages: Potentials) -> Reduction:
        """The network as it is."""
        return cls(packed, messages, np.arange(len(packed.matrix)), np.zeros(0, np.int64))


def reduce(packed: Packed, active: np.ndarray, messages: Potentials | None = None, *,
           keep: bool = False, budget: Budget | None = None) -> Reduction:
    """Removes inactive configurations, and those that can then have no finite cost. Vertices that have one
    configuration left are folded into their neighbours.

    Args:
      packed: the network.
      active: bool [configurations]; cleared where a configuration turns out to be impossible.
      messages: potentials of `packed`; zero if not given.
      keep: where nothing is removed, return the network as it is, unless it is small and something can be folded.
      budget: time, and memory for the matrices of the smaller network; no limit if not given.

    Raises:
      InfeasibleError: a vertex has no configuration left.
      TimeoutError: the time is over.
      DoesNotFitError: the matrices are larger than the memory.
    """
    budget = budget or Budget(memory=math.inf)
    if messages is None:
        messages = Potentials.none(packed)
    forbidden = packed.most == np.inf
    if keep and not forbidden and active.all() and (
            len(packed.values) > _LARGE or not (packed.domains == 1)[packed.ends].any()):
        return Reduction.nothing(packed, messages)
    # Most networks forbid nothing, and never need this kernel.
    if forbidden and not _make_consistent(packed, active, seconds_now() + budget.seconds):
        raise TimeoutError
    kept = np.flatnonzero(active)
    first = np.searchsorted(kept, packed.first)
    if not np.diff(first).all():
        raise InfeasibleError("no assignment has a finite cost; allow more configurations")
    unary = packed.unary[kept]
    left = _fold(packed, kept, first, unary)
    decided = first[:-1][np.diff(first) == 1]  # counted once and for all
    constant = packed.constant + float(unary[decided].sum())
    unary[decided] = 0.0
    ends = np.ascontiguousarray(packed.ends[:, left])
    classes = np.empty(int(np.diff(first)[ends].sum()), np.int32)
    old_class = np.empty(packed.potentials, np.int64)
    extents, classes_at = np.empty((2, len(left)), np.int64), np.empty((2, len(left)), np.int64)
    old_class = old_class[:_renumber(packed, left, kept, first, classes, old_class, extents, classes_at)]
    begin = np.cumsum(extents.sum(axis=0)) - extents.sum(axis=0)
    matrix = packed.matrix[left]
    if np.array_equal(extents, packed.extents[:, left]):  # no edge loses a class: the matrices stay where they are
        values, least, most = packed.values, packed.least, packed.most
    else:
        kind = np.unique(matrix, return_inverse=True)[1]
        new_matrix = np.empty_like(matrix)
        values, size, least, most = _copy(packed.values, matrix, packed.extents[1, left], kind, extents, begin,
                                          old_class, new_matrix, budget.memory / 8, seconds_now() + budget.seconds)
        if size < 0:
            raise TimeoutError
        if size > len(values):
            raise DoesNotFitError("the matrices", 8 * size)
        matrix = new_matrix
    network = _assemble(first, unary, packed.original[kept], values, matrix, ends, extents, classes, classes_at,
                        constant, (float(min(least, unary.min(initial=np.inf))),
                                   float(max(most, unary.max(initial=-np.inf)))))
    from_where = np.repeat(messages.at[:, left].T.ravel(), extents.T.ravel())
    return Reduction(network, Potentials(messages.values[from_where + old_class], network.potentials_at), left,
                     old_class)


def lift(packed: Packed, active: np.ndarray, messages: Potentials, reduction: Reduction) -> Potentials:
    """The potentials of a reduced network as potentials of the larger one, with the same bound for
    active configurations.

    Args:
      packed, active, messages: what was reduced (active as `reduce` left it).
      reduction: the result, with its potentials as they are now.
    """
    if reduction.network is packed:
        return reduction.messages
    full = messages.laid_out(packed)
    begin = np.repeat(packed.potentials_at[:, reduction.edges].T.ravel(), reduction.network.extents.T.ravel())
    full[begin + reduction.classes] = reduction.messages.laid_out(reduction.network)
    kept = np.zeros(len(packed.matrix), bool)
    kept[reduction.edges] = True
    for e in np.flatnonzero(~kept).tolist():  # one end is decided: the other takes the whole cost
        height, width = packed.extents[:, e].tolist()
        cost = packed.values[packed.matrix[e]:packed.matrix[e] + height * width].reshape(height, width)
        choices = [np.flatnonzero(active[packed.first[v]:packed.first[v + 1]]) for v in packed.ends[:, e]]
        side = 0 if len(choices[0]) == 1 else 1
        decided = packed.classes[packed.classes_at[side, e] + choices[side][0]]
        line = cost[decided] if side == 0 else cost[:, decided]
        own, other = packed.potentials_at[side, e], packed.potentials_at[1 - side, e]
        full[own:own + packed.extents[side, e]] = 0.0
        full[other:other + len(line)] = np.where(np.isfinite(line), line, 0.0)
    return Potentials(full, packed.potentials_at)


@compiled
def _common_divisor(values: np.ndarray, divisor: float) -> float:  # pragma: no cover (compiled)
    """The greatest common divisor of `divisor` and all finite values; -1 where one is no integer."""
    for value in values:
        rest = abs(value)
        if rest == np.inf:
            continue
        if rest != np.rint(rest):
            return -1.0
        # Integers are divided sooner than numbers of floating point, of which what is left is as exact.
        small = 0.0 < divisor <= 2.0 ** 62 and rest <= 2.0 ** 62
        if divisor != 1.0 and not (small and int(rest) % int(divisor) == 0):
            while rest > 0.0:
                divisor, rest = rest, divisor % rest
    return divisor


# Entries between two looks at the clock.
_BLOCK = 1 << 23


def quantum(packed: Packed, budget: Budget | None = None) -> float:
    """The number that every cost is a multiple of, where all are integers (0 where they are not). No two assignments
    can differ by less; whether sums tell that is for others to say.

    Args:
      packed: the network.
      budget: time that it may take.

    Raises:
      TimeoutError: the time is over.
    """
    divisor = 0.0
    for array in (packed.unary, packed.values):
        for begin in range(0, len(array), _BLOCK):
            if budget is not None:
                budget.check_time()
            divisor = _common_divisor(array[begin:begin + _BLOCK], divisor)
            if divisor < 0:
                return 0.0
    return float(divisor)
