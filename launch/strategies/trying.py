"""Which of the strategies that are predicted to be about as fast is the fastest: a few steps of each tell.

A search takes, of all strategies that are nearly as fast, the one whose predicted time errs most to its favour; so what
stands beside it, and errs as it may, is often no slower. Predictions tell which strategies are worth a look, the clock
which of these it is.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.launch.arms.arm import Arm
from pase_mtf.launch.console import Stage
from pase_mtf.launch.data import Batch, Data
from pase_mtf.launch.plan import Plan
from pase_mtf.launch.strategies.finding import SIMPLE_WITHIN, duplicates
from pase_mtf.launch.training import BLOCK, Timing, Trainable
from pase_mtf.strategy.choosing import outdone
from pase_mtf.strategy.measured import MeasuredPrices
from pase_mtf.strategy.search_report import Trial
from pase_mtf.strategy.strategy import Strategy

__all__ = ["Chosen", "Tried", "choose_by_steps", "close_ones", "fastest", "predicted_steps", "try_steps"]

_WITHIN = {"measured": 0.25, "roofline": 0.5}
"""By prices, of a step: by so much predictions of two strategies may err against each other, three times what one errs
by in the median (docs/benchmarks/accuracy.md, docs/benchmarks/cluster.md)."""
_DEVIATION = 0.5
"""Of that, the standard deviation of the logarithm of a prediction: 1.5 times the median error, as of a normal
distribution."""
_TURNS = 8
_ENOUGH = 4
"""Turns after which the means of two arms tell them apart, if they do."""
_APART = 2.5
"""Standard errors between two arms that are told apart."""
_UNKNOWN, _LEAST = 0.1, 0.002
"""The deviation of a turn of which nothing is known, for it was the only one; and what no turn deviates less by."""
_SHARE = 0.15
"""Of --measure_seconds: no further turn is begun after it."""
_CLEARLY = 1.2
"""Times the fastest: what is slower drops out after one turn. What is nearer has another one, however little its steps
differ within a turn: a moment in which the machine is slower looks like a slower arm."""
_FEWEST = 3
"""Steps of a turn that takes longer than that: a median needs no more."""


class Chosen(NamedTuple):
    """The arms of a run after steps of some were tried.

    Attributes:
      strategies: arm -> strategy.
      same: arm -> the arm with the same strategy that is trained in its stead.
      arms: those that are trained, as if they had not done a step.
    """

    strategies: dict[str, Strategy]
    same: dict[str, str]
    arms: list[Arm]


class Tried(NamedTuple):
    """Steps of some arms that took turns.

    Attributes:
      timings: arm -> what its steps took.
      turns: arm -> the median of every turn that it took part in, from the first on, in seconds.
    """

    timings: dict[str, Timing]
    turns: dict[str, list[float]]


def choose_by_steps(plan: Plan, graph: ComputationGraph, names: Sequence[str], strategies: Mapping[str, Strategy],
                    arms: Sequence[Arm], data: Data, prices: MeasuredPrices | None) -> Chosen | None:
    """Tries the steps of the arms that are predicted to take about as long as that of the search, which then takes the
    strategy of the fastest, by these steps and by prediction, or data parallelism where that is as fast.

    Args:
      plan: of the run.
      graph: of its program.
      names: of all its arms, in the order of the table.
      strategies: arm -> strategy; stock Mesh-TensorFlow has none.
      arms: those that were built: one of every strategy.
      data: whose first batches are taken.
      prices: of measured kernels, where the predictions were made of these.

    Returns:
      None where nothing was tried: no arm searches, or predictions tell the arms apart, or are of another machine.
    """
    searched = next((arm.name for arm in plan.options.arms if arm.method == "search"), None)
    if searched is None or searched not in strategies or not plan.options.trial or plan.elsewhere:
        return None
    predicted = predicted_steps({arm.name: strategies[arm.name] for arm in arms if arm.name in strategies})
    within = _WITHIN["measured" if prices else "roofline"]
    close = close_ones(predicted, duplicates(strategies).get(searched, searched), within)
    tried = [arm for arm in arms if arm.name in close]
    if len(tried) < 2:
        return None
    with Stage(f"trial steps of {', '.join(close)}"):
        batches = list(itertools.islice(data.batches(plan.first_step), BLOCK))
        found = try_steps(tried, batches, _SHARE * plan.options.measure_seconds)
        for arm in tried:
            arm.restart()
    simple = next((arm.name for arm in plan.options.arms if arm.method == "data_parallel"), None)
    taken = fastest(found.turns, predicted, _DEVIATION * within,
                    duplicates(strategies).get(simple, simple) if simple else None)
    best = _instead(strategies[searched], strategies[taken], graph, prices)
    trial = Trial(milliseconds={name: [round(1e3 * seconds, 2) for seconds in (timing.median, timing.spread)]
                                for name, timing in found.timings.items()},
                  steps=max(timing.steps for timing in found.timings.values()), taken=taken)
    after = {**strategies, searched: dataclasses.replace(best, search={**best.search, "trial": trial})}
    return _rearranged(names, strategies, after, arms)


def _instead(found: Strategy, taken: Strategy, graph: ComputationGraph, prices: MeasuredPrices | None) -> Strategy:
    """What is taken, under the name of what a search found."""
    if prices:
        return prices.again(found, taken.configurations)
    if taken.configurations == found.configurations:
        return found
    search = outdone(found.search, graph, taken.devices, taken.configurations, taken.seconds)
    return dataclasses.replace(taken, name=found.name, search=search)


def predicted_steps(strategies: Mapping[str, Strategy]) -> dict[str, float]:
    """Arm -> seconds of its step as predicted: of simulated steps where all are simulated, for these judge."""
    simulated = {name: strategy.simulated_seconds for name, strategy in strategies.items()}
    known = {name: seconds for name, seconds in simulated.items() if seconds is not None}
    return known if len(known) == len(simulated) else {name: one.seconds for name, one in strategies.items()}


def close_ones(seconds: Mapping[str, float], searched: str, within: float) -> list[str]:
    """The arms whose steps are predicted to be nearly as short as that of the searched one, which is the first.

    Args:
      seconds: arm -> predicted step.
      searched: the arm.
      within: the fraction of its step.
    """
    others = [name for name, value in seconds.items()
              if name != searched and value <= (1.0 + within) * seconds[searched]]
    return [searched, *others]


def fastest(turns: Mapping[str, Sequence[float]], predicted: Mapping[str, float], deviation: float,
            simple: str | None = None) -> str:
    """The arm whose step is expected to be the shortest, by its turns and by prediction; or a simple one, where that is
    expected to take no longer than by `SIMPLE_WITHIN`, or no more was promised and turns do not show it clearly.

    How far an arm is behind another is the mean of what turns say and what was predicted, as logarithms, weighed by the
    inverse of their variances: few steps on a restless machine say little against a prediction that promises much, and
    many say more than any prediction.

    Args:
      turns: as of `Tried`.
      predicted: arm -> seconds of its step.
      deviation: standard deviation of the logarithm of a prediction.
      simple: the arm.
    """
    first, behind = _behind(turns)
    expected, errors = {first: 0.0}, {first: 0.0}
    for name, (mean, error) in behind.items():
        promised = math.log(predicted[name] / predicted[first])
        by_turns, by_prediction = error ** -2, deviation ** -2 / 2
        expected[name] = (mean * by_turns + promised * by_prediction) / (by_turns + by_prediction)
        errors[name] = (by_turns + by_prediction) ** -0.5
    best = min(expected, key=lambda name: expected[name])
    if simple is not None and simple in expected:
        unclear = predicted[simple] <= (1.0 + SIMPLE_WITHIN) * predicted[best]
        doubt = _APART * math.hypot(errors[simple], errors[best]) if unclear else 0.0
        if expected[simple] - expected[best] <= SIMPLE_WITHIN + doubt:
            return simple
    return best


def _behind(turns: Mapping[str, Sequence[float]]) -> tuple[str, dict[str, tuple[float, float]]]:
    """The arm that is ahead of those with most turns, and of every other one how far it is behind, as the median of a
    logarithm, and the standard error of that. Compared turn by turn: what slows the machine down slows both, and what
    strikes one of them in one turn moves no median."""
    most = max(map(len, turns.values()))
    first = min((name for name in turns if len(turns[name]) == most), key=lambda name: statistics.median(turns[name]))
    apart = {name: [math.log(one / other) for one, other in zip(taken, turns[first], strict=False)]
             for name, taken in turns.items() if name != first}
    medians = {name: statistics.median(ratios) for name, ratios in apart.items()}
    squares = [(ratio - medians[name]) ** 2 for name, ratios in apart.items() for ratio in ratios]
    free = len(squares) - len(medians)
    deviation = max(_LEAST, math.sqrt(sum(squares) / free)) if free else _UNKNOWN
    return first, {name: (medians[name], deviation / math.sqrt(len(ratios))) for name, ratios in apart.items()}


def try_steps(arms: Sequence[Trainable], batches: Sequence[Batch], seconds: float,
              clock: Callable[[], float] = time.monotonic) -> Tried:
    """How long steps of some arms take: they take turns, and those that are clearly slower than another drop out.

    Args:
      arms: things with a name and `step(batch) -> (loss, seconds)`.
      batches: of one turn.
      seconds: after which no turn is begun, but for the first that counts, which is shorter where its steps take long.
      clock: tells the time.

    Returns:
      What they took, those of the first turn left out: they are slower.
    """
    begin, left = clock(), list(arms)
    count, round_seconds = 2, 0.0  # of the first turn, whose second steps tell how long others will take
    walls: dict[str, list[list[float]]] = {arm.name: [] for arm in arms}
    for turn in range(_TURNS + 1):
        if len(left) < 2 or (turn > 1 and clock() - begin >= seconds):
            break
        first = turn % len(left)
        for arm in (*left[first:], *left[:first]):
            taken = [arm.step(batch)[1] for batch in batches[:count]]
            walls[arm.name] += [taken] if turn else []
            round_seconds += 0.0 if turn else taken[-1]
        if not turn:
            fitting = (seconds - (clock() - begin)) / max(round_seconds, 1e-9)
            count = int(max(_FEWEST, min(len(batches), fitting)))
        else:
            timings = _timings(walls)
            limit = min(timing.upper for timing in timings.values()) * (_CLEARLY if turn == 1 else 1.0)
            left = [arm for arm in left if timings[arm.name].lower <= limit]
            if turn >= _ENOUGH:
                told = {name for name, (mean, error) in _behind(_medians(walls))[1].items() if mean > _APART * error}
                left = [arm for arm in left if arm.name not in told]
    return Tried(_timings(walls), _medians(walls))


def _timings(walls: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, Timing]:
    return {name: timing for name, turns in walls.items() if (timing := Timing.of([*itertools.chain(*turns)]))}


def _medians(walls: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, list[float]]:
    return {name: [statistics.median(turn) for turn in turns] for name, turns in walls.items()}


def _rearranged(names: Sequence[str], before: Mapping[str, Strategy], after: dict[str, Strategy],
                arms: Sequence[Arm]) -> Chosen:
    """The arms that were built, under the names that their strategies have now; what none has any more is closed."""
    same = duplicates(after)
    built = {before[arm.name].configurations if arm.name in before else arm.name: arm for arm in arms}
    kept = []
    for name in names:
        if name not in same:
            arm = built.pop(after[name].configurations if name in after else name)
            arm.name = name
            kept.append(arm)
    for arm in built.values():
        arm.close()
    return Chosen(after, same, kept)
