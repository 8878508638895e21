"""Bounds by sequential tree-reweighted message passing (Kolmogorov 2006), on classes instead of configurations.

Every edge has a potential per row class and per column class, taken from the edge and given to its ends; whatever they
are, the sum of the minima of what is left at every vertex and edge bounds every assignment from below. A pass visits
the vertices in order: a vertex takes all it can from the edges behind it, then hands its surplus on in equal parts to
the edges ahead. What a vertex holds above its minimum when it has taken all is a bound as well: a configuration whose
surplus exceeds the distance to the best known assignment is in no better one.
"""

from __future__ import annotations

import numpy as np

from pase_mtf.search.compiled import compiled
from pase_mtf.search.packed import Packed, reduce

__all__ = ["EXACTLY", "improve", "message_passes", "rounded_down", "surplus_of"]

# Rounding to single precision changes a number by half of this, relative to it.
_ULP = 2.0 ** -23

EXACTLY = np.zeros(0, np.float32)
"""In place of `rounded_down`: passes in double precision."""


@compiled(fastmath={"nnan", "nsz"})
def _pull(edge: np.ndarray, given: np.ndarray, taken: np.ndarray, rows: bool) -> None:  # pragma: no cover (compiled)
    """The potentials of one side of an edge as large as it allows: taken = min over the other side of edge - given.

    Args:
      edge: float64, its matrix, flat.
      given, taken: the potentials of the other side, and of this one.
      rows: whether this is the side of the rows.
    """
    if rows:
        # Minima side by side: a single running minimum would be a chain that cannot be vectorised.
        width, lanes = len(given), 32
        partial = np.empty(lanes)
        for r in range(len(taken)):
            line = edge[r * width:(r + 1) * width]
            partial[:] = np.inf
            c = 0
            while c + lanes <= width:
                for lane in range(lanes):
                    value = line[c + lane] - given[c + lane]
                    partial[lane] = value if value < partial[lane] else partial[lane]
                c += lanes
            for last in range(c, width):
                value = line[last] - given[last]
                partial[last - c] = value if value < partial[last - c] else partial[last - c]
            least = np.inf
            for lane in range(lanes):
                least = partial[lane] if partial[lane] < least else least
            taken[r] = least
    else:
        width = len(taken)
        taken[:] = np.inf
        for r in range(len(given)):
            line = edge[r * width:(r + 1) * width]
            potential = given[r]
            for c in range(width):
                value = line[c] - potential
                taken[c] = value if value < taken[c] else taken[c]


@compiled(fastmath={"nnan", "nsz"})
def _pull_rough(lines: np.ndarray, given: np.ndarray, open_lines: np.ndarray, taken: np.ndarray,
                out: np.ndarray) -> None:  # pragma: no cover (compiled)
    """`_pull` in single precision, rounded down: never more than the minimum over the open lines.

    Args:
      lines: float32, the matrix rounded down, a line per class of the other side.
      given: float64, the potentials of the other side.
      open_lines: int64, the classes of the other side that count.
      taken: float64, filled in.
      out: float32, room for as many.
    """
    width = len(taken)
    for c in range(width):
        out[c] = np.inf
    position = 0
    while position < len(open_lines):  # four lines at once, the last one again where there are fewer
        a = open_lines[position]
        b = open_lines[min(position + 1, len(open_lines) - 1)]
        d = open_lines[min(position + 2, len(open_lines) - 1)]
        e = open_lines[min(position + 3, len(open_lines) - 1)]
        first, second = lines[a * width:(a + 1) * width], lines[b * width:(b + 1) * width]
        third, fourth = lines[d * width:(d + 1) * width], lines[e * width:(e + 1) * width]
        one, two = np.float32(given[a] + abs(given[a]) * _ULP), np.float32(given[b] + abs(given[b]) * _ULP)
        three, four = np.float32(given[d] + abs(given[d]) * _ULP), np.float32(given[e] + abs(given[e]) * _ULP)
        for c in range(width):
            out[c] = min(out[c], min(min(first[c] - one, second[c] - two), min(third[c] - three, fourth[c] - four)))
        position += 4
    for c in range(width):
        taken[c] = out[c] - abs(out[c]) * _ULP


@compiled
def _round_down(values: np.ndarray, matrix: np.ndarray, extents: np.ndarray) -> np.ndarray:  # pragma: no cover
    rough = np.empty(2 * len(values), np.float32)
    for position in range(len(values)):
        rough[position] = np.float32(values[position] - abs(values[position]) * _ULP)
    block = 32
    for e in range(len(matrix)):
        height, width = extents[0, e], extents[1, e]
        begin, turned = matrix[e], len(values) + matrix[e]
        for top in range(0, height, block):
            for left in range(0, width, block):
                for c in range(left, min(left + block, width)):
                    for r in range(top, min(top + block, height)):
                        rough[turned + c * height + r] = rough[begin + r * width + c]
    return rough


