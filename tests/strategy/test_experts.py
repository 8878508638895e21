"""What people write by hand, as the papers describe it."""

import pytest
from layer_chains import layer_chain

from pase_mtf.errors import InfeasibleError, UsageError
from pase_mtf.graph.computation_graph import ComputationGraph, Layer
from pase_mtf.graph.configurations import Configuration
from pase_mtf.strategy.experts import batch_dim, configurations_of_layout, data_parallel, expert, most_devices


@pytest.fixture
def graph():
    return layer_chain()


def test_data_parallel_replicates_what_has_no_batch(graph):
    lonely = Layer("norm", "pointwise", {"d": 8}, ("d",), (), ())
    mixed = ComputationGraph("mixed", (*graph.layers, lonely), graph.edges, graph.operations)
    assert data_parallel(mixed, 8) == (*[Configuration((("batch", 8),))] * 3, Configuration((("", 8),)))
    assert batch_dim(mixed) == "batch"


def test_one_weird_trick(graph):
    image = Layer("conv", "convolution", {"batch": 64, "c0": 8, "c1": 64}, ("batch", "c0", "c1"), (), ())
    loss = Layer("loss", "normalize", {"batch": 64, "d3": 512}, ("batch", "d3"), (), ())
    net = ComputationGraph("net", (image, *graph.layers, loss), (), 0)
    chosen = expert(net, 8)
    assert chosen[0] == Configuration((("batch", 8),))
    assert chosen[1:] == tuple(Configuration(((name, 8),)) for name in ("d1", "d2", "d3", "d3"))


def test_the_transformer_layout_takes_the_squarest_mesh_that_splits():
    """2 x 3 and 4 x 6 would split 8 heads by 3 and 6; turned round they split all."""
    dims = {"batch": 24, "length": 8, "d_model": 64}
    layers = tuple(Layer(f"l{number}", "matmul", {**dims, **more}, tuple({**dims, **more}), (), ())
                   for number, more in enumerate(({"heads": 8}, {"d_ff": 64}, {"vocab": 128})))
    net = ComputationGraph("net", layers, (), 0)
    for devices, rows, columns in ((6, 3, 2), (24, 6, 4)):
        assert expert(net, devices) == tuple(
            Configuration((("batch", rows), (name, columns))) for name in ("heads", "d_ff", "vocab"))
        assert most_devices(expert, net, devices) == devices
    with pytest.raises(InfeasibleError, match="by 3; take another mesh"):  # one that is named is taken as it is
        expert(net, 6, mesh=[("rows", 2), ("columns", 3)])


def test_the_transformer_layout():
    dims = {"batch": 16, "length": 8, "d_model": 64}
    layers = tuple(Layer(f"l{number}", "matmul", {**dims, **more}, tuple({**dims, **more}), (), ())
                   for number, more in enumerate(({"heads": 8}, {"d_ff": 64}, {"vocab": 128}, {})))
    net = ComputationGraph("net", layers, (), 0)
    assert expert(net, 8) == (*(Configuration((("batch", 2), (name, 4))) for name in ("heads", "d_ff", "vocab")),
                              Configuration((("batch", 2), ("", 4))))
    assert expert(net, 4)[0] == Configuration((("batch", 4),))  # the paper's mesh for 4 devices is 4 x 1
    assert expert(net, 8, mesh=[("rows", 4), ("cols", 2)])[0] == Configuration((("batch", 4), ("heads", 2)))
    with pytest.raises(UsageError, match="needs 8 devices, there are 4"):
        expert(net, 4, mesh=[("rows", 4), ("cols", 2)])
    with pytest.raises(UsageError, match=r"mesh=\[\('all', 8\)\]: the transformer's layout has two axes"):
        expert(net, 8, mesh=[("all", 8)])
    for devices, reason in ((12, "batch=16 by 3 "), (7, "heads=8 or d_ff=64 by 7;")):  # meshes of 3 x 4 and 1 x 7
        with pytest.raises(InfeasibleError, match=reason):
            expert(net, devices)
    assert [most_devices(expert, net, devices) for devices in (16, 12, 7, 3, 1)] == [16, 8, 4, 2, 1]


def test_an_expert_has_a_strategy_where_the_batch_splits(graph):
    assert [most_devices(expert, graph, devices) for devices in (64, 63, 12, 7, 1)] == [64, 32, 8, 4, 1]


def test_a_layout_leaves_whole_what_it_cannot_split():
    layer = Layer("l", "matmul", {"batch": 6, "a": 8, "b": 8}, ("batch", "a", "b"), (), ())
    net = ComputationGraph("net", (layer,), (), 0)
    rules = {"batch": "x", "a": "y", "b": "y"}
    assert configurations_of_layout(net, [("x", 4), ("y", 2)], rules) == (Configuration((("", 4), ("a", 2))),)
