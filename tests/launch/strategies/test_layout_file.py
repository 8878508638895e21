"""layout.txt claims that one mesh puts every tensor where the strategy does: checked by device."""

import itertools
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase_mtf.graph.computation_graph import ComputationGraph, Layer
from pase_mtf.graph.configurations import Configuration
from pase_mtf.launch.strategies.layout_file import layout_text, single_mesh

_LAYERS = (
    Layer("first", "matmul", {"batch": 64, "hidden": 64, "io": 64}, ("batch", "hidden", "io"), (), ()),
    Layer("second", "matmul", {"batch": 64, "hidden": 64}, ("batch", "hidden"), (), ()),
    Layer("third", "other", {"io": 64, "rest": 3}, ("io",), (), ()),
)
_GRAPH = ComputationGraph("net", _LAYERS, (), 0)


def _placed_by_mesh(mesh, rules, dims, device):
    """Part of every dim that the device holds under a Mesh-TF mesh shape and layout, computed from scratch."""
    coordinates = {}
    for name, size in reversed(mesh):
        device, coordinates[name] = divmod(device, size)
    return [coordinates[rules[dim]] if dim in rules else 0 for dim in dims]


def _placed_by_configuration(configuration, dims, device):
    _, cuts = configuration.partition(dims)
    return [(device // stride) % parts for parts, stride in cuts]


@pytest.mark.parametrize("axes", [
    [[("batch", 8)], [("batch", 8)], [("", 8)]],
    [[("batch", 2), ("hidden", 4)], [("batch", 2), ("hidden", 4)], [("", 2), ("", 4)]],
    [[("batch", 2), ("hidden", 4)], [("batch", 2), ("hidden", 4)], [("", 8)]],
    [[("io", 2), ("batch", 4)], [("", 2), ("batch", 4)], [("io", 2), ("", 4)]],
    [[("", 8)], [("", 8)], [("", 8)]],
])
def test_one_mesh(axes):
    configurations = [Configuration(tuple(entry)) for entry in axes]
    mesh, rules = single_mesh(_GRAPH, configurations, 8)
    for layer, configuration in zip(_LAYERS, configurations, strict=True):
        for device in range(8):
            assert (_placed_by_mesh(mesh, rules, layer.dims, device)
                    == _placed_by_configuration(configuration, list(layer.dims), device))
    text = layout_text(_GRAPH, configurations, 8, "mine")
    assert "mesh_shape = " + ";".join(f"{name}:{size}" for name, size in mesh) in text


def test_one_mesh_of_some_devices():
    split = Configuration((("batch", 6),))
    assert single_mesh(_GRAPH, [split, split, Configuration((("", 6),))], 8) == ([("axis_0", 6)], {"batch": "axis_0"})
    text = layout_text(_GRAPH, [split, split, Configuration((("", 6),))], 8, "mine")
    assert "One mesh over the first 6 of them, while the others idle, expresses it" in text
    assert "mesh_shape = axis_0:6\nlayout = batch:axis_0" in text


def test_a_renamed_dim_needs_the_same_rule():
    layers = (Layer("first", "matmul", {"batch": 64, "io": 64}, ("batch", "io"), (), (), {"memory": "io"}),
              Layer("second", "matmul", {"memory": 64}, ("memory",), (), ()))
    graph = ComputationGraph("net", layers, (), 0)
    split = Configuration((("io", 8),))
    assert single_mesh(graph, [split, Configuration((("memory", 8),))], 8)[1] == {"io": "axis_0", "memory": "axis_0"}
    assert single_mesh(graph, [split, Configuration((("", 8),))], 8) is None
    assert "layout = io:axis_0;memory:axis_0" in layout_text(graph, [split, Configuration((("", 8),))], 8, "mine")


@pytest.mark.parametrize("axes", [
    [[("batch", 8)], [("hidden", 8)], [("", 8)]],  # a layer leaves whole what another splits
    [[("batch", 2), ("hidden", 4)], [("hidden", 4), ("batch", 2)], [("", 8)]],  # two orders
    [[("batch", 8)], [("batch", 4), ("hidden", 2)], [("", 8)]],  # other parts
    [[("batch", 8)], [], [("", 8)]],  # fewer devices
])
def test_layers_that_do_not_agree(axes):
    configurations = [Configuration(tuple(entry)) for entry in axes]
    assert single_mesh(_GRAPH, configurations, 8) is None
    lines = layout_text(_GRAPH, configurations, 8, "mine").splitlines()
    assert [line.split(":")[0] for line in lines if not line.startswith("#")] == ["first", "second", "third"]


_ENTRIES = [()] + [tuple(zip(dims, parts, strict=True)) for length in (1, 2)
                   for dims in itertools.product(("batch", "hidden", "io", ""), repeat=length)
                   for parts in {1: [(8,)], 2: [(2, 4), (4, 2)]}[length]
                   if len({dim for dim in dims if dim}) == sum(map(bool, dims))]


@given(st.lists(st.sampled_from(_ENTRIES), min_size=3, max_size=3))
def test_a_mesh_is_only_claimed_where_it_holds(entries):
    configurations = [Configuration(tuple((dim if dim in layer.splittable else "", parts) for dim, parts in entry))
                      for layer, entry in zip(_LAYERS, entries, strict=True)]
    found = single_mesh(_GRAPH, configurations, 8)
    if found:
        used, = {configuration.devices for configuration in configurations}
        for layer, configuration in zip(_LAYERS, configurations, strict=True):
            for device in range(used):
                assert (_placed_by_mesh(*found, layer.dims, device)
                        == _placed_by_configuration(configuration, list(layer.dims), device))


def test_beside_a_strategy_of_many_meshes_stands_the_best_of_one(launch):
    """Eight devices are enough for the layers of alexnet to want different meshes."""
    code, folder, _, err = launch("--search_only", "--mesh=8", "--compare=none", "--preset=tiny", "--machine=1080ti")
    # On a busy machine the search for it takes long enough to say how far it is.
    told = [line for line in re.split(r"[\r\n]", err) if line.strip() and not re.search(r"\[\d\d:\d\d\]", line)]
    assert (code, told) == (0, [])
    text = (folder / "layout.txt").read_text()
    assert "No single mesh expresses it" in text
    single, times, ours = map(float, re.search(
        r"can do is simulated ([0-9.]+) ms a step, ([0-9.]+) times this strategy's ([0-9.]+) ms", text).groups())
    assert re.search(r"^# mesh_shape = \S+\n# layout = \S+$", text, re.MULTILINE)
    row = json.loads((folder / "summary.json").read_text())["arms"]["search"]
    assert ours == pytest.approx(row["simulated_ms"], abs=1e-3)
    assert single >= ours
    assert times == pytest.approx(single / ours, abs=0.02)


def test_a_strategy_that_one_mesh_expresses_needs_no_other(launch, monkeypatch):
    monkeypatch.setattr("pase_mtf.launch.strategies.layout_file.best_single_layout", lambda *_: pytest.fail("searches"))
    code, folder, *_ = launch("--search_only", "--strategy=data_parallel", "--compare=none")
    assert code == 0
    assert "One mesh expresses it" in (folder / "layout.txt").read_text()
