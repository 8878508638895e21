"""What operations become, kept on disk: as found anew, and by no other code or function than that which made it."""

import dataclasses
import functools
import itertools
import sqlite3
import threading

import pytest
from nets import build

from pase_mtf.calibration.cache import code_version
from pase_mtf.compat import mtf, tf
from pase_mtf.export.exporter import export_graph
from pase_mtf.graph.configurations import Configuration, enumerate_configurations
from pase_mtf.launch.strategies.finding import random_configurations
from pase_mtf.lowering import kept_traces
from pase_mtf.lowering.kept_traces import KeptTraces
from pase_mtf.lowering.kernels import GraphKernels
from pase_mtf.lowering.traces import Trace, TracedNode
from pase_mtf.machine.kernels import Block, Kernel
from pase_mtf.operations import registry
from pase_mtf.operations.lowering_key import is_versioned, lasting_text, lowering_key


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache" / "traces.sqlite"


@pytest.fixture
def traced(monkeypatch):
    """The operations that were lowered by themselves."""
    found, trace = [], GraphKernels._trace

    def counted(self, operation, *given):
        found.append(operation)
        return trace(self, operation, *given)
    monkeypatch.setattr(GraphKernels, "_trace", counted)
    return found


def _kernels(graph, program, kept, devices=4):
    """Those of two random strategies."""
    source = GraphKernels(program, graph, kept)
    return [source.layer(number, configuration) for seed in range(2)
            for number, configuration in enumerate(random_configurations(graph, devices, seed, 0))], source


@pytest.mark.parametrize("name", ["mlp", pytest.param("transformer", marks=pytest.mark.slow)])
def test_a_program_of_other_types_finds_its_own(path, name):
    """A variable of another type is assigned by other nodes, though what is assigned is alike."""
    found = {}
    for kept in (True, False):
        for dtype in (tf.float32, tf.float64, tf.bfloat16):
            with tf.Graph().as_default():
                net = build(name, "adafactor", dtype)
                found[kept, dtype] = _kernels(export_graph(net.graph), net.graph, KeptTraces(path, "one") if kept else
                                              None)[0]
    assert all(kernels == found[False, dtype] for (_, dtype), kernels in found.items())


def test_variables_that_are_kept_in_fewer_digits_are_cast(path):
    found = []
    for slice_dtype in (tf.float32, tf.bfloat16):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        dims = [mtf.Dimension("rows", 8)]
        with tf.Graph().as_default():
            x = mtf.get_variable(mesh, "x", dims, dtype=mtf.VariableDType(tf.float32, slice_dtype, tf.float32))
            mtf.assign(x, x * 2.0)
            kernels = set()
            for layer in _kernels(export_graph(mesh.graph), mesh.graph, KeptTraces(path, "one"), devices=2)[0]:
                kernels |= set(itertools.chain(*layer.values()))
        found.append({kernel.operation for kernel in kernels})
    assert [("Cast" in operations) for operations in found] == [False, True]


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer", "odd_functions"])
def test_a_program_that_is_built_again_finds_what_it_was(path, traced, name):
    found, lowered = [], []
    for kept in (None, KeptTraces(path, "one"), KeptTraces(path, "one")):
        with tf.Graph().as_default():
            net = build(name, "adam", tf.float32)
            kernels, _ = _kernels(export_graph(net.graph), net.graph, kept)
        found.append(kernels)
        lowered.append(list(traced))
        traced.clear()
        if kept:
            kept.close()
    assert found[0] == found[1] == found[2]
    assert len(lowered[0]) == len(lowered[1]) > 20
    own = [operation for operation in lowered[2] if lasting_text(lowering_key(operation)) is None]
    assert len(own) == len(lowered[2]) < len(lowered[0]) / 2
    assert bool(own) is (name == "odd_functions")  # it has functions of this folder, which no version tells


def test_what_another_version_made_is_not_taken(path, traced):
    for code, again in (("one", True), ("another", True), ("one", False)):
        with tf.Graph().as_default():
            net = build("mlp", "adam", tf.float32)
            _kernels(export_graph(net.graph), net.graph, KeptTraces(path, code))
        assert bool(traced) is again
        traced.clear()


def _one_function(function):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    shape = mtf.Shape([mtf.Dimension("rows", 8), mtf.Dimension("columns", 8)])
    mtf.cwise(function, [mtf.import_tf_tensor(mesh, tf.zeros([8, 8]), shape)])
    return mesh.graph


