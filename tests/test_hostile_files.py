"""Files of ours that somebody changed: whatever stands in them, one line says what is wrong with which file."""

import contextlib
import copy
import json
import math

import pytest
from small_graphs import perceptron

from pase_mtf import find_strategy
from pase_mtf.errors import FormatError
from pase_mtf.graph.computation_graph import ComputationGraph, _hash
from pase_mtf.machine.machine import Machine
from pase_mtf.pipeline.find import find_pipeline
from pase_mtf.pipeline.pipeline import Pipeline
from pase_mtf.strategy.strategy import Strategy

LOADERS = {"machine": Machine.load, "strategy": Strategy.load, "graph": ComputationGraph.load,
           "pipeline": Pipeline.load}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """What a file of either kind holds."""
    folder = tmp_path_factory.mktemp("files")
    graph = perceptron((8, 16, 8), batch=16)
    graph.save(folder / "graph.json")
    find_strategy(graph, devices=8, machine="h100").save(folder / "strategy.json")
    Machine.load("h100").save(folder / "machine.json")
    find_pipeline({1: graph}, 2, "h100", stages=2).save(folder / "pipeline.json")
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in LOADERS}


def refused(tmp_path, kind, text):
    path = tmp_path / f"{kind}.json"
    path.write_text(text)
    with pytest.raises(FormatError) as caught:
        LOADERS[kind](path)
    message = str(caught.value)
    assert f"{kind}.json" in message
    assert "\n" not in message
    assert len(message) < 400 + len(str(path))


def changed(data, where, value):
    """The contents of a file with something else in one place; a graph with the hash that it then has."""
    data = copy.deepcopy(data)
    place = data
    for step in where[:-1]:
        place = place[step]
    place[where[-1]] = value
    if data["format"] == "pase_mtf.graph" and where != ("hash",):
        with contextlib.suppress(TypeError, KeyError, AttributeError):
            data["hash"] = _hash(data)
    return json.dumps(data)


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("text", [
    "[" * 100_000, '{"a":' * 100_000, "1" * 5000, "NaN", '{"format": "x", "version": 1}', "\ud800"])
