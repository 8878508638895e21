"""What a search returns, and the searches by name."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from pase_mtf.arguments import as_float, checked_arguments
from pase_mtf.errors import UsageError, nearest, shortened
from pase_mtf.search.bar import ProgressBar
from pase_mtf.search.budget import Budget
from pase_mtf.search.network import CostNetwork
from pase_mtf.search.proof import Certificate

__all__ = ["Progress", "Solution", "methods", "register", "relative_gap", "solve"]


class Progress(Protocol):
    """Called now and then during a search with what is known: seconds so far, cost of the best assignment (inf: none
    yet) and lower bound (-inf: none yet)."""

    def __call__(self, seconds: float, cost: float, lower_bound: float) -> None:
        """Takes note."""


@dataclasses.dataclass(frozen=True)
class Solution:
    """What a search found.

    Attributes:
      assignment: a configuration index per layer.
      cost: its cost, computed anew from the network.
      lower_bound: no assignment costs less (up to rounding: see `optimal`); -inf from a search that has no bound.
      gap: (cost - lower_bound) / |cost|; 0 if optimal, inf without a bound.
      optimal: proven: no assignment is cheaper by more than 1e-12 of the sum of the absolute values of its parts; in a
        network of integers where that sum is at most 2e12, none is cheaper at all. Where costs of both signs cancel to
        less than sums of them may round off, what a certificate that was checked proves, and nothing else.
      seconds: wall time of the search.
      statistics: sizes and counts of this search, by name.
      certificate: what proves the bound, for `check_certificate`; None from a search that proves nothing.
    """

    assignment: tuple[int, ...]
    cost: float
    lower_bound: float
    gap: float
    optimal: bool
    seconds: float
    statistics: dict[str, Any]
    certificate: Certificate | None = None


def relative_gap(cost: float, lower_bound: float) -> float:
    """How far the cost can be above the least one, as a fraction of the cost: with a half of it, it may be twice the
    least."""
    if cost <= lower_bound:
        return 0.0
    if not math.isfinite(cost) or not math.isfinite(lower_bound) or cost == 0:
        return math.inf
    return (cost - lower_bound) / abs(cost)


_METHODS: dict[str, Callable[..., Solution]] = {}


def register(name: str) -> Callable[[Callable[..., Solution]], Callable[..., Solution]]:
    """Decorator: makes a search known to `solve` under a name.

    It is called as search(network, time_limit=seconds or None, gap=relative gap to stop at, progress=callable or None,
    **options) and returns a Solution; `solve` validates the network first and sets `seconds`. Keywords that do not
    count for it are none of its parameters: a caller who sets a time limit or a gap is told so then.

    Raises:
      UsageError: the name is taken.
    """
    def add(function: Callable[..., Solution]) -> Callable[..., Solution]:
        if name in _METHODS:
            raise UsageError(f"a search named {name!r} exists already; choose another name")
        _METHODS[name] = function
        return function
    return add


def methods() -> tuple[str, ...]:
    """The names of all searches."""
    return tuple(sorted(_METHODS))


@checked_arguments
def solve(network: CostNetwork, method: str = "exact", *, time_limit: float | None = None, gap: float = 0.0,
          progress: Progress | bool | None = None, **options: object) -> Solution:
    """Finds a cheap assignment.

    Args:
      network: what to minimise.
      method: a name of `methods()`.
      time_limit: seconds after which the search returns the best it has, with an honest gap; of searches that can stop
        early. None: no limit.
      gap: at which the search may stop, a fraction of the cost; of searches that have a bound before they are done.
      progress: told how the search is getting on. True: shows a progress bar once that takes more than a second.
      **options: of that method; see its docstring.

    Returns:
      the best assignment found.

    Raises:
      UsageError: unknown method or option, an argument out of range, or a network that is not valid.
      InfeasibleError: no assignment is finite, or none satisfies the constraints.
    """
    if method not in _METHODS:
        raise UsageError(f"unknown search {method!r}; {nearest(method, _METHODS)}")
    start, budget = time.perf_counter(), Budget.of(time_limit)
    if not (least_gap := as_float(gap)) >= 0:
        raise UsageError(f"gap of {shortened(gap)}; give 0 or more")
    gap = least_gap
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        raise UsageError(f"progress={progress!r}; give True, or a function of seconds, cost and lower bound")
    network.validate()
    function = _METHODS[method]
    known = _options(function)
    given = [*options, *(["time_limit"] if time_limit is not None else []), *(["gap"] if gap else [])]
    for name in given:
        if known is not None and name not in known:
            raise UsageError(f"search {method!r} has no option {name!r}; {nearest(name, known)}")
    if options.get("initial") is not None:  # what searches that begin with an assignment call it
        network.cost(cast(Sequence[int], options["initial"]))  # says what is wrong with it
    with ProgressBar() as bar:
        told = (bar if progress else None) if isinstance(progress, bool) else progress
        common = {"time_limit": budget.time_limit(), "gap": gap, "progress": told}  # what the checks took is part of it
        options |= {name: value for name, value in common.items() if known is None or name in known}
        solution = function(network, **options)
    return dataclasses.replace(solution, seconds=time.perf_counter() - start)


@functools.cache
def _options(function: Callable[..., Solution]) -> frozenset[str] | None:
    """The options a search takes; None if it takes any."""
    _, *parameters = inspect.signature(function).parameters.values()  # the first is the network
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters
                     if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD))