def rounded_down(p: Packed) -> np.ndarray:
    """The matrices of a network in single precision, rounded down, and after them all of them once more transposed:
    half the memory traffic, for passes whose bound need not be exact (see message_passes)."""
    matrix, first = np.unique(p.matrix, return_index=True)
    return _round_down(p.values, matrix, np.ascontiguousarray(p.extents[:, first]))


@compiled
def _add(out: np.ndarray, values: np.ndarray, classes: np.ndarray) -> None:  # pragma: no cover (compiled)
    """Adds to every configuration the value of its class."""
    for k in range(len(out)):
        out[k] += values[classes[k]]


@compiled
def _hand_on(theta: np.ndarray, delta: float, share: float, classes: np.ndarray, potentials: np.ndarray,
             least: np.ndarray) -> None:  # pragma: no cover (compiled)
    """Moves a share of the surplus of a vertex (theta - delta) to an edge."""
    for r in range(len(potentials)):
        least[r] = np.inf
    for k in range(len(theta)):
        if theta[k] < least[classes[k]]:
            least[classes[k]] = theta[k]
    for r in range(len(potentials)):
        if least[r] < np.inf:
            potentials[r] -= share * (least[r] - delta)


@compiled
def _lines(p: Packed, v: int, side: int, choice: np.ndarray, out: np.ndarray) -> None:  # pragma: no cover (compiled)
    """Adds what the edges that have v at this side cost, given the choice at their other ends."""
    matrix, ends, extents, classes, classes_at = p.matrix, p.ends, p.extents, p.classes, p.classes_at
    adjacent, values = p.adjacent, p.values
    for position in range(p.adjacent_at[side, v], p.adjacent_at[side, v + 1]):
        e = adjacent[side, position]
        fixed = classes[classes_at[1 - side, e] + choice[ends[1 - side, e]]]
        begin = classes_at[side, e]
        start, step = matrix[e] + fixed, extents[1, e]
        if side == 1:
            start, step = matrix[e] + fixed * extents[1, e], np.int64(1)
        for k in range(len(out)):
            out[k] += values[start + step * classes[begin + k]]


@compiled
def improve(p: Packed, choice: np.ndarray, sweeps: int) -> float:  # pragma: no cover (compiled)
    """Gives every vertex the best configuration for its neighbours', until nothing improves. Returns the cost."""
    first, unary = p.first, p.unary
    vertices = len(first) - 1
    for _ in range(sweeps):
        changed = False
        for v in range(vertices):
            if first[v + 1] - first[v] == 1:
                continue
            theta = unary[first[v]:first[v + 1]].copy()
            for side in range(2):
                _lines(p, v, side, choice, theta)
            best = choice[v]
            for k in range(len(theta)):
                if theta[k] < theta[best]:
                    best = k
            if best != choice[v]:
                choice[v] = best
                changed = True
        if not changed:
            break
    cost = p.constant
    for v in range(vertices):
        cost += unary[first[v] + choice[v]]
    for e in range(len(p.matrix)):
        r = p.classes[p.classes_at[0, e] + choice[p.ends[0, e]]]
        cost += p.values[p.matrix[e] + r * p.extents[1, e] + p.classes[p.classes_at[1, e] + choice[p.ends[1, e]]]]
    return cost


@compiled
def _open(alive: np.ndarray, classes: np.ndarray, used: np.ndarray, lines: np.ndarray) -> int:  # pragma: no cover
    """Lists the classes that something alive has. Returns how many."""
    count = 0
    for c in range(len(lines)):
        used[c] = False
    for k in range(len(alive)):
        if alive[k]:
            used[classes[k]] = True
    for c in range(len(lines)):
        if used[c]:
            lines[count] = c
            count += 1
    return count


