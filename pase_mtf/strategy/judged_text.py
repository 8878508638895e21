"""What a strategy that was chosen by simulated steps says of them, for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["is_judged", "judged_text"]

_SECONDS = ("simulated_seconds", "cheapest_simulated_seconds", "shortest_simulated_seconds", "first_simulated_seconds")


def is_judged(search: Mapping[str, Any]) -> bool:
    """Whether what stands in a file is what searches tell of simulated steps, or nothing of it."""
    if "simulated" not in search:
        return not any(name in search for name in (*_SECONDS, "simulated_rank"))
    return ("simulated_seconds" in search
            and all(type(search.get(name, 0.0)) in (int, float) for name in _SECONDS)
            and all(type(search.get(name, 1)) is int and search.get(name, 1) > 0
                    for name in ("simulated", "simulated_rank"))
            and ("simulated_rank" in search) == ("cheapest_simulated_seconds" in search))


def judged_text(search: Mapping[str, Any]) -> str:
    """How long the simulated step is, and whether the order by simulated steps is another than that by costs; empty
    where nothing was simulated.

    Args:
      search: of a Strategy.
    """
    if "simulated" not in search:
        return ""

    def milliseconds(name: str) -> str:
        return f"{1e3 * search[name]:.3f} ms"

    text = f"simulated {milliseconds('simulated_seconds')}, the shortest of {search['simulated']}"
    if "shortest_simulated_seconds" in search:  # which was not taken
        return f"{text} takes {milliseconds('shortest_simulated_seconds')}"
    if "first_simulated_seconds" in search:
        return f"{text}, of which the first took {milliseconds('first_simulated_seconds')}"
    if search.get("simulated_rank", 1) > 1:
        return (f"{text}, by cost number {search['simulated_rank']}: the cheapest takes "
                f"{milliseconds('cheapest_simulated_seconds')}")
    return text
