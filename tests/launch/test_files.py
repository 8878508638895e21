"""The files of a run. layout.txt claims that one mesh puts every tensor where the strategy does: checked by device."""

import itertools
import json
import os
import resource
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase_mtf.compat import tf
from pase_mtf.errors import PaseError, UsageError
from pase_mtf.graph.computation_graph import ComputationGraph, Layer
from pase_mtf.graph.configurations import Configuration
from pase_mtf.launch.files import RunFiles, layout_text, single_mesh
from pase_mtf.launch.training import Record

_RECORD = Record("search", 3, 0.5, 0.02, True)


def test_metrics_and_events(tmp_path):
    folder = str(tmp_path / "a" / "run")
    with RunFiles(folder) as files:
        files.metric(_RECORD)
        files.metric(Record("search", 4, 0.25, 0.02, False))
        files.write("layout.txt", "text")
    lines = [json.loads(line) for line in (tmp_path / "a" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0] == {"step": 3, "arm": "search", "loss": 0.5, "ms": 20.0, "timed": True}
    assert [line["step"] for line in lines] == [3, 4]

    (events,) = (tmp_path / "a" / "run" / "events" / "search").iterdir()
    found = {(event.step, value.tag): value.simple_value
             for event in tf.train.summary_iterator(str(events)) for value in event.summary.value}
    assert found == {(3, "loss"): 0.5, (3, "step_ms"): 20.0, (4, "loss"): 0.25}


def test_never_into_a_folder_that_exists(tmp_path):
    with pytest.raises(UsageError, match="never overwritten"):
        RunFiles(str(tmp_path))


def test_nor_where_none_can_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be made"):
        RunFiles(str(tmp_path / "file" / "run"))


@pytest.mark.parametrize("measured", [False, True])
def test_a_run_that_measured_nothing_leaves_nothing(tmp_path, measured):
    def fails():
        with RunFiles(str(tmp_path / "run")) as files:
            files.write("config.json", "{}")
            if measured:
                files.metric(_RECORD)
            raise PaseError("no strategy")
    with pytest.raises(PaseError):
        fails()
    assert (tmp_path / "run").exists() == measured


def test_full_disk(tmp_path, monkeypatch):
    """/dev/full answers every write as a full disk does."""
    monkeypatch.setattr(RunFiles, "path", lambda self, name: "/dev/full" if name == "metrics.jsonl"
                        else os.path.join(self.folder, name))
    with pytest.raises(UsageError, match="No space left on device; free space") as caught, \
            RunFiles(str(tmp_path / "run")) as files:
        files.metric(_RECORD)
    assert "\n" not in str(caught.value)


def test_a_disk_that_is_full_in_the_middle_of_a_line(tmp_path, monkeypatch):
    """The limit on the size of a file stands in for the disk: it too takes what fits of a write, and then no more."""
    monkeypatch.setattr(RunFiles, "_events", lambda *_: None)
    path = tmp_path / "run" / "metrics.jsonl"
    limits, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with RunFiles(str(tmp_path / "run")) as files:
            files.metric(_RECORD)
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, limits[1]))
            with pytest.raises(UsageError, match="cannot write"):
                files.metric(_RECORD)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    line, = path.read_text().splitlines()
    assert json.loads(line)["step"] == 3


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
        for layer, configuration in zip(_LAYERS, configurations, strict=True):
            assert configuration.devices == 8
            for device in range(8):
                assert (_placed_by_mesh(*found, layer.dims, device)
                        == _placed_by_configuration(configuration, list(layer.dims), device))