@compiled
def message_passes(p: Packed, rough: np.ndarray, messages: np.ndarray, alive: np.ndarray, surplus: np.ndarray,
                   level: np.ndarray, best: np.ndarray, best_cost: float, margin: float, enough: float,
                   passes: int):  # pragma: no cover (compiled)
    """Runs passes there and back.

    Args:
      p: the network; every entry of every domain can be part of a finite assignment of each edge (see packed.reduce).
      rough: EXACTLY, or `rounded_down(p)` for large networks without infinite costs: the bound is then that of what is
        alive (not of the whole network), and lower than it could be by about 1e-7 of the costs.
      messages: float64 [p.potentials], changed in place.
      alive: bool [configurations]: cleared where a configuration cannot be part of an assignment cheaper than
        best_cost + margin.
      surplus: float64 [configurations], filled in: how much more than `level` of its vertex every assignment costs
        that holds the configuration.
      level: float64 [vertices], filled in: the bound when the surplus of that vertex was found.
      best: int64 [vertices], the best assignment known; replaced in place when a cheaper one is found.
      best_cost: its cost (inf: none known).
      margin: how much cheaper than best_cost an assignment must be to matter: negative, or 0.
      enough: stop once best_cost - bound is at most this.
      passes: at most so many.

    Returns:
      (lower bound, cost of `best`, passes made).
    """
    first, unary, matrix, extents, values = p.first, p.unary, p.matrix, p.extents, p.values
    classes, classes_at, potentials_at = p.classes, p.classes_at, p.potentials_at
    adjacent_at, adjacent = p.adjacent_at, p.adjacent
    vertices = len(first) - 1
    widest = 1
    for e in range(len(matrix)):
        widest = max(widest, extents[0, e], extents[1, e])
    least = np.empty(widest)
    out, used, open_lines = np.empty(widest, np.float32), np.zeros(widest, np.bool_), np.empty(widest, np.int64)
    minimum = np.zeros(vertices)
    exactly = len(rough) == 0
    choice = np.zeros(vertices, np.int64)
    bound, known = -np.inf, False
    made = 0
    for half in range(2 * passes):
        # The side at which a vertex stands on the edges behind it, and on those ahead.
        behind, ahead = 1 - half % 2, half % 2
        running, rest = p.constant, minimum.sum()
        for step in range(vertices):
            v = step if behind == 1 else vertices - 1 - step
            size = first[v + 1] - first[v]
            theta = unary[first[v]:first[v + 1]].copy()
            score = theta.copy()
            _lines(p, v, behind, choice, score)
            for side in range(2):
                for position in range(adjacent_at[side, v], adjacent_at[side, v + 1]):
                    e = adjacent[side, position]
                    place, other = potentials_at[side, e], potentials_at[1 - side, e]
                    if side == behind:
                        given, taken = messages[other:other + extents[1 - side, e]], messages[place:
                                                                                              place + extents[side, e]]
                        begin, end = matrix[e], matrix[e] + extents[0, e] * extents[1, e]
                        if exactly:
                            _pull(values[begin:end], given, taken, side == 0)
                        else:
                            u = p.ends[1 - side, e]
                            count = _open(alive[first[u]:first[u + 1]], classes[classes_at[1 - side, e]:], used,
                                          open_lines[:len(given)])
                            turned = len(values) if side == 0 else 0
                            _pull_rough(rough[turned + begin:turned + end], given, open_lines[:count], taken, out)
                    own = classes[classes_at[side, e]:classes_at[side, e] + size]
                    _add(theta, messages[place:place + extents[side, e]], own)
                    if side == ahead:
                        _add(score, messages[place:place + extents[side, e]], own)
            own_alive = alive[first[v]:first[v + 1]]
            delta, pick, lowest = np.inf, 0, np.inf
            for k in range(size):
                if exactly or own_alive[k]:
                    delta = min(delta, theta[k])
                    if score[k] < lowest:
                        lowest, pick = score[k], k
            choice[v] = pick
            running += delta
            rest -= minimum[v]
            minimum[v] = delta
            level[v] = running + rest  # the bound at this moment
            for k in range(size):
                surplus[first[v] + k] = theta[k] - delta
                # Never the last one: where nothing cheaper can be, the bound says so.
                if not exactly and known and theta[k] > delta and theta[k] - delta > best_cost + margin - level[v]:
                    own_alive[k] = False
                if not exactly and not own_alive[k]:
                    theta[k] = np.inf
            degree = (adjacent_at[0, v + 1] - adjacent_at[0, v], adjacent_at[1, v + 1] - adjacent_at[1, v])
            share = 1.0 / max(degree[0], degree[1], 1)
            for position in range(adjacent_at[ahead, v], adjacent_at[ahead, v + 1]):
                e = adjacent[ahead, position]
                place = potentials_at[ahead, e]
                _hand_on(theta, delta, share, classes[classes_at[ahead, e]:classes_at[ahead, e] + size],
                         messages[place:place + extents[ahead, e]], least)
        cost = improve(p, choice, 2 * ahead)
        if cost < best_cost:
            best_cost = cost
            best[:] = choice
        if known and exactly:
            for v in range(vertices):
                room = best_cost + margin - level[v]
                for position in range(first[v], first[v + 1]):
                    if surplus[position] > room:
                        alive[position] = False
        bound, known = max(bound, running), True
        made += ahead
        if best_cost - bound <= enough:
            break
    return bound, best_cost, made


def surplus_of(p: Packed, passes: int = 6) -> tuple[float, np.ndarray]:
    """How expensive every configuration makes an assignment.

    Args:
      p: the network.
      passes: of message passing.

    Returns:
      a lower bound, and float64 [configurations], how much more than it every assignment costs that holds the
      configuration (inf: it is in no finite one).

    Raises:
      InfeasibleError: no finite assignment can exist.
    """
    network, messages, *_ = reduce(p, np.ones(len(p.unary), bool))
    keep, own, level = np.ones(len(network.unary), bool), np.zeros(len(network.unary)), np.zeros(network.vertices)
    nobody = np.zeros(network.vertices, np.int64)
    bound, *_ = message_passes(network, EXACTLY, messages, keep, own, level, nobody, -np.inf, 0.0, -np.inf, passes)
    # The surplus of a pass is counted from a bound at least as good as that before it.
    message_passes(network, EXACTLY, messages, keep, own, level, nobody, -np.inf, 0.0, -np.inf, 1)
    surplus = np.full(len(p.unary), np.inf)
    owner = np.repeat(np.arange(network.vertices), network.domains)
    surplus[p.first[owner] + network.original] = own
    return bound, surplus
