"""What a strategy that was chosen by steps, simulated ones or such as were tried, says of them, for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pase_mtf.strategy.search_report import SearchReport, Trial

__all__ = ["is_judged", "is_trial", "judged_text", "trial_text"]

_SECONDS = ("simulated_seconds", "cheapest_simulated_seconds", "shortest_simulated_seconds", "first_simulated_seconds")
_NUMBERS = (*_SECONDS, "overlap")


def is_trial(found: object) -> bool:
    """Whether what stands in a file as the "trial" of a search is one."""
    if not (isinstance(found, dict) and set(found) == set(Trial.__annotations__)):
        return False
    times, taken = found["milliseconds"], found["taken"]
    return (isinstance(times, dict) and isinstance(taken, str) and taken in times and type(found["steps"]) is int
            and all(isinstance(entry, list) and len(entry) == 2 and all(type(value) is float for value in entry)
                    for entry in times.values()))


def trial_text(search: SearchReport) -> str:
    """Which steps took how long when they were tried, and whose strategy was taken; empty where none were tried.

    Args:
      search: of a Strategy.
    """
    found = search.get("trial")
    if not found:
        return ""
    times = ", ".join(f"{arm} {median:.1f} ± {spread:.1f} ms{' (taken)' * (arm == found['taken'])}"
                      for arm, (median, spread) in found["milliseconds"].items())
    return f"chosen by up to {found['steps']} steps of each: {times}"


def is_judged(search: Mapping[str, Any]) -> bool:
    """Whether what stands in a file is what searches tell of simulated steps, or nothing of it."""
    if "simulated" not in search:
        return not any(name in search for name in (*_NUMBERS, "simulated_rank"))
    return ("simulated_seconds" in search
            and all(type(search.get(name, 0.0)) in (int, float) for name in _NUMBERS)
            and all(type(search.get(name, 1)) is int and search.get(name, 1) > 0
                    for name in ("simulated", "simulated_rank"))
            and 0.0 <= search.get("overlap", 0.0) <= 1.0
            and ("simulated_rank" in search) == ("cheapest_simulated_seconds" in search))


def judged_text(search: SearchReport) -> str:
    """How long the simulated step is, whether the order by simulated steps is another than that by costs, and how much
    of the gradients' all-reduces these steps hide; empty where nothing was simulated.

    Args:
      search: of a Strategy.
    """
    if "simulated" not in search:
        return ""

    def milliseconds(seconds: float) -> str:
        return f"{1e3 * seconds:.3f} ms"

    text = f"simulated {milliseconds(search['simulated_seconds'])}, the shortest of {search['simulated']}"
    if "shortest_simulated_seconds" in search:  # which was not taken
        text += f" takes {milliseconds(search['shortest_simulated_seconds'])}"
    if "first_simulated_seconds" in search:
        text += f", of which the first took {milliseconds(search['first_simulated_seconds'])}"
    if search.get("simulated_rank", 1) > 1:
        text += (f", by cost number {search['simulated_rank']}: the cheapest takes "
                 f"{milliseconds(search['cheapest_simulated_seconds'])}")
    if "overlap" in search:
        text += f"; {100 * search['overlap']:.0f} % of what gradients' all-reduces take is hidden in such steps"
    return text
