"""What a strategy that was chosen by simulated steps says of them, for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["is_judged", "judged_text"]

_SECONDS = ("simulated_seconds", "cheapest_simulated_seconds", "shortest_simulated_seconds", "first_simulated_seconds")
_NUMBERS = (*_SECONDS, "overlap")


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


def judged_text(search: Mapping[str, Any]) -> str:
    """How long the simulated step is, whether the order by simulated steps is another than that by costs, and how much
    of the gradients' all-reduces these steps hide; empty where nothing was simulated.

    Args:
      search: of a Strategy.
    """
    if "simulated" not in search:
        return ""

    def milliseconds(name: str) -> str:
        return f"{1e3 * search[name]:.3f} ms"

    text = f"simulated {milliseconds('simulated_seconds')}, the shortest of {search['simulated']}"
    if "shortest_simulated_seconds" in search:  # which was not taken
        text += f" takes {milliseconds('shortest_simulated_seconds')}"
    elif "first_simulated_seconds" in search:
        text += f", of which the first took {milliseconds('first_simulated_seconds')}"
    elif search.get("simulated_rank", 1) > 1:
        text += (f", by cost number {search['simulated_rank']}: the cheapest takes "
                 f"{milliseconds('cheapest_simulated_seconds')}")
    if "overlap" in search:
        text += f"; {100 * search['overlap']:.0f} % of what gradients' all-reduces take is hidden in such steps"
    return text