def test_functions_of_a_program_are_lowered_in_every_run(path):
    """The same name and place say nothing of what a function does."""
    factors = iter((tf.sin, tf.cos))

    def made():
        function = next(factors)
        return lambda x: function(x)

    operations = []
    for _ in range(2):
        with tf.Graph().as_default():
            program = _one_function(made())
            graph = export_graph(program)
            source, whole = GraphKernels(program, graph, KeptTraces(path, "one")), set()
            for number, layer in enumerate(graph.layers):
                configuration = enumerate_configurations(layer, 2)[0]
                whole |= set(itertools.chain(*source.layer(number, configuration).values()))
        operations.append({kernel.operation for kernel in whole})
    assert [found & {"Sin", "Cos"} for found in operations] == [{"Sin"}, {"Cos"}]


@pytest.mark.parametrize("wrapped", [tf.nn.relu, mtf.relu])
def test_who_wears_the_name_of_a_library_is_not_taken_for_it(wrapped):
    @functools.wraps(wrapped)
    def like_it(x):
        return tf.cos(wrapped(x))

    with tf.Graph().as_default():
        keys = [lowering_key(_one_function(function).operations[-1]) for function in (tf.nn.relu, like_it)]
    assert lasting_text(keys[0]) is not None
    assert lasting_text(keys[1]) is None
    assert not is_versioned(like_it)


@pytest.mark.parametrize("replaced", ["rule", "lower"])
def test_what_a_program_lowers_its_own_way_is_lowered_in_every_run(path, monkeypatch, replaced):
    def lower_with_cosine(operation, lowering):
        plain(operation, lowering)
        x, = operation.inputs
        lowering.tensors[operation.outputs[0]] = lowering.mesh_impl(operation).slicewise(
            tf.cos, lowering.tensors[x])

    plain = mtf.SlicewiseOperation.lower
    found = []
    for own in (False, True):
        if own and replaced == "rule":
            rule = dataclasses.replace(registry._RULES[mtf.SlicewiseOperation], lower=lower_with_cosine)
            monkeypatch.setitem(registry._RULES, mtf.SlicewiseOperation, rule)
            monkeypatch.setattr(registry, "_RESOLVED", {})
        elif own:
            monkeypatch.setattr(mtf.SlicewiseOperation, "lower", lower_with_cosine)
            monkeypatch.setattr(registry, "_RESOLVED", {})
        with tf.Graph().as_default():
            program = _one_function(tf.nn.relu)
            source, kernels = GraphKernels(program, export_graph(program), KeptTraces(path, "one")), set()
            for layer in range(len(source._layers)):
                kernels |= set(itertools.chain(*source.layer(layer, Configuration(())).values()))
        found.append({kernel.operation for kernel in kernels})
    assert ["Cos" in operations for operations in found] == [False, True]


