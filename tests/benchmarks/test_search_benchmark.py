"""The comparison of searches: its solvers agree, its networks are what they say."""

import json
import pathlib

import numpy as np
import pytest

from benchmarks import search, solvers
from pase_mtf.network import CostNetwork

INSTANCES = pathlib.Path(__file__).parents[1] / "data" / "instances"


@pytest.mark.parametrize("solver", ["exact", "pase", "milp", "toulbar2"])
@pytest.mark.parametrize(("name", "optimum"), [("alexnet_8", 97098296512), ("rnnlm_8", 4024963186688)])
def test_solvers_agree(solver, name, optimum):
    if solver in ("milp", "toulbar2"):
        pytest.importorskip({"milp": "scipy", "toulbar2": "pytoulbar2"}[solver])
    outcome = solvers.SOLVERS[solver](CostNetwork.load(INSTANCES / f"{name}.npz"), 60.0)
    assert outcome["optimal"]
    assert outcome["cost"] == optimum


def test_variations_differ_and_share():
    network = CostNetwork.load(INSTANCES / "transformer_4.npz")
    first, second = search.variation(network, 0), search.variation(network, 1)
    assert first.distinct_matrices == network.distinct_matrices
    assert first.sizes == network.sizes
    zeros = (0,) * len(network.vectors)
    assert len({net.cost(zeros) for net in (network, first, second)}) == 3


def test_shuffling_keeps_the_numbers():
    network = CostNetwork.load(INSTANCES / "alexnet_8.npz")
    hard = search.shuffled(network)
    for ours, theirs in zip(hard.edges, network.edges, strict=True):
        np.testing.assert_array_equal(np.sort(ours.matrix.ravel()), np.sort(theirs.matrix.ravel()))
    assert any((ours.matrix != theirs.matrix).any() for ours, theirs in zip(hard.edges, network.edges, strict=True))


def test_whole_run(tmp_path):
    assert search.main(["--networks=rnnlm_8", "--methods=exact,mcmc", "--limit=1", "--variations=3",
                        f"--output={tmp_path}"]) == 0
    text = (tmp_path / "search.md").read_text()
    assert "| rnnlm_8 | 4, 3, 123 |" in text
    assert "proven" in text
    assert "3 random variations" in text
    assert json.loads((tmp_path / "search.json").read_text())["results"]["rnnlm_8"]["exact"]["cost"] == 4024963186688
    assert (tmp_path / "search.png").stat().st_size > 10000


def test_a_wrong_proof_would_be_seen():
    result = {"cost": 2.0, "optimal": True, "lower_bound": 2.0, "seconds": 1.0, "peak_bytes": 1}
    row = {"size": {"layers": 1, "edges": 0, "configurations": 2}, "exact": {**result, "cost": 1.0}, "pase": result}
    assert "WRONG" in search.table({"x": row}, ["exact", "pase"])
