"""Bytes that somebody gave: those of every configuration, and a limit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pase_mtf.arguments import as_float
from pase_mtf.errors import UsageError, shortened
from pase_mtf.search.arrays import are_no_numbers
from pase_mtf.search.network import CostNetwork

__all__ = ["MOST_BYTES", "byte_counts", "bytes_of_all", "checked_limit"]

MOST_BYTES = 1e290
"""Of one configuration: more add up to more than a float64 holds, and so do costs with what they are charged."""


def byte_counts(memory: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What somebody gave as bytes of every layer's configurations, as float64.

    Raises:
      UsageError: it is no sequence of numbers per layer.
    """
    if not isinstance(memory, (tuple, list, np.ndarray)):
        raise UsageError(f"memory of {shortened(memory)}; give one vector of bytes per layer")
    found = []
    for layer, entry in enumerate(memory):
        try:
            given = np.asarray(entry)
            if are_no_numbers(given):
                raise TypeError(f"bytes of type {given.dtype}")
            found.append(np.asarray(given, np.float64))
        except (TypeError, ValueError, OverflowError):
            raise UsageError(f"memory of layer {layer}: {shortened(entry)}; give a number of bytes per configuration"
                             ) from None
    return found


def bytes_of_all(network: CostNetwork, memory: Sequence[np.ndarray]) -> np.ndarray:
    """The bytes of all configurations of all layers, one after another.

    Args:
      network: whose configurations they are.
      memory: a vector per layer.

    Raises:
      UsageError: they are not those of its configurations, or nothing that can be added up.
    """
    if len(memory) != len(network.vectors):
        raise UsageError(f"memory of {len(memory)} layers for {len(network.vectors)}; give one vector per layer")
    arrays = [np.asarray(entry, np.float64) for entry in memory]
    for layer, (entry, vector) in enumerate(zip(arrays, network.vectors, strict=True)):
        if entry.shape != vector.shape or not ((entry >= 0) & (entry <= MOST_BYTES)).all():  # NaN is neither
            raise UsageError(f"memory of layer {layer}: give {len(vector)} finite byte counts, none negative or above "
                             f"{MOST_BYTES:.0e}")
    return np.concatenate([np.zeros(0), *arrays])


def checked_limit(memory_limit: object) -> float:
    """A memory limit that somebody gave, in bytes per device, as a float.

    Raises:
      UsageError: it is no number, or below 0.
    """
    limit = as_float(memory_limit)
    if not limit >= 0:
        raise UsageError(f"memory limit of {shortened(memory_limit)}; give a number of bytes per device")
    return limit
