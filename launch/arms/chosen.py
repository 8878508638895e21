"""What was chosen for an arm: a strategy of the whole step, or a pipeline. For stock data parallelism nothing is."""

from __future__ import annotations

from pase_mtf.pipeline.pipeline import Pipeline
from pase_mtf.strategy.strategy import Strategy

__all__ = ["Chosen"]

Chosen = Strategy | Pipeline
"""What an arm trains with; both know what a step takes, and the memory of the fullest device."""
