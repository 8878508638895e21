"""A cost network as flat arrays, for compiled code, and its reduction to the configurations that are still alive."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from pase_mtf.errors import InfeasibleError
from pase_mtf.network import CostNetwork
from pase_mtf.search.compiled import compiled

__all__ = ["Packed", "Reduction", "lift", "pack", "quantum", "reduce"]


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

    @property
    def vertices(self) -> int:
        """Number of vertices."""
        return len(self.first) - 1

    @property
    def domains(self) -> np.ndarray:
        """Configurations per vertex."""
        return np.diff(self.first)

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


def _assemble(first: np.ndarray, unary: np.ndarray, original: np.ndarray, values: np.ndarray, matrix: np.ndarray,
              ends: np.ndarray, extents: np.ndarray, classes: np.ndarray, classes_at: np.ndarray,
              constant: float) -> Packed:
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
                  float(constant))


def pack(network: CostNetwork) -> Packed:
    """Lays a normalized network out flat. Arrays that edges share are stored once."""
    def join(arrays: list[np.ndarray], dtype: type) -> tuple[np.ndarray, np.ndarray]:
        place: dict[int, int] = {}
        parts, starts, end = [np.zeros(0, dtype)], np.zeros(len(arrays), np.int64), 0
        for number, array in enumerate(arrays):
            if id(array) not in place:
                place[id(array)] = end
                parts.append(array.reshape(-1))
                end += array.size
            starts[number] = place[id(array)]
        return np.concatenate(parts), starts
    edges = network.edges
    values, matrix = join([edge.matrix for edge in edges], np.float64)
    classes, classes_at = join([edge.rows for edge in edges] + [edge.columns for edge in edges], np.int32)
    first = np.zeros(len(network.vectors) + 1, np.int64)
    np.cumsum(network.sizes, out=first[1:])
    return _assemble(
        first, np.concatenate([np.zeros(0), *network.vectors]),
        np.concatenate([np.zeros(0, np.int32), *(np.arange(size, dtype=np.int32) for size in network.sizes)]),
        values, matrix,
        np.array([[edge.source for edge in edges], [edge.target for edge in edges]], np.int32),
        np.array([edge.matrix.shape for edge in edges], np.int64).reshape(-1, 2).T.copy(),
        classes, classes_at.reshape(2, -1), 0.0)


@compiled
def _supported(edge: np.ndarray, classes: np.ndarray, other: np.ndarray, alive: np.ndarray, other_alive: np.ndarray,
               step: int, other_step: int, extent: int, other_extent: int) -> bool:  # pragma: no cover (compiled)
    """Clears the configurations of one end of an edge that no configuration of the other end may go with. Whether
    there were any."""
    used = np.zeros(other_extent, np.bool_)
    for k in range(len(other)):
        if other_alive[k]:
            used[other[k]] = True
    listed, count = np.empty(other_extent, np.int64), 0
    for c in range(other_extent):
        if used[c]:
            listed[count] = c
            count += 1
    good = np.zeros(extent, np.bool_)
    for k in range(len(classes)):
        r = classes[k]
        if alive[k] and not good[r]:
            for position in range(count):
                if edge[r * step + listed[position] * other_step] < np.inf:
                    good[r] = True
                    break
    changed = False
    for k in range(len(classes)):
        if alive[k] and not good[classes[k]]:
            alive[k] = False
            changed = True
    return changed


@compiled
def _make_consistent(p: Packed, alive: np.ndarray) -> bool:  # pragma: no cover (compiled)
    """Clears every configuration that some edge forbids with all configurations of its other end, until none is left.
    False: a vertex has nothing left."""
    first, unary, ends, extents = p.first, p.unary, p.ends, p.extents
    classes, classes_at, values, matrix = p.classes, p.classes_at, p.values, p.matrix
    for position in range(len(alive)):
        if unary[position] == np.inf:
            alive[position] = False
    changed = True
    while changed:
        changed = False
        for e in range(len(matrix)):
            edge = values[matrix[e]:matrix[e] + extents[0, e] * extents[1, e]]
            for side in range(2):
                u, v = ends[side, e], ends[1 - side, e]
                begin, other = classes_at[side, e], classes_at[1 - side, e]
                if _supported(edge, classes[begin:begin + first[u + 1] - first[u]],
                              classes[other:other + first[v + 1] - first[v]], alive[first[u]:first[u + 1]],
                              alive[first[v]:first[v + 1]], extents[1, e] if side == 0 else 1,
                              1 if side == 0 else extents[1, e], extents[side, e], extents[1 - side, e]):
                    changed = True
    for v in range(len(first) - 1):
        found = False
        for k in range(first[v], first[v + 1]):
            found |= alive[k]
        if not found:
            return False
    return True


@compiled
def _restrict(p: Packed, alive: np.ndarray, messages: np.ndarray, kind: np.ndarray):  # pragma: no cover (compiled)
    """The arrays of the network with the configurations alive only; edges of a vertex with one configuration left are
    folded into their other end. Potentials of classes that remain are carried over. Edges of one kind (they share a
    matrix) that keep the same classes go on sharing."""
    old_first, old_unary, ends, extents, matrix = p.first, p.unary, p.ends, p.extents, p.matrix
    old_classes, classes_at, old_values, potentials_at = p.classes, p.classes_at, p.values, p.potentials_at
    vertices, edges = len(old_first) - 1, len(matrix)
    first = np.zeros(vertices + 1, np.int64)
    kept = np.empty(len(alive), np.int64)  # the configurations alive
    count = 0
    for v in range(vertices):
        for k in range(old_first[v], old_first[v + 1]):
            if alive[k]:
                kept[count] = k
                count += 1
        first[v + 1] = count
    kept = kept[:count]
    unary = old_unary[kept]
    constant = p.constant
    left = np.empty(edges, np.int64)  # the edges that remain
    count, class_room = 0, 0
    for e in range(edges):
        u, v = ends[0, e], ends[1, e]
        size, other = first[u + 1] - first[u], first[v + 1] - first[v]
        if size > 1 and other > 1:
            left[count] = e
            count += 1
            class_room += size + other
            continue
        for i in range(size):
            r = old_classes[classes_at[0, e] + kept[first[u] + i] - old_first[u]]
            for j in range(other):
                c = old_classes[classes_at[1, e] + kept[first[v] + j] - old_first[v]]
                value = old_values[matrix[e] + r * extents[1, e] + c]
                if size > 1:
                    unary[first[u] + i] += value
                else:
                    unary[first[v] + j] += value
    for v in range(vertices):
        if first[v + 1] - first[v] == 1:  # decided: counted once and for all
            constant += unary[first[v]]
            unary[first[v]] = 0.0
    left = left[:count]
    values, classes = np.empty(1024), np.empty(class_room, np.int32)
    new_matrix, new_extents = np.empty(count, np.int64), np.empty((2, count), np.int64)
    new_classes_at = np.empty((2, count), np.int64)
    potentials = np.empty(len(messages))
    old_class = np.empty(len(messages), np.int64)  # which class of the old edge a potential belongs to
    begin = np.empty(count, np.int64)  # where the potentials of an edge begin
    # Where no edge loses a class the matrices stay where they are.
    whole = True
    newest, older = np.full(len(matrix), -1, np.int64), np.empty(count, np.int64)  # edges of a kind, linked
    end, class_end, potential_end = 0, 0, 0
    for number in range(count):
        e = left[number]
        begin[number] = potential_end
        for side in range(2):
            v = ends[side, e]
            renumber = np.full(extents[side, e], -1, np.int32)
            new_classes_at[side, number] = class_end
            place = classes_at[side, e] - old_first[v]
            for position in range(first[v], first[v + 1]):
                renumber[old_classes[place + kept[position]]] = 0
            seen = 0
            for old in range(extents[side, e]):
                if renumber[old] == 0:
                    renumber[old] = seen
                    old_class[potential_end] = old
                    potentials[potential_end] = messages[potentials_at[side, e] + old]
                    potential_end += 1
                    seen += 1
            for position in range(first[v], first[v + 1]):
                classes[class_end] = renumber[old_classes[place + kept[position]]]
                class_end += 1
            new_extents[side, number] = seen
        whole &= new_extents[0, number] == extents[0, e] and new_extents[1, number] == extents[1, e]
    for number in range(count if not whole else 0):
        e = left[number]
        height, width = new_extents[0, number], new_extents[1, number]
        twin, tries = newest[kind[e]], 0
        while twin >= 0 and tries < 16:
            same = new_extents[0, twin] == height and new_extents[1, twin] == width
            position = 0
            while same and position < height + width:
                same = old_class[begin[twin] + position] == old_class[begin[number] + position]
                position += 1
            if same:
                break
            twin, tries = older[twin], tries + 1
        if twin >= 0 and tries < 16:
            new_matrix[number] = new_matrix[twin]
            continue
        older[number], newest[kind[e]] = newest[kind[e]], number
        if end + height * width > len(values):
            grown = np.empty(2 * (end + height * width))
            grown[:end] = values[:end]
            values = grown
        new_matrix[number] = end
        for r in range(height):
            line = matrix[e] + old_class[begin[number] + r] * extents[1, e]
            for c in range(width):
                values[end] = old_values[line + old_class[begin[number] + height + c]]
                end += 1
    return (first, unary, kept, left, whole, values[:end].copy(), new_matrix, new_extents, classes, new_classes_at,
            constant, potentials[:potential_end].copy(), old_class[:potential_end].copy())


class Reduction(NamedTuple):
    """A network reduced to fewer configurations.

    Attributes:
      network: the smaller network.
      messages: its potentials.
      edges: int64, the edge of the larger network that each edge of the smaller one was.
      classes: int64 [potentials], the class of that edge that each potential belongs to.
    """

    network: Packed
    messages: np.ndarray
    edges: np.ndarray
    classes: np.ndarray


def reduce(packed: Packed, alive: np.ndarray, messages: np.ndarray | None = None) -> Reduction:
    """Removes what is not alive, and all that can then have no finite cost.

    Args:
      packed: the network.
      alive: bool [configurations]; cleared where a configuration turns out to be impossible.
      messages: potentials of `packed`; zero if not given.

    Raises:
      InfeasibleError: a vertex has no configuration left.
    """
    if messages is None:
        messages = np.zeros(packed.potentials)
    if not _make_consistent(packed, alive):
        raise InfeasibleError("no assignment has a finite cost; allow more configurations")
    kind = np.unique(packed.matrix, return_inverse=True)[1]
    (first, unary, kept, left, whole, values, matrix, extents, classes, classes_at, constant, messages,
     old_class) = _restrict(packed, alive, messages, kind)
    if whole:
        values, matrix = packed.values, packed.matrix[left]
    return Reduction(
        _assemble(first, unary, packed.original[kept], values, matrix, np.ascontiguousarray(packed.ends[:, left]),
                  extents, classes, classes_at, constant), messages, left, old_class)


def lift(packed: Packed, alive: np.ndarray, messages: np.ndarray, reduction: Reduction) -> np.ndarray:
    """The potentials of a reduced network as potentials of the larger one, with the same bound for what is alive.

    Args:
      packed, alive, messages: what was reduced (alive as `reduce` left it).
      reduction: the result, with its potentials as they are now.
    """
    full = messages.copy()
    sizes = reduction.network.extents.T.ravel()
    begin = np.repeat(packed.potentials_at[:, reduction.edges].T.ravel(), sizes)
    full[begin + reduction.classes] = reduction.messages
    kept = np.zeros(len(packed.matrix), bool)
    kept[reduction.edges] = True
    for e in np.flatnonzero(~kept).tolist():  # one end is decided: the other takes the whole cost
        height, width = packed.extents[:, e].tolist()
        cost = packed.values[packed.matrix[e]:packed.matrix[e] + height * width].reshape(height, width)
        choices = [np.flatnonzero(alive[packed.first[v]:packed.first[v + 1]]) for v in packed.ends[:, e]]
        side = 0 if len(choices[0]) == 1 else 1
        decided = packed.classes[packed.classes_at[side, e] + choices[side][0]]
        line = cost[decided] if side == 0 else cost[:, decided]
        own, other = packed.potentials_at[side, e], packed.potentials_at[1 - side, e]
        full[own:own + packed.extents[side, e]] = 0.0
        full[other:other + len(line)] = np.where(np.isfinite(line), line, 0.0)
    return full


def quantum(packed: Packed) -> float:
    """The number that every cost is a multiple of, where all are integers (0 where they are not, or are too large to
    add without rounding). No two assignments can differ by less."""
    divisor = 0
    for array in (packed.unary, packed.values):
        finite = array[np.isfinite(array)]
        if finite.size and (np.abs(finite).max() > 2.0 ** 50 or not np.array_equal(finite, np.rint(finite))):
            return 0.0
        divisor = math.gcd(divisor, int(np.gcd.reduce(finite.astype(np.int64)))) if finite.size else divisor
    return float(divisor)