def test_no_file_of_ours(tmp_path, kind, text):
    path = tmp_path / f"{kind}.json"
    path.write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(FormatError, match=r"\.json") as caught:
        LOADERS[kind](path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("version", [None, True, "1", 0, -1, 1.0, 10 ** 400, [1]])
def test_versions_that_are_none(files, tmp_path, kind, version):
    refused(tmp_path, kind, changed(files[kind], ("version",), version))


@pytest.mark.parametrize(("where", "value"), [
    (("shared_cores",), "yes"), (("shared_cores",), 1), (("memory_bandwidth",), True), (("memory_bandwidth",), "1e9"),
    (("memory_bytes",), 10 ** 400), (("memory_bytes",), 1e-300), (("rates", "matmul"), 1e-300),
    (("rates", "tanh"), 1e9),
    (("rates", "matmul"), None), (("rates",), []), (("links", 0, "devices"), 8.0), (("links", 0, "devices"), "8"),
    (("links", 0, "surprise"), 1), (("links",), {}), (("links", 0), []), (("overheads",), {"tanh": 1e-6}),
    (("ring",), False), (("name",), 5), (("measured",), []), (("overhead",), "0"), (("source",), None)])
def test_machines(files, tmp_path, where, value):
    refused(tmp_path, "machine", changed(files["machine"], where, value))


@pytest.mark.parametrize(("where", "value"), [
    (("devices",), 3), (("devices",), "8"), (("devices",), -8), (("devices",), None), (("devices",), True),
    (("devices",), 10 ** 400), (("search", "useful_devices"), "all"), (("search", "useful_devices"), 9.0),
    (("search", "suggested_devices"), -1),
    (("seconds",), None), (("seconds",), "1"), (("memory",), [1]), (("memory",), {"weights": None}),
    (("edge_parts",), []),
    (("configurations", 0), [["width0", 8.0]]), (("configurations", 0), [["width0"]]), (("configurations", 0), [5]),
    (("configurations", 0), [["batch", 2], ["batch", 4]]), (("configurations", 0), [["batch", 1]]),
    (("configurations", 0), [["batch", 10 ** 30]]), (("configurations", 0), [[["batch"], 8]]),
    (("configurations",), {}),
    (("layer_names", 0), 5), (("layer_parts", 0), 5), (("search",), 5), (("search", "optimal"), "yes"),
    (("search", "gap"), None), (("surprise",), 1), (("graph_hash",), 5), (("search", "trial"), []),
    (("search", "trial"), {"milliseconds": {}, "steps": 5, "taken": []}),
    (("search", "trial"), {"milliseconds": {"search": [10 ** 400, 1.0]}, "steps": 5, "taken": "search"}),
    (("search", "trial"), {"milliseconds": {"search": [1.0, 1.0]}, "steps": 5, "taken": "expert"}),
    *((("search", name), value) for name, value in (
        ("assumed", 5), ("assumed", "all"), ("assumed", [5]), ("memory_limit", "1GB"), ("memory_limit", None),
        ("lower_bound", "0"), ("lower_bound", True), ("lower_bound", 10 ** 400), ("simpler", 5),
        ("best_seconds", [1.0]), ("seconds", "1"), ("seconds", 10 ** 400), ("build_seconds", None), ("layers", 2.0),
        ("configurations", "many"), ("configurations", 10 ** 400), ("method", 5), ("gap", "0"), ("optimal", None)))])
def test_strategies(files, tmp_path, where, value):
    refused(tmp_path, "strategy", changed(files["strategy"], where, value))


@pytest.mark.parametrize("missing", [("gap",), ("optimal",), ("gap", "optimal")])
def test_a_simpler_strategy_is_told_with_its_gap(files, tmp_path, missing):
    data = copy.deepcopy(files["strategy"])
    data["search"].update(simpler="data_parallel", best_seconds=1.0)
    path = tmp_path / "strategy.json"
    path.write_text(json.dumps(data))
    assert Strategy.load(path).search["simpler"] == "data_parallel"
    for name in missing:
        del data["search"][name]
    refused(tmp_path, "strategy", json.dumps(data))


def test_bounds_may_be_infinite(tmp_path):
    graph, path = perceptron((8, 16, 8), batch=16), tmp_path / "strategy.json"
    found = find_strategy(graph, 8, "h100", "mcmc", proposals=10)
    found.save(path)
    assert Strategy.load(path) == found
    assert found.search["lower_bound"] == -float("inf")


@pytest.mark.parametrize(("where", "value"), [
    (("schedule",), None), (("devices",), "2"), (("stages", 0, "devices"), 1.5),
    (("stages", 0, "memory"), {"weights": None}), (("configurations", 0), 5),
    (("search",), None), (("search", "gap"), None), (("search", "gap"), "0"),
    (("search", "gap"), math.nan), (("search", "lower_bound"), []), (("search", "optimal"), 1),
    (("search", "pairs"), 2.5), (("search", "microbatches"), [None]), (("search", "microbatches"), "2"),
    (("search", "simulated"), None), (("search", "seconds"), "long"), (("search", "kernels"), None),
    (("search", "kernels"), {}), (("search", "surprise"), 1)])
def test_pipelines(files, tmp_path, where, value):
    refused(tmp_path, "pipeline", changed(files["pipeline"], where, value))


def test_a_pipeline_may_be_as_far_as_can_be_from_a_bound(files, tmp_path):
    (tmp_path / "pipeline.json").write_text(changed(files["pipeline"], ("search", "gap"), math.inf))
    assert "the shortest" in Pipeline.load(tmp_path / "pipeline.json").table()


@pytest.mark.parametrize(("where", "value"), [
    (("layers", 0, "dims"), {"batch": "16"}), (("layers", 0, "dims"), {"batch": -16}), (("layers", 0, "dims"), []),
    (("layers", 0, "splittable"), ["nothing"]), (("layers", 0, "name"), None), (("layers", 0), 5), (("layers",), {}),
    (("layers", 0, "operations", 0, "flops"), True), (("layers", 0, "operations", 0, "flops"), -1.0),
    (("layers", 0, "operations", 0, "role"), "guard"), (("layers", 0, "operations", 0, "shift"), ["batch"]),
    (("layers", 0, "operations", 0, "inputs"), [{}]), (("layers", 0, "operations", 0, "partial_sums"), [["batch"]] * 9),
    (("edges", 0, "source"), 99), (("edges", 0, "source"), -1), (("edges", 0, "shape"), [16]),
    (("edges", 0, "itemsize"), 4.0), *((("layers", 0, "operations", 0, "held"), [row]) for row in (
        [0], [0] * 10, [0.5, 0, 1], [0, 0, -7.5], [0, 0, 1, -1.0], [0, 0, True])),
    (("edges", 0, "shape"), [2 ** 62, 2 ** 62]), (("edges", 0, "surprise"), 1), (("operations",), "9"), (("meta",), []),
    (("hash",), "0"), (("hash",), None)])
def test_graphs(files, tmp_path, where, value):
    refused(tmp_path, "graph", changed(files["graph"], where, value))


def test_every_field_is_missed(files, tmp_path):
    for kind, data in files.items():
        optional = {"source", "measured", "shared_cores", "overhead_within", "sums_by_trees", "unfolding_threads",
                    "efficiency", "sent"}
        for name in set(data) - optional:
            refused(tmp_path, kind, json.dumps({key: value for key, value in data.items() if key != name}))


def test_two_machines_do_not_compare():
    graph = perceptron((8, 16, 8), batch=16)
    one, other = (find_strategy(graph, devices=8, machine=name) for name in ("h100", "1080ti"))
    assert "different machines, h100 and 1080ti: the times do not compare" in one.diff(other)
    assert "different machines" not in one.diff(one)
    fewer = find_strategy(graph, devices=4, machine="h100")
    assert "for 8 and for 4 devices" in one.diff(fewer)


@pytest.mark.parametrize("assumed", [5, "all", [5], None])
def test_what_a_graph_rests_on_is_sentences(files, tmp_path, assumed):
    refused(tmp_path, "graph", changed(files["graph"], ("meta", "assumed"), assumed))


def test_a_layer_on_more_devices_than_python_writes_down(files, tmp_path):
    wide = [["batch", 10 ** 4000], ["width0", 10 ** 4000]]
    refused(tmp_path, "strategy", changed(files["strategy"], ("configurations", 0), wide))


def test_links_of_more_devices_than_arrays_hold(files, tmp_path):
    links = [{"devices": 8 * 10 ** power, "bandwidth": 1e9, "latency": 1e-6} for power in (0, 30, 31)]
    refused(tmp_path, "machine", changed(files["machine"], ("links",), links))


@pytest.mark.parametrize("where", [
    ("edges", 0, "trips"), ("layers", 0, "operations", 0, "trips"), ("layers", 0, "operations", 0, "nodes")])
def test_what_happens_more_often_than_numbers_tell(files, tmp_path, where):
    refused(tmp_path, "graph", changed(files["graph"], where, 10 ** 400))


def test_more_threads_than_arrays_hold(files, tmp_path):
    for threads in (1 << 70, 10 ** 400):
        refused(tmp_path, "machine", changed(files["machine"], ("unfolding_threads",), threads))


@pytest.mark.parametrize(("where", "value"), [
    (("layers", 0, "operations", 0, "role"), "rename"), (("layers", 0, "operations", 0, "role"), "shift"),
    (("layers", 0, "operations", 0, "phase"), "sideways"), (("edges", 0, "phase"), "sideways"),
    (("layers", 0, "operations", 0, "shift"), ["batch", 10 ** 400])])
def test_graphs_that_nobody_can_price(files, tmp_path, where, value):
    refused(tmp_path, "graph", changed(files["graph"], where, value))


def test_a_product_that_makes_nothing(files, tmp_path):
    data = copy.deepcopy(files["graph"])
    product = data["layers"][0]["operations"][0]
    product["outputs"] = []
    del product["held"]
    data["hash"] = _hash(data)
    refused(tmp_path, "graph", json.dumps(data))


def test_rows_that_are_cut_out_of_nothing(files, tmp_path):
    data = copy.deepcopy(files["graph"])
    data["layers"][0]["operations"][0] |= {"kind": "gather", "traffic": 0.0, "inputs": []}
    data["hash"] = _hash(data)
    refused(tmp_path, "graph", json.dumps(data))


@pytest.mark.parametrize(("number", "changes"), [
    (3, {"role": "drawn"}), (3, {"index": -1}), (0, {"role": "top-k", "inputs": []}), (3, {"role": "filter gradient"})])
def test_operations_that_lack_what_their_role_is_about(files, tmp_path, number, changes):
    data = copy.deepcopy(files["graph"])
    data["layers"][0]["operations"][number] |= changes
    data["hash"] = _hash(data)
    refused(tmp_path, "graph", json.dumps(data))
