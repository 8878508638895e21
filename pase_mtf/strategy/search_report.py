"""What a strategy says of the search that found it: the entries of `Strategy.search`."""

from __future__ import annotations

import functools
import math
import typing
from collections.abc import Callable, Mapping

from typing_extensions import TypedDict

from pase_mtf.arguments import as_float
from pase_mtf.errors import shortened

__all__ = ["KernelsReport", "PricedByKernels", "SearchReport", "Trial", "are_sentences", "foreign_entry", "is_number"]

_MOST_COUNTED = 2 ** 53
"""What a float tells apart: no search counts as many."""


class Trial(TypedDict):
    """Steps that were tried to choose between strategies of nearly the same predicted time.

    Attributes:
      milliseconds: arm -> median of its steps, and half the distance of the quartiles.
      steps: how many of each, at most.
      taken: the arm whose strategy was taken.
    """

    milliseconds: dict[str, list[float]]
    steps: int
    taken: str


class _Counts(TypedDict):
    of_strategy: int
    measured_of_strategy: int
    seen: int
    measured: int
    rounds: int
    seconds: float


class KernelsReport(_Counts, total=False):
    """The kernels that a strategy is priced by.

    Attributes:
      of_strategy, measured_of_strategy: how many it consists of, and of these were measured.
      seen, measured: how many the search came across, and of these were measured, when it was over.
      rounds, seconds: of measuring until then.
      untraced: what stands for kernels that nobody knows or could time; not there where none does.
    """

    untraced: list[str]


class PricedByKernels(TypedDict, total=False):
    """What a search that may be priced by kernels says of them.

    Attributes:
      kernels: where it is.
    """

    kernels: KernelsReport


class SearchReport(PricedByKernels, total=False):
    """How a strategy was found. Of one that was given, most is missing.

    Attributes:
      method: of the search.
      seconds, build_seconds: of the search, and of building its network.
      optimal: whether the cost is proven to be the least.
      gap, lower_bound: by what fraction of the least the cost may be above it (inf: no bound is known; a Solution's gap
        is a fraction of the cost), and the seconds it cannot be below.
      memory_limit: bytes per device within which it was searched; not there without a limit.
      layers, configurations: of the network, the second over all layers.
      assumed: what the predictions rest on that is not known of the graph.
      useful_devices, suggested_devices: how many devices do work of their own, and how many would.
      simpler, best_seconds: by which name a simpler strategy was taken, and what was predicted of the best.
      simulated: how many strategies were simulated.
      simulated_seconds: the simulated step of this one.
      simulated_rank: its place among them by cost, from 1.
      cheapest_simulated_seconds, shortest_simulated_seconds, first_simulated_seconds: the simulated step of the
        cheapest, of the shortest where it was not taken, and of the one that a chain began with.
      overlap: the fraction of gradients' all-reduces that these steps hide.
      trial: where steps were tried.
    """

    method: str
    seconds: float
    build_seconds: float
    optimal: bool
    gap: float
    lower_bound: float
    memory_limit: float
    layers: int
    configurations: int
    assumed: list[str]
    useful_devices: float
    suggested_devices: int | None
    simpler: str
    best_seconds: float
    simulated: int
    simulated_seconds: float
    simulated_rank: int
    cheapest_simulated_seconds: float
    shortest_simulated_seconds: float
    first_simulated_seconds: float
    overlap: float
    trial: Trial


def is_number(value: object) -> bool:
    """Whether what stands in a file is a number that a float can be: an integer may be larger than any."""
    return type(value) is float or (type(value) is int and math.isfinite(as_float(value)))


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MOST_COUNTED


def are_sentences(value: object) -> bool:
    """Whether what stands in a file is a list of strings."""
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


_CHECKS: dict[object, Callable[[object], bool]] = {
    float: is_number, int: _is_count, bool: lambda value: isinstance(value, bool),
    str: lambda value: isinstance(value, str), list[str]: are_sentences}
"""Declared type of an entry of a SearchReport -> whether something is of it; the others have checks of their own."""


@functools.cache
def _declared() -> dict[str, object]:
    return typing.get_type_hints(SearchReport)


def foreign_entry(search: Mapping[str, object]) -> str:
    """The first entry of what stands in a file as a search that is of another type than a search tells, with what
    stands there; empty where none is."""
    for name, declared in _declared().items():
        check = _CHECKS.get(declared)
        if name in search and check is not None and not check(search[name]):
            return f"{name} of {shortened(search[name])}"
    return ""
