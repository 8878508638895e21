"""FlexFlow's search as in its paper: a Markov chain over strategies that is told the simulated time of each step."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pase_mtf.arguments import as_float
from pase_mtf.cost.build import PricedNetwork
from pase_mtf.errors import UsageError, shortened
from pase_mtf.simulator.simulate import Simulator

__all__ = ["SimulatedChain", "search_simulated"]


class SimulatedChain(NamedTuple):
    """What the chain found.

    Attributes:
      assignment: the best strategy it met, an index of a configuration per layer.
      seconds: the simulated step under it.
      first_seconds: that of the assignment it started from.
      proposals: how many it looked at.
    """

    assignment: tuple[int, ...]
    seconds: float
    first_seconds: float
    proposals: int


def search_simulated(priced: PricedNetwork, initial: Sequence[int], *, proposals: int | None = None,
                     time_limit: float | None = None, seed: int = 0, beta: float = 2000.0) -> SimulatedChain:
    """Proposes a random configuration for a random layer, simulates what changes (`Simulator.change`), and accepts it
    with probability min(1, exp(beta * (old time - new time) / initial time)); Jia et al. 2019, section 6.

    It stops when half of its budget has brought no improvement, or the budget is used up.

    Args:
      priced: the layers, their configurations, the machine.
      initial: the assignment to start from, such as data parallelism.
      proposals: budget in proposals; the same seed then gives the same result.
      time_limit: budget in seconds, from when the first step is simulated. One of the two has to be given.
      seed: of the random numbers.
      beta: inverse temperature, relative to the time at the start.

    Raises:
      UsageError: no budget, or none that is positive; an argument that is no such number.
    """
    if proposals is not None and not (isinstance(proposals, (int, np.integer)) and proposals > 0):
        raise UsageError(f"proposals={shortened(proposals)}: give a positive whole number")
    seconds, steepness = math.inf if time_limit is None else as_float(time_limit), as_float(beta)
    if not seconds > 0:
        raise UsageError(f"time_limit={shortened(time_limit)}: give a positive number")
    if not isinstance(seed, (int, np.integer)):
        raise UsageError(f"seed={shortened(seed)}: give a whole number")
    if not steepness >= 0:
        raise UsageError(f"beta={shortened(beta)}: give a number, 0 or more")
    if proposals is None and math.isinf(seconds):
        raise UsageError("a chain without end; give proposals= or time_limit=")
    draw, simulator = random.Random(int(seed)), Simulator(priced)
    now = first = simulator.seconds(initial)
    begun = time.perf_counter()  # to make the first step's tasks may take longer than the budget
    assignment, best, best_seconds, scale = list(initial), tuple(initial), now, steepness / now if now else 0.0
    done, improved = 0, 0.0
    while True:
        used = max(done / proposals if proposals else 0.0, (time.perf_counter() - begun) / seconds)
        if used >= 1.0 or used - improved > 0.5:
            return SimulatedChain(best, best_seconds, first, done)
        layer = draw.randrange(len(assignment))
        choice, chance, before = draw.randrange(len(priced.configurations[layer])), draw.random(), assignment[layer]
        try:
            then = simulator.change(layer, choice)
        except UsageError:  # too long to be simulated: nothing to go on from
            then = math.inf
        done += 1
        if then <= now or chance < math.exp(scale * (now - then)):
            assignment[layer], now = choice, then
        else:
            simulator.change(layer, before)
        if now < best_seconds:
            best, best_seconds, improved = tuple(assignment), now, used
