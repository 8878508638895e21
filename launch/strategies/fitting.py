"""In how many microbatches a run computes its batch, and which blocks of its model twice: those with which its step is
fastest within the memory limit.

Every number of microbatches and every set of blocks is a program of its own, with strategies of its own. While memory
is no matter, nothing of that makes a step cheaper: neither to compute more again, nor to cut every microbatch into
several, for what splits a part of a microbatch splits the microbatch, and takes no longer there than for all parts.
(Of numbers that do not divide each other that is not so: halves of twelve examples do not split over four devices,
thirds do.) So what the cheapest strategy of a program takes without a limit bounds all programs that compute more
again, in as many microbatches or in a multiple. They are looked at in the order of that bound, until it is no less than
what was found.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Sequence

from pase_mtf.amounts import bytes_text
from pase_mtf.errors import InfeasibleError
from pase_mtf.launch.arms.program import exported, mesh_graph
from pase_mtf.launch.console import Stage
from pase_mtf.launch.flag_values import BY_BATCH
from pase_mtf.launch.plan import Plan
from pase_mtf.launch.reports.fitting import Choice, Fitting
from pase_mtf.launch.strategies.finding import strategy_by_hand
from pase_mtf.machine.machine import Machine
from pase_mtf.models.blocks import ALL, blocks_of, choices_of
from pase_mtf.models.checks import divisors
from pase_mtf.models.presets import BATCH_STATISTICS
from pase_mtf.strategy.strategy import Strategy
from pase_mtf.strategy.warm import ready
from pase_mtf.strategy.within import Priced, StrategiesWithin

__all__ = ["Counts", "cheapest_counts", "fitting_program"]

Counts = tuple[int, ...]
"""The number of microbatches, and how many blocks of every choice are computed again."""

_ROUNDING = 1e-9
"""Of sums of seconds, relative."""

_SECONDS = 60.0
"""After which no further program is looked at; a graph of thousands of operations takes seconds to export."""

_HALF = 0.5
"""Of that time, after which the most microbatches, with everything computed again, come first where nothing fits yet:
they need least."""

_SECONDS_OF_PROGRAM = 2.0, 5.0
"""Of a search within the limit, where programs are many, and where they are few; what it has not proven by then is part
of the gap."""

_SEARCHES, _LEAST_SECONDS = 3, 0.5
"""Of a program: without a limit, for the least memory, within the limit; each has so much of the time that is left, but
no less than so many seconds."""


def cheapest_counts(pieces: Sequence[int], most: Sequence[int], bound_of: Callable[[Counts], float],
                    price: Callable[[Counts], Priced], time_limit: float = math.inf,
                    ) -> tuple[dict[Counts, Priced], float]:
    """Looks for the counts whose program is the fastest within a limit.

    Args:
      pieces: the numbers of microbatches that are offered, the fewest first.
      most: the largest value of every other count; all begin at 0.
      bound_of: the seconds that a step of counts takes without a limit, at least; larger counts must not have less, of
        microbatches a multiple must not.
      price: what it takes within it.
      time_limit: seconds after which nothing more is priced; but for the ends of the other counts in the fewest pieces.

    Returns:
      What was priced, and a lower bound of the seconds within the limit of all counts.
    """
    start, begin = time.monotonic(), (0,) * len(most)
    end, half = start + time_limit, start + _HALF * time_limit
    known: dict[Counts, Priced] = {}
    exact: dict[Counts, float] = {}

    def bound(counts: Counts) -> float:
        """As far as it is known yet."""
        return max((seconds for less, seconds in exact.items() if counts[0] % less[0] == 0 and all(
            few <= many for few, many in zip(less[1:], counts[1:], strict=True))), default=0.0)

    def worth(seconds: float) -> bool:
        """Whether what takes so long, at least, may be faster than what was found, and there is time to look."""
        return (math.isinf(best()) or seconds * (1 + _ROUNDING) < best()) and time.monotonic() < end

    def best() -> float:
        """Seconds of the fastest that was found."""
        return min((priced.seconds for priced in known.values()), default=math.inf)

    ends = deque(pieces)
    while ends:  # nothing and everything computed again: mostly one of them fits, if anything does
        late = bool(known) and math.isinf(best()) and time.monotonic() >= half
        number = ends.pop() if late else ends.popleft()
        both = dict.fromkeys(((number, *begin), (number, *most)))
        for counts in reversed(both) if late else both:
            if number == pieces[0] or worth(bound(counts)):
                exact[counts] = max(bound(counts), bound_of(counts))
                if number == pieces[0] or worth(exact[counts]):
                    known[counts] = price(counts)
    left = {number: [(bound((number, *begin)), (number, *begin), 1)] for number in pieces}
    for turn in itertools.count():
        lowest = min((heap for heap in left.values() if heap), key=lambda heap: heap[0][0], default=[])
        if not lowest or not worth(lowest[0][0]):
            break
        # By turns the lowest bound, for the proof, and as many microbatches as the best, where better ones may be near.
        alike = left[min(known, key=lambda counts: known[counts].seconds)[0]]
        heap = alike if turn % 2 and alike and worth(alike[0][0]) else lowest
        seconds, counts, last = heapq.heappop(heap)
        if counts not in exact and bound(counts) <= seconds:
            exact[counts] = max(seconds, bound_of(counts))
        if bound(counts) > seconds:
            heapq.heappush(heap, (bound(counts), counts, last))
            continue
        if counts not in known:
            known[counts] = price(counts)
        for place in range(last, len(counts)):  # counts grow in their order: every set is reached on one way
            if counts[place] < most[place - 1]:
                heapq.heappush(heap, (seconds, (*counts[:place], counts[place] + 1, *counts[place + 1:]), place))
    least = min([*(max(seconds, bound(counts)) for heap in left.values() for seconds, counts, _ in heap),
                 *(priced.least for priced in known.values())])
    return known, best() if least * (1 + _ROUNDING) >= best() else least


def fitting_program(plan: Plan, machine: Machine) -> Fitting:
    """The number of microbatches and the blocks to compute again, of what the run leaves open: those with which the
    strategy of --strategy is fastest within --memory_limit.

    Args:
      plan: of the run.
      machine: the devices.

    Raises:
      InfeasibleError: with none of the programs that are offered a strategy keeps to the limit.
    """
    options, limit = plan.options, plan.options.bytes_per_device(machine)
    pieces = (plan.microbatches,) if options.microbatch_count else _pieces(plan)
    names = None if options.recomputed is not None else blocks_of(mesh_graph(plan.in_microbatches(1).recomputing(())))
    choices = choices_of(names or ())

    def chosen(counts: Counts) -> Choice:
        return Choice(counts[0], plan.recomputed if names is None else tuple(
            name for choice, count in zip(choices, counts[1:], strict=True) for name in choice[:count]))

    least, most = _SECONDS_OF_PROGRAM
    offered = len(pieces) * math.prod(len(choice) + 1 for choice in choices)
    with Stage("compiled"):  # where nobody has yet, that takes longer than all programs may
        ready(lambda text: None)  # the stage tells it
    programs = _Programs(plan, machine, limit, min(most, max(least, _SECONDS / offered)), time.monotonic() + _SECONDS)
    with Stage("memory"):
        known, bound = cheapest_counts(pieces, list(map(len, choices)), lambda counts: programs.bound(chosen(counts)),
                                       lambda counts: programs.price(chosen(counts)), _SECONDS)
    tried = {chosen(counts): priced for counts, priced in known.items()}
    best = min(tried, key=lambda choice: (tried[choice].seconds, choice.microbatches, len(choice.blocks)))
    if math.isinf(tried[best].seconds):
        raise InfeasibleError(_nothing_fits(plan, limit, pieces, names, math.isinf(bound), machine))
    return Fitting(best, options.microbatch_count is None, None if names is None else len(names), tried, bound,
                   tried[best].seconds, limit, options.prices == "measured")


def _pieces(plan: Plan) -> tuple[int, ...]:
    """The numbers of microbatches that a run may take."""
    batch = plan.options.batch // _fewest_examples(plan)
    return tuple(divisors(batch, 1 if plan.options.model in BATCH_STATISTICS else batch))


def _fewest_examples(plan: Plan) -> int:
    """Of a microbatch, which some strategies split over all devices."""
    return plan.devices.count if plan.options.arms[0].method in BY_BATCH else 1


def _nothing_fits(plan: Plan, limit: float, pieces: Sequence[int], blocks: Sequence[str] | None, proven: bool,
                  machine: Machine) -> str:
    """Why there is no program, and what to do.

    Args:
      plan: of the run.
      limit: bytes per device.
      pieces: the numbers of microbatches that were offered.
      blocks: that might have been computed again; None: that was not open.
      proven: whether it is; else none was found in the time that there is.
      machine: the devices.
    """
    options, flags, scope = plan.options, list[str](), list[str]()
    if options.microbatch_count is None:
        flags.append("--microbatches=auto")
        why = f" ({options.model} normalises over the batch)" if options.model in BATCH_STATISTICS else ""
        scope.append(f"in up to {pieces[-1]} microbatches" if pieces[-1] > 1 else f"in one microbatch{why}")
    if blocks is not None:
        flags.append("--recompute=auto")
        # Of many blocks only the first few of every kind are offered: of other sets nothing is known.
        first = "" if all(len(choice) == 1 for choice in choices_of(blocks)) else ", the first of each kind first,"
        scope.append(f"whichever of {len(blocks)} blocks{first} are computed again")
    found = "no strategy keeps" if proven else "no strategy was found that keeps"
    *others, last = [*_remedies(plan), *(["a larger --memory_limit"] if options.may_allow_more(machine) else [])]
    return (f"{' '.join(flags)}: {found} to {bytes_text(limit)} per device {', '.join(scope)}; take "
            f"{', '.join(others)}, or {last}")


def _remedies(plan: Plan) -> list[str]:
    """What may make a run fit: what it has not left open, where its batch and its model have more of it, and smaller
    sizes."""
    options, found = plan.options, list[str]()
    if options.microbatch_count is not None and _pieces(plan)[-1] > plan.microbatches:
        found.append("--microbatches=auto")
    if options.recomputed is not None and ALL not in options.recomputed and (
            set(blocks_of(mesh_graph(plan.in_microbatches(1)))) - set(options.recomputed)):
        found.append("--recompute=auto")
    smaller = "--batch or --preset" if options.batch > _fewest_examples(plan) else "--preset"
    return [*found, f"a smaller {smaller}", "more devices"]


class _Programs:
    """The programs of a run that differ in what is open, each exported and searched once."""

    def __init__(self, plan: Plan, machine: Machine, limit: float, seconds: float, end: float) -> None:
        """Takes the run, the devices, bytes per device, for how long each program may be searched, and when all are to
        be (`time.monotonic()`)."""
        self._plan, self._machine, self._limit, self._seconds, self._end = plan, machine, limit, seconds, end
        self._known: dict[Choice, StrategiesWithin | Strategy | None] = {}

    def bound(self, choice: Choice) -> float:
        """Seconds of a step without a limit, at least."""
        found = self._found(choice)
        return math.inf if found is None else found.seconds if isinstance(found, Strategy) else found.free.least

    def price(self, choice: Choice) -> Priced:
        """What the strategies take within the limit."""
        found = self._found(choice)
        if isinstance(found, StrategiesWithin):
            return found.within(self._limit)
        if found is None or found.memory_bytes > self._limit:
            return Priced(math.inf, math.inf, math.nan)
        return Priced(found.seconds, found.seconds, found.memory_bytes)

    def _found(self, choice: Choice) -> StrategiesWithin | Strategy | None:
        """The strategy, where people have written it (None: not for such microbatches), or what is searched."""
        if choice not in self._known:
            plan = self._plan.in_microbatches(choice.microbatches).recomputing(choice.blocks)
            graph, _ = exported(plan)
            try:
                self._known[choice] = strategy_by_hand(plan, graph, self._machine) or StrategiesWithin(
                    graph, self._machine, plan.devices.count, min(self._seconds, max(
                        (self._end - time.monotonic()) / _SEARCHES, _LEAST_SECONDS)))
            except InfeasibleError:
                if choice.microbatches == 1:
                    raise
                self._known[choice] = None
        return self._known[choice]