def test_another_thread_keeps_and_finds(path):
    kept, found = KeptTraces(path, "one"), []
    kept.keep(("key", 1), _TRACE)
    threads = [threading.Thread(target=lambda: (kept.keep(("key", 2), _TRACE), found.append(kept.get(("key", 1)))))
               for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [_TRACE] * 3
    assert kept.get(("key", 2)) == _TRACE


_KERNEL = Kernel("Sub", (Block("float32", (2, 3)), Block("int32", (), (1,))), (Block("float32", (2, 3)),),
                 (("keep", True), ("name", "x"), ("sizes", (1, 2))), apart=True, again=True)
_TRACE = Trace([TracedNode(_KERNEL, "abc", True, [(0, 1), None, (-1, 0)], [(0, -1)]),
                TracedNode(None, None, False, [], [])], [(1, 0), None])


def test_all_of_a_trace_is_kept(path):
    kept = KeptTraces(path, "one")
    kept.keep(("key", 1), _TRACE)
    kept.keep(("key", 2), _TRACE._replace(lasting=False))
    kept.keep(("key", object()), _TRACE)
    kept.close()
    kept.keep(("key", 3), _TRACE)
    again = KeptTraces(path, "one")
    assert again.get(("key", 1)) == _TRACE
    assert [again.get(key) for key in (("key", 2), ("key", 3), ("key", True), ("key", object()))] == [None] * 4


@pytest.mark.parametrize("content", [b"", b"no database" * 100, b"SQLite format 3\0" + b"\7" * 5000])
def test_a_damaged_file_is_begun_anew(path, content):
    path.parent.mkdir()
    path.write_bytes(content)
    for known in (None, _TRACE):
        kept = KeptTraces(path, "one")
        assert kept.get(("key",)) == known
        kept.keep(("key",), _TRACE)
        kept.close()


def test_what_is_damaged_later_on_is_begun_anew_by_the_next(path):
    kept = KeptTraces(path, "one")
    for number in range(200):
        kept.keep(("key", number), _TRACE)
    kept.close()
    content = bytearray(path.read_bytes())
    content[8192:] = b"\7" * (len(content) - 8192)
    path.write_bytes(content)
    for _ in range(2):
        kept = KeptTraces(path, "one")
        for number in range(200):
            kept.get(("key", number))
            kept.keep(("key", number), _TRACE)
        kept.close()
    kept = KeptTraces(path, "one")
    assert all(kept.get(("key", number)) == _TRACE for number in range(200))


@pytest.mark.parametrize("text", [
    "", "[]", "[[], null]", "[[[1, 2]], []]", '[[[{"operation": 3}, null, 1, [], []]], []]',
    "[[[null, null, 1, [[1]], []]], []]", '[[], [["a", "b"]]]'])
def test_what_no_trace_is_is_found_out_again(path, text):
    kept = KeptTraces(path, "one")
    kept.keep(("key",), _TRACE)
    with sqlite3.connect(path) as file:
        file.execute("UPDATE traces SET trace = ?", (text,))
    file.close()
    assert kept.get(("key",)) is None
    kept.keep(("key",), _TRACE)
    assert kept.get(("key",)) == _TRACE


def test_without_a_place_nothing_is_kept(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "traces.sqlite", tmp_path):
        kept = KeptTraces(place, "one")
        kept.keep(("key",), _TRACE)
        assert kept.get(("key",)) is None


def test_who_writes_at_once_is_not_waited_for_long(path, monkeypatch):
    monkeypatch.setattr(kept_traces, "_PATIENCE", 0.01)
    kept = KeptTraces(path, "one")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    kept.keep(("key",), _TRACE)
    blocked = KeptTraces(path, "one")
    blocked.keep(("key",), _TRACE)
    other.execute("ROLLBACK")
    other.close()
    assert path.exists()
    assert KeptTraces(path, "one").get(("key",)) is None


def test_the_oldest_go(path, monkeypatch):
    monkeypatch.setattr(kept_traces, "_MOST", 3)
    kept = KeptTraces(path, "one")
    for number in range(5):
        kept.keep(("key", number), _TRACE)
    kept.close()
    again = KeptTraces(path, "one")
    assert [again.get(("key", number)) is not None for number in range(5)] == [False, False, True, True, True]


def test_the_code_is_told_by_its_files(tmp_path, monkeypatch):
    before = code_version()
    assert code_version() == before
    assert "TensorFlow" not in before.split()[0]
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "one.py").write_text("x = 1\n")

    class Spec:
        submodule_search_locations = (str(tmp_path / "models"),)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: Spec)
    one = code_version()
    (tmp_path / "models" / ".#one.py").symlink_to("somebody@somewhere")  # of an editor
    assert code_version() == one
    (tmp_path / "models" / "one.py").write_text("x = 2\n")
    two = code_version()
    (tmp_path / "models" / "one.py").rename(tmp_path / "models" / "two.py")
    assert len({before, one, two, code_version()}) == 4

    def unreadable(self):
        raise PermissionError
    monkeypatch.setattr("pathlib.Path.read_bytes", unreadable)
    assert code_version() is None


def test_keys_as_text_are_those_of_any_process():
    texts = [lasting_text(key) for key in (
        frozenset({"b", "a"}), ("a", ("b",)), ("a", "b"), (("a", "b"),), 1, True, "1", None, tf.float32, tf.add, int)]
    assert len(set(texts)) == len(texts)
    assert None not in texts
    assert not any(" at 0x" in text for text in texts)
    assert lasting_text(frozenset({"b", "a"})) == lasting_text(frozenset({"a", "b"})) == "{'a','b'}"
    assert [lasting_text(key) for key in (object(), lambda: 1, ("a", _KERNEL.__class__, object()), _one_function)] == [
        None] * 4


@pytest.mark.parametrize("changed", [
    "replace(trace, '[2,3]', '[2,7]')", "replace(trace, '[2,3]', '[2,1e999]')", "CAST(X'FF' || trace AS TEXT)",
    "replace(hex(zeroblob(50000)), '0', '[')"], ids=["digit", "infinite", "no text", "nested"])
def test_a_trace_that_was_changed_is_found_out_again(path, changed):
    kept = KeptTraces(path, "one")
    kept.keep(("key",), _TRACE)
    with sqlite3.connect(path) as file:
        file.execute("UPDATE traces SET trace = " + changed)
    file.close()
    assert kept.get(("key",)) is None
    kept.keep(("key",), _TRACE)
    assert kept.get(("key",)) == _TRACE
    kept.close()
