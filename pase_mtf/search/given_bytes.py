"""Bytes that somebody gave: those of every configuration, and a limit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pase_mtf.arguments import as_float
from pase_mtf.errors import UsageError, shortened
from pase_mtf.search.network import CostNetwork

__all__ = ["MOST_BYTES", "bytes_of_all", "checked_limit"]

MOST_BYTES = 1e290
"""Of one configuration: more add up to more than a float64 holds, and so do costs with what they are charged."""


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
