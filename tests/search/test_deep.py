"""A deep network of a real program is searched without passes over all of it in double precision."""

import pytest

from benchmarks.search_export import export
from pase_mtf.cost.build import build_network
from pase_mtf.machine.machine import Machine
from pase_mtf.search import branch_and_bound, solve
from pase_mtf.search.pulls import EXACTLY

_LARGE = 1 << 28
"""Matrix entries of all edges, far from which no exact pass should be: it takes as long as a hundred in steps."""


@pytest.mark.slow
def test_exact_passes_look_at_little_of_a_deep_transformer(monkeypatch):
    """What steps round off over 8,558 edges was all of the gap once: 5.1 billion entries were read, again and again."""
    network = build_network(export("transformer", "big", 64, layers=96).graph, Machine.load("h100"), 64).network
    assert len(network.vectors) > 3000
    read, passes = [], branch_and_bound.message_passes

    def noted(p, steps, *rest):
        found = passes(p, steps, *rest)
        read.append((steps is EXACTLY, found.pulled))
        return found
    monkeypatch.setattr(branch_and_bound, "message_passes", noted)
    found = solve(network, certificate=False)
    assert found.optimal
    assert found.statistics["nodes"] == 1
    assert max(pulled for exactly, pulled in read if exactly) < _LARGE
    assert max(pulled for exactly, pulled in read if not exactly) > _LARGE
