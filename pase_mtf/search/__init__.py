"""Searches for the cheapest assignment of a cost network, behind one registry."""

from pase_mtf.search import brute_force, exact  # noqa: F401  (they register themselves)
from pase_mtf.search.registry import Progress, Solution, methods, register, solve

__all__ = ["Progress", "Solution", "methods", "register", "solve"]
