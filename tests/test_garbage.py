"""The garbage collector, while a large graph is read."""

import gc

import pytest

from pase_mtf.compat import mtf, tf
from pase_mtf.export.exporter import export_graph
from pase_mtf.garbage import uncollected
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

    def read(*arguments):
        seen.append(gc.isenabled())
        return read_operations(*arguments)
    monkeypatch.setattr("pase_mtf.export.exporter.read_operations", read)
    export_graph(graph)
    assert seen == [False]
    assert gc.isenabled()
