"""FlexFlow's search (Jia et al. 2019): a Markov chain over strategies that changes one layer at a time."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence

import numpy as np

from pase_mtf.arguments import as_float
from pase_mtf.errors import InfeasibleError, UsageError, shortened
from pase_mtf.search.budget import Budget
from pase_mtf.search.compiled import compiled
from pase_mtf.search.neighbourhood import cost_at, total_cost
from pase_mtf.search.network import CostNetwork
from pase_mtf.search.packed import Packed, pack
from pase_mtf.search.registry import Progress, Solution, register

__all__ = ["search_mcmc"]

_BLOCK = 4096
# What the sums of a block round off at most, of the largest of what was added up.
_DRIFT = 1e-11


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
def _walk(p: Packed, choice: np.ndarray, best: np.ndarray, cost: float, best_cost: float, beta: float,
          steps: int, state: np.ndarray) -> tuple[float, float, int]:  # pragma: no cover (compiled)
    """So many proposals. Returns the cost of `choice`, that of `best`, and at which proposal `best` was last improved
    (-1: never)."""
    vertices = len(p.first) - 1
    improved, largest = -1, 0.0  # of what was added up since the cost was counted anew
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
            finite = now < np.inf and cost < np.inf
            if finite and then != now:
                largest = max(largest, abs(cost), abs(now), abs(then))
                cost = cost + then - now
            # From or to infinity no difference exists, and what large costs have rounded off may decide: count anew.
            if not finite or cost < best_cost + _DRIFT * largest:
                cost, largest = total_cost(p, choice), 0.0
            if cost < best_cost:
                best_cost, improved = cost, step
                best[:] = choice
    return cost, best_cost, improved


class _Chain:
    """The walk, and the best assignment that it has met.

    Attributes:
      best, best_cost: that assignment, int64 [vertices], and its cost (inf: none that is finite).
      done: proposals so far.
    """

    def __init__(self, packed: Packed, choice: np.ndarray, seed: int, beta: float) -> None:
        self._packed, self._choice, self._beta = packed, choice, beta
        self._state = np.array([(int(seed) + 1) * 0x9E3779B97F4A7C15 % 2 ** 64 or 1], np.uint64)
        self.best = choice.copy()
        self._cost = self.best_cost = float(total_cost(packed, choice))
        self._scale = self._relative(self._cost)
        self.done = 0

    def _relative(self, cost: float) -> float | None:
        """The inverse temperature for costs like this; None while none is finite."""
        scale = self._beta / abs(cost) if 0 < abs(cost) < math.inf else None
        return min(scale, sys.float_info.max) if scale is not None else None

    def walk(self, steps: int) -> int:
        """So many proposals. Returns at which of all proposals the best was last improved; -1: at none of these."""
        packed, scale = self._packed, self._beta if self._scale is None else self._scale
        # The sum that the walk keeps up to date drifts by rounding: every block starts from a fresh one.
        _, _, improved = _walk(packed, self._choice, self.best, self._cost, self.best_cost, scale, steps, self._state)
        self._cost = float(total_cost(packed, self._choice))
        before, self.done = self.done, self.done + steps
        if improved < 0:
            return -1
        self.best_cost = float(total_cost(packed, self.best))
        if self._scale is None:
            self._scale = self._relative(self.best_cost)
        return before + int(improved)


@register("mcmc")
def search_mcmc(network: CostNetwork, *, time_limit: float | None = None, progress: Progress | None = None,
                seed: int = 0, proposals: int | None = None, beta: float = 2000.0,
                initial: Sequence[int] | None = None) -> Solution:
    """Proposes a random configuration for a random layer, and accepts it with probability
    min(1, exp(beta * (old cost - new cost) / initial cost)).

    It stops when half of its budget has brought no improvement, or the budget is used up. The budget is `proposals`,
    or `time_limit`; with neither, a million proposals. By proposals, the same seed gives the same result.

    Args:
      network: what to minimise.
      time_limit: budget in seconds.
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
    # No limit of memory is an option of this search, so none refuses a network.
    start, budget = time.perf_counter(), Budget.of(time_limit, math.inf)
    for name, value, least in (("seed", seed, 0), ("proposals", 1 if proposals is None else proposals, 1)):
        if not (isinstance(value, (int, np.integer)) and value >= least):
            raise UsageError(f"mcmc: {name} of {shortened(value)}; give a whole number, {least} or more")
    if not as_float(beta) >= 0:
        raise UsageError(f"mcmc: beta of {shortened(beta)}; give a number, 0 or more")
    choice = _start(network, initial)
    try:
        chain = _Chain(pack(network.normalized(budget=budget)), choice, seed, as_float(beta))
    except TimeoutError:  # nothing was proposed
        cost, best, done, history = network.cost(choice.tolist()), choice, 0, []
    else:
        history = _run(chain, start, time_limit, proposals, progress)
        cost, best, done = chain.best_cost, chain.best, chain.done
    if not cost < math.inf:
        raise InfeasibleError("mcmc: met no finite assignment; give a finite one as initial, or use method exact",
                              proven=False)
    assignment = tuple(best.tolist())
    return Solution(assignment, network.cost(assignment), -math.inf, math.inf, False, time.perf_counter() - start,
                    {"proposals": done, "history": tuple(history)})


def _start(network: CostNetwork, initial: Sequence[int] | None) -> np.ndarray:
    """The assignment that the walk starts from."""
    if initial is None:
        return np.array([int(np.argmin(vector)) for vector in network.vectors], np.int64)
    if len(initial) and np.asarray(initial).dtype.kind not in "iu":
        raise UsageError(f"mcmc: initial {initial!r}; give a configuration index per layer")
    network.cost(initial)  # checks that it fits
    return np.array(initial, np.int64)


def _run(chain: _Chain, start: float, time_limit: float | None, proposals: int | None, progress: Progress | None
         ) -> list[tuple[float, float]]:
    """Walks until the budget is used up, or half of it has brought no improvement. Returns (seconds, cost) of the best
    whenever it had become better."""
    total = proposals if proposals is not None else 1_000_000 if time_limit is None else None
    history = [(time.perf_counter() - start, chain.best_cost)]
    last, last_seconds = 0, 0.0
    while len(chain.best):
        steps = _BLOCK if total is None else min(_BLOCK, total - chain.done,
                                                 max(1, last + (total + 1) // 2 - chain.done))
        improved = chain.walk(steps)
        seconds = time.perf_counter() - start
        if improved >= 0:
            last, last_seconds = improved + 1, seconds
            history.append((seconds, chain.best_cost))
        if progress is not None:
            progress(seconds, chain.best_cost, -math.inf)
        if total is not None and (chain.done >= total or 2 * (chain.done - last) >= total):
            break
        if time_limit is not None and (seconds >= time_limit or (
                total is None and 2 * (seconds - last_seconds) >= time_limit)):
            break
    return history
