"""The cost network: costs, files, checks and the normal form."""

import io
import itertools
import pathlib
import zipfile

import numpy as np
import pytest
from random_networks import COSTS, SHAPES, random_network

from pase_mtf.errors import FormatError, InfeasibleError, PaseError, UsageError
from pase_mtf.search import network as network_module
from pase_mtf.search.network import CostNetwork, NetworkEdge

INSTANCES = pathlib.Path(__file__).parents[1] / "data" / "instances"


def test_cost_is_exact():
    vectors = [[1e15], [1e-12], [-1e15]]
    assert CostNetwork(vectors, []).cost((0, 0, 0)) == 1e-12


@pytest.mark.parametrize("assignment", [(0,), (0, 0, 0), (0, 5), (-1, 0)])
def test_cost_of_what_does_not_fit(assignment):
    with pytest.raises(UsageError):
        CostNetwork([[1.0], [1.0, 2.0]], []).cost(assignment)


def test_normal_form_keeps_every_cost():
    for seed in range(0, 900, 2):
        network = random_network(seed, 60)
        normal = network.normalized()
        try:
            normal.validate()
        except InfeasibleError:  # two edges that forbid, summed, may leave nothing: that is only seen now
            assert COSTS[seed // len(SHAPES) % len(COSTS)] == "forbidden"
        assert all(edge.source < edge.target for edge in normal.edges)
        for edge in normal.edges:
            assert set(edge.rows) == set(range(edge.matrix.shape[0]))
            assert set(edge.columns) == set(range(edge.matrix.shape[1]))
        for choice in itertools.product(*map(range, network.sizes)):
            assert normal.cost(choice) == pytest.approx(network.cost(choice), rel=1e-12, abs=1e-300)


def test_parallel_edges_are_summed_only_where_that_is_small():
    rng = np.random.default_rng(0)
    size, classes = 400, 100
    big = [NetworkEdge(0, 1, rng.random((classes, classes)), rng.integers(0, classes, size),
                       rng.integers(0, classes, size)) for _ in range(2)]
    small = [NetworkEdge(0, 1, rng.random((3, 3)), np.arange(size) % 3, np.arange(size) % 3) for _ in range(2)]
    vectors = [np.zeros(size)] * 2
    assert len(CostNetwork(vectors, big).normalized().edges) == 2  # 400 x 400 would be 16 times both
    assert len(CostNetwork(vectors, small).normalized().edges) == 1
    assert CostNetwork(vectors, small).normalized().edges[0].matrix.shape == (3, 3)


def test_equal_matrices_share_memory():
    network = CostNetwork.load(INSTANCES / "transformer_8.npz")
    assert len(network.edges) == 256
    assert network.distinct_matrices == 7
    assert network.normalized().distinct_matrices == 7


@pytest.mark.parametrize("share_above", [1 << 28, 0])
def test_save_and_load(tmp_path, monkeypatch, share_above):
    monkeypatch.setattr(network_module, "_SHARE_ABOVE", share_above)
    for name in ("transformer_8", "alexnet_8"):
        network = CostNetwork.load(INSTANCES / f"{name}.npz")
        network.save(tmp_path / "copy.npz")
        copy = CostNetwork.load(tmp_path / "copy.npz")
        assert copy.kinds == network.kinds
        assert len(copy.edges) == len(network.edges)
        assert copy.distinct_matrices == network.distinct_matrices
        for ours, theirs in zip(copy.vectors, network.vectors, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        for ours, theirs in zip(copy.edges, network.edges, strict=True):
            assert (ours.source, ours.target) == (theirs.source, theirs.target)
            for field in ("matrix", "rows", "columns"):
                np.testing.assert_array_equal(getattr(ours, field), getattr(theirs, field))
        first = (tmp_path / "copy.npz").read_bytes()
        network.save(tmp_path / "copy.npz")
        assert (tmp_path / "copy.npz").read_bytes() == first
    assert [path.name for path in tmp_path.iterdir()] == ["copy.npz"]


def test_numpy_reads_what_we_write(tmp_path):
    network = CostNetwork.load(INSTANCES / "rnnlm_8.npz")
    network.save(tmp_path / "copy.npz")
    with np.load(tmp_path / "copy.npz") as ours, np.load(INSTANCES / "rnnlm_8.npz") as theirs:
        assert set(ours.files) == set(theirs.files)
        for name in ours.files:
            np.testing.assert_array_equal(ours[name], theirs[name])


def test_files_that_are_no_networks(tmp_path):
    good = (INSTANCES / "alexnet_8.npz").read_bytes()
    path = tmp_path / "bad.npz"
    flipped = bytearray(good)
    flipped[len(good) // 3] ^= 0xFF
    foreign = io.BytesIO()
    np.savez(foreign, weights=np.zeros(3))
    text = io.BytesIO()
    with zipfile.ZipFile(text, "w") as archive:
        archive.writestr("n.npy", "hello")
    objects = io.BytesIO()
    np.savez(objects, n=np.array([{}], object))
    for content in (b"", b"not a zip", good[:len(good) // 2], bytes(flipped), foreign.getvalue(), text.getvalue(),
                    objects.getvalue()):
        path.write_bytes(content)
        with pytest.raises(FormatError) as info:
            CostNetwork.load(path)
        assert "\n" not in str(info.value)
    with pytest.raises(FormatError, match="check the path"):
        CostNetwork.load(tmp_path / "missing.npz")


ENDS = [0, 1]
ZERO = np.zeros((2, 2))


@pytest.mark.parametrize(("vectors", "edges", "match"), [
    ([[1, np.nan]], [], "layer 0: a cost is NaN"),
    ([[1, -np.inf]], [], "layer 0: a cost is -inf"),
    ([[1], []], [], "layer 1: .* needs a configuration"),
    ([[[1.0]]], [], "layer 0: cost vector of shape"),
    ([[1, 2], [1, 2]], [(0, 2, ZERO, ENDS, ENDS)], "edge 0 .*no layer 2"),
    ([[1, 2], [1, 2]], [(-1, 1, ZERO, ENDS, ENDS)], "edge 0 .*no layer -1"),
    ([[1, 2], [1, 2]], [(0, 1, ZERO, ENDS, ENDS), (0, 1, ZERO, [0, 2], ENDS)], "edge 1 .*rows has class 2"),
    ([[1, 2], [1, 2]], [(0, 1, ZERO, ENDS, [-1, 0])], "columns has class -1"),
    ([[1, 2], [1, 2]], [(0, 1, ZERO, [0], ENDS)], "rows of shape"),
    ([[1, 2], [1, 2]], [(0, 1, np.full((2, 2), np.nan), ENDS, ENDS)], "edge 0 .*NaN"),
    ([[1, 2], [1, 2]], [(0, 1, np.zeros(2), ENDS, ENDS)], "two dimensions"),
])
def test_bad_networks(vectors, edges, match):
    with pytest.raises(UsageError, match=match):
        CostNetwork(vectors, [NetworkEdge(*edge) for edge in edges]).validate()


@pytest.mark.parametrize("edge", [(0, 1, ZERO, [0, 1.7], ENDS), (0, 1, ZERO, np.array([0, 2 ** 32]), ENDS),
                                  (0, 1, ZERO, [0, 2 ** 32], ENDS), (0, 1, ZERO, ENDS, ["a", "b"]),
                                  (0.5, 1, ZERO, ENDS, ENDS), (0, 1, ZERO, [0, np.nan], ENDS)])
def test_what_is_no_index(edge):
    with pytest.raises(UsageError, match="cost network: "):
        CostNetwork([[1, 2], [1, 2]], [NetworkEdge(*edge)])


def test_indices_of_every_integer_type():
    for dtype in (np.uint8, np.int16, np.int64, np.float64, bool):
        network = CostNetwork([[1, 2], [1, 2]], [NetworkEdge(np.int64(0), np.int32(1), [[0, 9], [9, 0]],
                                                             np.array(ENDS, dtype), ENDS)])
        assert network.cost((1, 1)) == 4


def test_edges_that_are_none():
    with pytest.raises(UsageError, match="NetworkEdge per edge"):
        CostNetwork([[1, 2]], [(0, 0)])


def test_nothing_finite():
    for network in (CostNetwork([[np.inf, np.inf]], []),
                    CostNetwork([[1, 1], [1, 1]], [NetworkEdge(0, 1, ZERO + np.inf, ENDS, ENDS)])):
        with pytest.raises(InfeasibleError):
            network.validate()


def test_words_are_no_costs():
    with pytest.raises(PaseError):
        CostNetwork([["a"]], [])


def test_bad_network_in_a_file(tmp_path):
    CostNetwork([[np.nan]], []).save(tmp_path / "bad.npz")
    with pytest.raises(FormatError, match=r"bad\.npz: layer 0: a cost is NaN"):
        CostNetwork.load(tmp_path / "bad.npz")
