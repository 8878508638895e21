"""Networks that are hard for their size, and searches that may do nothing but branch."""

import itertools

import numpy as np

from pase_mtf.search import part
from pase_mtf.search.branch_and_bound import Minimiser
from pase_mtf.search.network import CostNetwork, NetworkEdge


def dense(seed, layers=9, configurations=8):
    """Hard for its size: every pair of layers is joined, and costs are noise."""
    rng, every = np.random.default_rng(seed), np.arange(configurations)
    return CostNetwork([rng.random(configurations) for _ in range(layers)],
                       [NetworkEdge(i, j, rng.random((configurations, configurations)), every, every)
                        for i, j in itertools.combinations(range(layers), 2)])


def only_branching(monkeypatch):
    """Neither elimination nor the search depth first."""
    monkeypatch.setattr(part, "_MOST_ENTRIES", -1)
    monkeypatch.setattr(Minimiser, "_descend", lambda self, part, others: False)
