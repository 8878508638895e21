"""The garbage collector, while a large graph is built, read or written."""

import functools
import gc
import types

import pytest

from pase_mtf.compat import mtf, tf
from pase_mtf.export.exporter import export_graph
from pase_mtf.garbage import uncollected
from pase_mtf.graph import computation_graph
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.launch.arms.program import build_program
from pase_mtf.layout.program import Program
from pase_mtf.operations.facts import read_operations


def test_it_rests_inside_and_goes_on_after():
    with uncollected():
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="inside"), uncollected():
        raise ValueError("inside")
    assert gc.isenabled()


def test_whoever_has_switched_it_off_finds_it_off():
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_it_rests_while_a_graph_is_exported(monkeypatch):
    graph = mtf.Graph()
    mtf.import_tf_tensor(mtf.Mesh(graph, "mesh"), tf.ones([8]), [mtf.Dimension("width", 8)])
    seen = []

    def read(*arguments, **settings):
        seen.append(gc.isenabled())
        return read_operations(*arguments, **settings)
    monkeypatch.setattr("pase_mtf.export.exporter.read_operations", read)
    export_graph(graph)
    assert seen == [False]
    assert gc.isenabled()


def test_it_rests_while_a_program_is_built():
    def features(*_):
        raise ValueError(gc.isenabled())
    with tf.Graph().as_default(), pytest.raises(ValueError, match="False"):
        build_program(types.SimpleNamespace(features=features), None, 8, "sgd", 0.1, 0)
    assert gc.isenabled()


def test_it_rests_while_a_graph_is_written_and_read(monkeypatch, tmp_path):
    seen = []

    def noted(called, *arguments):
        seen.append(gc.isenabled())
        return called(*arguments)
    for name in ("write_atomically", "read_json"):
        monkeypatch.setattr(computation_graph, name, functools.partial(noted, getattr(computation_graph, name)))
    graph = ComputationGraph("empty", (), (), 0)
    graph.save(tmp_path / "graph.json")
    assert ComputationGraph.load(tmp_path / "graph.json") == graph
    assert seen == [False, False]
    assert gc.isenabled()


def test_it_rests_while_a_program_builds_its_graph():
    seen = []

    def build():
        seen.append(gc.isenabled())
        return mtf.Graph()
    Program(build).build_first(None, 2)
    assert seen == [False]
    assert gc.isenabled()
