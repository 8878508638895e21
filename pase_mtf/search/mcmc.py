"""FlexFlow's search (Jia et al. 2019): a Markov chain over strategies that changes one layer at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from numbers import Real

import numpy as np

from pase_mtf.errors import InfeasibleError, UsageError
from pase_mtf.search.compiled import compiled
from pase_mtf.search.network import CostNetwork
from pase_mtf.search.packed import Packed, pack
from pase_mtf.search.registry import Progress, Solution, register

__all__ = ["cost_at", "search_mcmc"]

_BLOCK = 4096


@compiled
def _next(state: np.ndarray) -> float:  # pragma: no cover (compiled)
    """A number in [0, 1) (xorshift64*): the same on every machine and for every block size."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return float((x * np.uint64(2685821657736338717)) >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@compiled
def cost_at(p: Packed, v: int, k: int, choice: np.ndarray) -> float:  # pragma: no cover (compiled)
    """What depends on the configuration of one vertex."""
    cost: float = p.unary[p.first[v] + k]
    for side in range(2):
        for position in range(p.adjacent_at[side, v], p.adjacent_at[side, v + 1]):
            e = p.adjacent[side, position]
            own = p.classes[p.classes_at[side, e] + k]
            other = p.classes[p.classes_at[1 - side, e] + choice[p.ends[1 - side, e]]]
            r, c = (own, other) if side == 0 else (other, own)
            cost += p.values[p.matrix[e] + r * p.extents[1, e] + c]
    return cost


@compiled
def _walk(p: Packed, choice: np.ndarray, best: np.ndarray, cost: float, best_cost: float, beta: float,
          steps: int, state: np.ndarray) -> tuple[float, float, int]:  # pragma: no cover (compiled)
    """So many proposals. Returns the cost of `choice`, that of `best`, and at which proposal `best` was last improved
    (-1: never)."""
    vertices = len(p.first) - 1
    improved = -1
    for step in range(steps):
        v = int(_next(state) * vertices)
        k = int(_next(state) * (p.first[v + 1] - p.first[v]))
        chance = _next(state)
        if k == choice[v]:
            continue
        now, then = cost_at(p, v, choice[v], choice), cost_at(p, v, k, choice)
        if then == np.inf and now < np.inf:
            continue
        if then < now or (now == np.inf) or chance < math.exp(beta * (now - then)):
            choice[v] = k
            # From or to infinity no difference exists: count anew.
            cost = cost + then - now if now < np.inf and cost < np.inf else _total(p, choice)
            if cost < best_cost:
                best_cost, improved = cost, step
                best[:] = choice
    return cost, best_cost, improved


@compiled
def _total(p: Packed, choice: np.ndarray) -> float:  # pragma: no cover (compiled)
    cost = p.constant
    for v in range(len(p.first) - 1):
        cost += p.unary[p.first[v] + choice[v]]
    for e in range(len(p.matrix)):
        r = p.classes[p.classes_at[0, e] + choice[p.ends[0, e]]]
        cost += p.values[p.matrix[e] + r * p.extents[1, e] + p.classes[p.classes_at[1, e] + choice[p.ends[1, e]]]]
    return cost


@register("mcmc")
def search_mcmc(network: CostNetwork, *, time_limit: float | None = None, gap: float = 0.0,
                progress: Progress | None = None, seed: int = 0, proposals: int | None = None, beta: float = 2000.0,
                initial: Sequence[int] | None = None) -> Solution:
    """Proposes a random configuration for a random layer, and accepts it with probability
    min(1, exp(beta * (old cost - new cost) / initial cost)).

    It stops when half of its budget has brought no improvement, or the budget is used up. The budget is `proposals`,
    or `time_limit`; with neither, a million proposals. By proposals, the same seed gives the same result.

    Args:
      network: what to minimise.
      time_limit: budget in seconds.
      gap: not used: the search has no bound.
      progress: called after every block of proposals.
      seed: of the random numbers.
      proposals: budget in proposals.
      beta: inverse temperature, relative to the cost at the start.
      initial: the assignment to start from, such as data parallelism; without it, every layer's own cheapest.

    Returns:
      the best assignment seen, without a bound. `statistics`: proposals, and history: (seconds, cost) of the best
      whenever it had become better.

    Raises:
      UsageError: an argument out of range.
      InfeasibleError: no finite assignment was met.
    """
    start = time.perf_counter()
    for name, value, least in (("seed", seed, 0), ("proposals", 1 if proposals is None else proposals, 1)):
        if not (isinstance(value, (int, np.integer)) and value >= least):
            raise UsageError(f"mcmc: {name} of {value!r}; give a whole number, {least} or more")
    if not (isinstance(beta, Real) and beta >= 0):
        raise UsageError(f"mcmc: beta of {beta!r}; give a number, 0 or more")
    packed = pack(network.normalized())
    if initial is not None:
        if len(initial) and np.asarray(initial).dtype.kind not in "iu":
            raise UsageError(f"mcmc: initial {initial!r}; give a configuration index per layer")
        network.cost(initial)  # checks that it fits
        choice = np.array(initial, np.int64)
    else:
        choice = np.array([int(np.argmin(vector)) for vector in network.vectors], np.int64)
    best = choice.copy()
    cost = best_cost = float(_total(packed, choice))
    state = np.array([(seed + 1) * 0x9E3779B97F4A7C15 % 2 ** 64 or 1], np.uint64)
    total = proposals if proposals is not None else 1_000_000 if time_limit is None else None
    history = [(time.perf_counter() - start, best_cost)]
    scale = beta / abs(cost) if 0 < abs(cost) < math.inf else beta
    done, last, last_seconds = 0, 0, 0.0
    while packed.vertices:
        steps = _BLOCK if total is None else min(_BLOCK, total - done, max(1, last + (total + 1) // 2 - done))
        # The sum that the walk keeps up to date drifts by rounding: every block starts from a fresh one.
        _, best_cost, improved = _walk(packed, choice, best, cost, best_cost, scale, steps, state)
        cost = float(_total(packed, choice))
        seconds = time.perf_counter() - start
        if improved >= 0:
            last, last_seconds = done + improved + 1, seconds
            best_cost = float(_total(packed, best))
            history.append((seconds, best_cost))
            if scale == beta and 0 < abs(best_cost) < math.inf:
                scale = beta / abs(best_cost)
        done += steps
        if progress is not None:
            progress(seconds, best_cost, -math.inf)
        if total is not None and (done >= total or done - last >= total / 2):
            break
        if time_limit is not None and (seconds >= time_limit or (
                total is None and seconds - last_seconds >= time_limit / 2)):
            break
    if not best_cost < math.inf:
        raise InfeasibleError("mcmc: met no finite assignment; give a finite one as initial, or use method exact")
    assignment = tuple(best.tolist())
    return Solution(assignment, network.cost(assignment), -math.inf, math.inf, False, time.perf_counter() - start,
                    {"proposals": done, "history": tuple(history)})
