"""What docs/paper.md says about its numbers: written after looking at them."""

from __future__ import annotations

__all__ = ["FIGURES", "NETWORKS", "SCALE", "STRATEGIES"]

NETWORKS = ""
STRATEGIES: dict[str, str] = {}
FIGURES = ""
SCALE = ""
