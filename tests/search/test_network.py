"""The cost network: costs, files, checks and the normal form."""

import io
import itertools
import pathlib
import zipfile

import numpy as np
import pytest
from numpy.lib import format as npy
from random_networks import COSTS, SHAPES, random_network

from pase_mtf.errors import FormatError, InfeasibleError, PaseError, UsageError
from pase_mtf.search import network_file, solve
from pase_mtf.search.network import CostNetwork, NetworkEdge

INSTANCES = pathlib.Path(__file__).parents[1] / "data" / "instances"


def test_cost_is_exact():
    vectors = [[1e15], [1e-12], [-1e15]]
    assert CostNetwork(vectors, []).cost((0, 0, 0)) == 1e-12


@pytest.mark.parametrize("assignment", [(0,), (0, 0, 0), (0, 5), (-1, 0)])
def test_cost_of_what_does_not_fit(assignment):
    with pytest.raises(UsageError):
        CostNetwork([[1.0], [1.0, 2.0]], []).cost(assignment)


@pytest.mark.parametrize("step", [11, pytest.param(2, marks=pytest.mark.slow)])
def test_normal_form_keeps_every_cost(step):
    for seed in range(0, 900, step):
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


def test_what_edges_share_is_held_once():
    """Whether they were given one object or equal ones."""
    matrix, ends = np.arange(4.0).reshape(2, 2), np.array([0, 1])
    edges = [NetworkEdge(0, 1, matrix, ends, ends), NetworkEdge(1, 2, matrix, ends, ends.copy()),
             NetworkEdge(0, 2, matrix.tolist(), ends, [1, 1]), NetworkEdge(2, 0, matrix + 1, ends, ends)]
    network = CostNetwork([[0, 0]] * 3, edges)
    assert network.arrays.edge_matrix.tolist() == [0, 0, 0, 1]
    assert network.arrays.edge_classes.tolist() == [[0, 0, 0, 0], [0, 0, 1, 0]]
    assert network.edges[0].matrix is network.edges[2].matrix
    for array in (network.vectors[0], network.edges[0].matrix, network.edges[0].rows):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def test_equal_matrices_share_memory():
    network = CostNetwork.load(INSTANCES / "transformer_8.npz")
    assert len(network.edges) == 256
    assert network.distinct_matrices == 7
    assert network.normalized().distinct_matrices == 7


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("turned", [False, True])
def test_lines_that_differ_in_one_entry_stay_apart(seed, turned):
    """Whichever entries are looked at first: of 40 copies of 5 lines, some unused, a few are changed somewhere."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 9, (5, 301)).astype(float)[rng.integers(0, 5, 40)]
    changed = rng.choice(40, 12, replace=False)
    rows[changed, rng.integers(0, 301, 12)] += 0.5
    used = np.sort(rng.choice(40, 35, replace=False))
    classes = rng.permutation(np.concatenate([used, used[:10]]))
    every = np.arange(301)
    edge = NetworkEdge(0, 1, rows.T, every, classes) if turned else NetworkEdge(0, 1, rows, classes, every)
    vectors = [np.zeros(301), np.zeros(45)] if turned else [np.zeros(45), np.zeros(301)]
    normal, = CostNetwork(vectors, [edge]).normalized().edges
    assert normal.matrix.size == len(np.unique(rows[used], axis=0)) * len(np.unique(rows[used], axis=1).T)
    assert (normal.matrix[np.ix_(normal.rows, normal.columns)] == (rows[classes].T if turned else rows[classes])).all()


@pytest.mark.parametrize("name", ["transformer_8", "alexnet_8"])
def test_save_and_load(tmp_path, name):
    network = CostNetwork.load(INSTANCES / f"{name}.npz")
    network.save(tmp_path / "copy.npz")
    copy = CostNetwork.load(tmp_path / "copy.npz")
    assert_same(copy, network)
    first = (tmp_path / "copy.npz").read_bytes()
    copy.save(tmp_path / "copy.npz")
    assert (tmp_path / "copy.npz").read_bytes() == first
    assert [path.name for path in tmp_path.iterdir()] == ["copy.npz"]
    normal = network.normalized()  # whose matrices lie between others, no longer used
    normal.save(tmp_path / "copy.npz")
    assert_same(CostNetwork.load(tmp_path / "copy.npz"), normal)


def test_no_layer_has_no_memory(tmp_path):
    network = CostNetwork([], [])
    network.memory = ()
    network.save(tmp_path / "none.npz")
    assert CostNetwork.load(tmp_path / "none.npz").memory == ()


def assert_same(ours, theirs):
    """Equal in all that a user can see."""
    assert ours.kinds == theirs.kinds
    assert len(ours.edges) == len(theirs.edges)
    assert ours.distinct_matrices == theirs.distinct_matrices
    for one, other in zip(ours.vectors, theirs.vectors, strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(ours.edges, theirs.edges, strict=True):
        assert (one.source, one.target) == (other.source, other.target)
        for field in ("matrix", "rows", "columns"):
            np.testing.assert_array_equal(getattr(one, field), getattr(other, field))


def version_1(network, shared):
    """The arrays that a file of version 1 held."""
    first = {number: edge for edge, number in reversed(list(enumerate(network.arrays.edge_matrix.tolist())))}
    owner = [first[number] if shared else edge for edge, number in enumerate(network.arrays.edge_matrix.tolist())]
    members = {"n": np.int64(len(network.vectors)), "src": network.arrays.ends[0].astype(np.int64),
               "tgt": network.arrays.ends[1].astype(np.int64), "types": np.array(network.kinds, np.str_)}
    if shared:
        members["shared"] = np.array(owner, np.int64)
    members |= {f"u{layer}": vector for layer, vector in enumerate(network.vectors)}
    for number, edge in enumerate(network.edges):
        members |= {f"rc{number}": edge.rows, f"cc{number}": edge.columns}
        if owner[number] == number:
            members[f"C{number}"] = edge.matrix
    return members


@pytest.mark.parametrize("shared", [False, True])
def test_files_of_version_1(tmp_path, shared):
    network = CostNetwork.load(INSTANCES / "alexnet_8.npz")
    members = version_1(network, shared)
    with np.load(INSTANCES / "alexnet_8.npz") as committed:
        assert set(committed.files) == set(version_1(network, False))
    np.savez_compressed(tmp_path / "old.npz", **members)
    assert_same(CostNetwork.load(tmp_path / "old.npz"), network)
    # Matrices that may be read through `shared` only where they are.
    members.pop("C0")
    np.savez_compressed(tmp_path / "old.npz", **members)
    with pytest.raises(FormatError, match="C0"):
        CostNetwork.load(tmp_path / "old.npz")


def test_numpy_reads_what_we_write(tmp_path):
    network = CostNetwork.load(INSTANCES / "rnnlm_8.npz")
    network.save(tmp_path / "copy.npz")
    with np.load(tmp_path / "copy.npz", allow_pickle=False) as file:
        members = dict(file)
    assert (str(members.pop("format")), int(members.pop("version"))) == ("pase_mtf.network", 2)
    np.testing.assert_array_equal(members["unary"], np.concatenate(network.vectors))
    np.testing.assert_array_equal(members["sizes"], network.sizes)
    assert members["kinds"].tolist() == list(network.kinds)
    assert len(members["values"]) == members["shapes"].prod(axis=1).sum()
    assert set(members) == {"unary", "sizes", "values", "shapes", "classes", "lengths", "ends", "edge_matrix",
                            "edge_classes", "kinds"}


def members_of(path):
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


@pytest.mark.parametrize(("name", "change", "match"), [
    ("version", lambda old: old + 1, "version 3, .*upgrade"),
    ("format", lambda old: np.array("pase_mtf.other"), "another format"),
    ("unary", lambda old: old[:-1], "unary has"),
    ("unary", lambda old: old.astype(str), "unary of shape"),
    ("values", lambda old: np.append(old, 0.0), "values has"),
    ("shapes", lambda old: -old, "shapes has an entry"),
    ("shapes", lambda old: old * 2 ** 30, "shapes has an entry"),
    ("shapes", lambda old: old.ravel(), "shapes of shape"),
    ("sizes", lambda old: old.astype(float), "sizes of shape"),
    ("lengths", lambda old: old[1:], "classes has"),
    ("ends", lambda old: old + 1, "ends has an entry"),
    ("edge_matrix", lambda old: old - 1, "edge_matrix has an entry"),
    ("edge_classes", lambda old: old[:, 1:], "edge_classes of shape"),
    ("kinds", lambda old: old[1:], "kinds of shape"),
    ("classes", lambda old: old + 1000, "has class"),
])
def test_arrays_that_do_not_fit(tmp_path, name, change, match):
    CostNetwork.load(INSTANCES / "alexnet_8.npz").save(tmp_path / "bad.npz")
    members = members_of(tmp_path / "bad.npz")
    np.savez(tmp_path / "bad.npz", **{**members, name: change(members[name])})
    with pytest.raises(FormatError, match=match):
        CostNetwork.load(tmp_path / "bad.npz")
    del members[name]
    np.savez(tmp_path / "bad.npz", **members)
    with pytest.raises(FormatError):
        CostNetwork.load(tmp_path / "bad.npz")


def test_sizes_are_checked_before_room_is_made(tmp_path):
    """A file of a few bytes that says it holds terabytes."""
    content = io.BytesIO()
    npy.write_array_header_1_0(content, {"descr": "<f8", "fortran_order": False, "shape": (10 ** 12,)})
    with zipfile.ZipFile(tmp_path / "bad.npz", "w") as archive:
        archive.writestr("n.npy", content.getvalue())
    with pytest.raises(FormatError, match="bytes for shape"):
        CostNetwork.load(tmp_path / "bad.npz")
    raw = bytearray((INSTANCES / "rnnlm_8.npz").read_bytes())
    place = raw.rindex(b"PK\x01\x02")
    raw[place + 24:place + 28] = (2 ** 31).to_bytes(4, "little")  # the last member's size, in the directory
    (tmp_path / "bad.npz").write_bytes(raw)
    with pytest.raises(FormatError, match="of 2147483648 bytes"):
        CostNetwork.load(tmp_path / "bad.npz")


@pytest.mark.parametrize("version", [1, 2])
def test_no_damage_but_a_format_error(tmp_path, version):
    good = INSTANCES / "rnnlm_8.npz"
    if version == 2:
        CostNetwork.load(good).save(tmp_path / "good.npz")
        good = tmp_path / "good.npz"
    network, raw = CostNetwork.load(good), good.read_bytes()
    rng, refused = np.random.default_rng(version), 0
    for trial in range(150):
        damaged = bytearray(raw)
        if trial % 3 == 0:
            damaged = damaged[:int(rng.integers(len(raw)))]
        else:
            for place in rng.integers(0, len(raw), trial % 3):
                damaged[place] ^= int(rng.integers(1, 256))
        (tmp_path / "bad.npz").write_bytes(damaged)
        try:
            found = CostNetwork.load(tmp_path / "bad.npz")
        except FormatError:
            refused += 1
        else:  # a byte that says nothing of the network, such as a date
            assert_same(found, network)
    assert refused > 100


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


def test_integers_that_no_float_holds():
    zero = np.zeros((1, 1))
    for vectors, edges in (([[10 ** 400]], []), ([[1.0]], [NetworkEdge(0, 10 ** 30, zero, [0], [0])]),
                           ([[1.0]], [NetworkEdge(0, 0, [[10 ** 400]], [0], [0])])):
        with pytest.raises(UsageError, match="give arrays of numbers"):
            CostNetwork(vectors, edges)
    with pytest.raises(UsageError, match="memory of layer 0"):
        solve(CostNetwork([[1.0]], []), memory=[[10 ** 400]], memory_limit=1)


@pytest.mark.parametrize(("source", "rows"), [(0, np.array([-2 ** 63, 1])), (-2 ** 63, np.array([0, 1]))])
def test_the_least_integer_is_no_zero(source, rows):
    with pytest.raises(UsageError, match="below 2"):
        CostNetwork([[1.0, 2.0]] * 2, [NetworkEdge(source, 1, np.eye(2), rows, [0, 1])])


@pytest.mark.parametrize("given", [[np.inf, 1.0], [1.0], [-1.0, 0.0]])
def test_memory_that_could_not_be_read_is_not_saved(given, tmp_path):
    network = CostNetwork([[1.0, 2.0]], [])
    network.memory = (np.array(given),)
    with pytest.raises(UsageError, match="memory"):
        network.save(tmp_path / "network.npz")
    assert not any(tmp_path.iterdir())


def test_memory_of_other_layers_is_not_saved(tmp_path):
    network = CostNetwork([[1.0, 2.0], [1.0, 2.0, 3.0]], [])
    network.memory = (np.array([9.0, 8.0, 7.0]), np.array([1.0, 2.0]))  # of layers in another order
    with pytest.raises(UsageError, match="memory"):
        network.save(tmp_path / "network.npz")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("given", [(1.0,), (np.array([[1.0, 2.0]]),)])
def test_memory_that_is_no_vector_per_layer_is_not_saved(given, tmp_path):
    network = CostNetwork([[1.0, 2.0]], [])
    network.memory = given
    with pytest.raises(UsageError, match="memory that no file holds"):
        network.save(tmp_path / "network.npz")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("costs", [["1", "2"], [b"1", b"2"]])
def test_words_of_digits_are_no_costs(costs):
    for vectors, edges in (([costs], []), ([[1.0, 2.0]], [NetworkEdge(0, 0, [costs, costs], [0, 1], [0, 1])])):
        with pytest.raises(UsageError, match="give arrays of numbers"):
            CostNetwork(vectors, edges)


@pytest.mark.parametrize("kinds", [["matmul"], ["matmul"] * 3])
def test_kinds_of_other_layers_are_not_saved(kinds, tmp_path):
    network = CostNetwork([[1.0], [2.0]], [], kinds=kinds)
    with pytest.raises(UsageError, match=f"{len(kinds)} kinds for 2 layers"):
        network.save(tmp_path / "network.npz")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("word", ["2", b"2"])
def test_words_of_digits_among_objects_are_no_costs(word):
    """As a table that was read as text hands them on; numbers that are objects are numbers."""
    costs = np.array([1.0, word], object)
    for vectors, edges in (([costs], []), ([[1.0, 2.0]], [NetworkEdge(0, 0, [costs, costs], [0, 1], [0, 1])])):
        with pytest.raises(UsageError, match="give arrays of numbers"):
            CostNetwork(vectors, edges)
    assert CostNetwork([np.array([1, 2.5], object)], []).cost((1,)) == 2.5


@pytest.mark.parametrize("given", [np.array([7, 2], object), np.array([7, 2], np.longdouble)])
def test_memory_of_any_numbers_is_saved(given, tmp_path):
    network = CostNetwork([[1.0, 2.0]], [])
    network.memory = (given,)
    network.save(tmp_path / "network.npz")
    assert [entry.tolist() for entry in CostNetwork.load(tmp_path / "network.npz").memory] == [[7.0, 2.0]]


@pytest.mark.parametrize("given", [["7", "2"], np.array([7.0, "2"], object)])
def test_words_of_digits_are_not_saved_as_memory(given, tmp_path):
    network = CostNetwork([[1.0, 2.0]], [])
    network.memory = (given,)
    with pytest.raises(UsageError, match="memory that no file holds"):
        network.save(tmp_path / "network.npz")
    assert not any(tmp_path.iterdir())


def test_what_shrinks_to_next_to_nothing_can_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr(network_file, "_MOST_BYTES", 10_000)
    every = np.arange(500)
    network = CostNetwork([np.zeros(500)] * 2, [NetworkEdge(0, 1, np.zeros((500, 500)), every, every)])
    network.save(tmp_path / "network.npz")
    assert_same(CostNetwork.load(tmp_path / "network.npz"), network)
