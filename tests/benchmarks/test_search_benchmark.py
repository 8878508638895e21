"""The benchmark of the searches: its rivals agree with brute force, its networks and its page are what they say."""

import itertools
import json
import math
import pathlib
import subprocess

import numpy as np
import pytest
from markdown_cells import row_of, rows

from benchmarks import (
    breadth_first,
    search,
    search_document,
    search_memory,
    search_networks,
    search_plot,
    search_sections,
    solvers,
)
from benchmarks.search_densenet import BLOCKS, densenet, paper_configurations, paper_machine
from benchmarks.search_networks import Variation, Workshop, price_densenet, shuffled
from benchmarks.search_process import main as search_process
from pase_mtf.cost.build import build_network
from pase_mtf.errors import UsageError
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.search import solve
from pase_mtf.search.memory import least_memory
from pase_mtf.search.network import CostNetwork, NetworkEdge
from pase_mtf.search.pase import generate_sequence
from tests.random_networks import random_network
from tests.small_graphs import perceptron

INSTANCES = pathlib.Path(__file__).parents[1] / "data" / "instances"
PACKAGES = {"milp": "scipy", "toulbar2": "pytoulbar2", "cpsat": "ortools"}


# -- DenseNet ----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def graph():
    return densenet()


def test_densenet_121_has_the_published_sizes(graph):
    kinds = [layer.kind for layer in graph.layers]
    # 120 convolutions and one fully connected layer: the 121 of its name.
    assert (kinds.count("convolution"), kinds.count("matmul")) == (120, 1)
    assert kinds.count("other") == sum(BLOCKS)
    assert graph.parameters == 7_978_856  # torchvision.models.densenet121
    products = [operation for layer in graph.layers for operation in layer.operations
                if operation.kind in ("convolution", "matmul")]
    per_image = sum(operation.flops for operation in products) / 2 / 128
    assert per_image == pytest.approx(2.9e9, rel=0.03)  # published: 2.9 billion multiply-adds
    assert graph.layers[-2].dims == {"batch": 128, "out": 1000, "in": 1024}


def test_every_earlier_layer_of_a_block_has_an_edge_to_each_concatenation(graph):
    reads = {}
    for edge in graph.edges:
        reads.setdefault(edge.target, []).append(edge.source)
    seen = 0
    for index, layer in enumerate(graph.layers):
        if layer.kind == "other":
            block, _, number = layer.name.removesuffix("/concat").partition("/layer")
            names = [graph.layers[source].name for source in reads[index]]
            assert names[1:] == [f"{block}/layer{earlier}/conv2" for earlier in range(1, int(number) + 1)]
            assert layer.dims["channels"] == sum(
                edge.shape[1] for edge in graph.edges if edge.target == index)
            seen += 1
    assert seen == sum(BLOCKS)


def _largest_dependent_set(graph):
    """Of the paper's order."""
    pairs = {tuple(sorted((edge.source, edge.target))) for edge in graph.edges}
    neighbours = {layer: set() for layer in range(len(graph.layers))}
    for u, v in pairs:
        neighbours[u].add(v)
        neighbours[v].add(u)
    largest = 0
    for layer in generate_sequence(len(graph.layers), sorted(pairs)):
        around = neighbours.pop(layer)
        largest = max(largest, len(around))
        for other in around:
            neighbours[other] = (neighbours[other] | around) - {layer, other}
    return largest


def test_no_order_keeps_the_dependent_sets_of_dense_blocks_small():
    sizes = [_largest_dependent_set(densenet(blocks=(depth,))) for depth in (4, 8, 16)]
    assert sizes == sorted(set(sizes))
    assert sizes[-1] >= 8
    assert {_largest_dependent_set(densenet(blocks=(depth,), direct=False)) for depth in (4, 8, 16)} == {2}


@pytest.mark.parametrize("devices", [8, pytest.param(16, marks=pytest.mark.slow)])
def test_it_is_the_graph_of_the_instances(devices):
    graph, instance = densenet(normalization="layer"), CostNetwork.load(INSTANCES / f"densenet-direct_{devices}.npz")
    assert [(edge.source, edge.target) for edge in graph.edges] == [
        (edge.source, edge.target) for edge in instance.edges]
    offered = [paper_configurations(layer, devices, every_divisor=True) for layer in graph.layers]
    assert tuple(map(len, offered)) == instance.sizes
    ours = build_network(graph, paper_machine(), devices, offered, "pase").network
    equal = [np.allclose(a, b) for a, b in zip(ours.vectors, instance.vectors, strict=True)]
    assert sum(equal) == 243
    # What differs is named in the module: kernels larger than 1x1, pooling, the softmax.
    different = {graph.layers[number].name.rpartition("/")[2] for number, same in enumerate(equal) if not same}
    assert different == {"conv0", "conv2", "pool", "pool0", "softmax"}
    assert solve(ours, certificate=False).cost == pytest.approx(solve(instance, certificate=False).cost, rel=1e-3)


def test_chain_is_the_graph_of_the_other_instance():
    instance = CostNetwork.load(INSTANCES / "densenet-chain_8.npz")
    assert sorted((edge.source, edge.target) for edge in densenet(direct=False).edges) == sorted(
        (edge.source, edge.target) for edge in instance.edges)


def test_unknown_normalization():
    with pytest.raises(ValueError, match="normalization='none'"):
        densenet(normalization="none")


# -- rivals ------------------------------------------------------------------------------------------------------------
def test_breadth_first_by_hand():
    assert breadth_first.breadth_first_order(5, [(0, 3), (3, 1), (2, 4)]) == [0, 3, 1, 2, 4]
    # On a path of 4 the frontier is the next layer: 3 tables over one layer of 5 configurations, one over none.
    ends = np.arange(5)
    path = CostNetwork([np.ones(5)] * 4, [NetworkEdge(i, i + 1, np.ones((5, 5)), ends, ends) for i in range(3)])
    assert solve(path, "breadth_first").statistics["table_entries"] == 16
    with pytest.raises(UsageError, match=r"breadth_first: tables of .* need .* GB"):
        solve(CostNetwork.load(INSTANCES / "densenet-direct_16.npz"), "breadth_first")


@pytest.mark.parametrize("solver", ["exact", "pase", "breadth_first", "milp", "toulbar2", "cpsat"])
def test_solvers_agree_with_brute_force(solver):
    if solver in PACKAGES:
        pytest.importorskip(PACKAGES[solver])
    for seed in [*range(18), *range(54, 63), *range(72, 81)]:  # floats, integers, forbidden entries, negative costs
        network = random_network(seed, most_assignments=2000)
        best = min(network.cost(choice) for choice in itertools.product(*map(range, network.sizes)))
        if math.isinf(best):
            continue
        outcome = solvers.SOLVERS[solver](network, 300.0)
        assert outcome["optimal"]
        assert outcome["cost"] == pytest.approx(best, rel=1e-6, abs=1e-6), seed


@pytest.mark.parametrize("solver", ["milp", "toulbar2", "cpsat"])
@pytest.mark.parametrize(("name", "optimum"), [("alexnet_8", 97098296512), ("rnnlm_8", 4024963186688)])
def test_rivals_find_the_known_optima(solver, name, optimum):
    pytest.importorskip(PACKAGES[solver])
    outcome = solvers.SOLVERS[solver](CostNetwork.load(INSTANCES / f"{name}.npz"), 300.0)
    assert outcome["optimal"]
    assert outcome["cost"] == optimum


@pytest.mark.parametrize(("solver", "constant"), [("milp", "_MOST_VARIABLES"), ("toulbar2", "_MOST_ENTRIES")])
def test_rivals_refuse_what_would_not_fit(solver, constant, monkeypatch, capsys):
    pytest.importorskip(PACKAGES[solver])
    monkeypatch.setattr(solvers, constant, 10)
    monkeypatch.setattr(solvers.resource, "setrlimit", lambda *_: None)
    assert solvers.main([solver, str(INSTANCES / "rnnlm_8.npz")]) == 0
    assert json.loads(capsys.readouterr().out)["error"].startswith("refused")


def test_a_solver_that_is_not_installed_says_so(monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "pytoulbar2", None)
    monkeypatch.setattr(solvers.resource, "setrlimit", lambda *_: None)
    assert solvers.main(["toulbar2", str(INSTANCES / "rnnlm_8.npz")]) == 0
    assert json.loads(capsys.readouterr().out)["error"] == "not installed"


def test_mcmc_starts_where_people_would(tmp_path):
    workshop = Workshop(tmp_path)
    path = workshop.densenet_network("batch", 8)
    network = CostNetwork.load(path)
    (first, by_batch), (second, by_expert) = solvers.starts(network, path)
    assert (first, second) == ("data parallelism", "expert")
    graph = densenet()
    offered = [paper_configurations(layer, 8) for layer in graph.layers]
    splits = [choices[index].splits for choices, index in zip(offered, by_batch, strict=True)]
    assert splits == [{"batch": 8}] * len(splits)
    assert math.isfinite(network.cost(by_expert))
    # An instance does not say what its configurations are.
    path = str(INSTANCES / "rnnlm_8.npz")
    network = CostNetwork.load(path)
    names = [name for name, start in solvers.starts(network, path) if math.isfinite(network.cost(start))]
    assert names == ["each layer's cheapest", "random"]


def test_networks_of_other_sources_are_made_anew(tmp_path, monkeypatch):
    """They were found by their names, whatever prices they had been made with."""
    source = tmp_path / "prices" / "cost.py"
    source.parent.mkdir()
    monkeypatch.setattr(search_networks, "_SOURCES", [str(source.parent)])
    paths = []
    for text in ("a = 1", "a = 2", "a = 1"):
        source.write_text(text)
        paths.append(Workshop(tmp_path / "work").shuffled_network("alexnet_8"))
    assert paths[0] == paths[2] != paths[1]
    assert [pathlib.Path(path).is_file() for path in paths] == [True] * 3


# -- networks ----------------------------------------------------------------------------------------------------------
def test_scaled_networks_differ_and_share():
    network = CostNetwork.load(INSTANCES / "transformer_4.npz")
    first, second = (search_networks.scaled(network, 2.0, factor, np.random.default_rng(0)) for factor in (0.5, 4.0))
    assert first.distinct_matrices == network.distinct_matrices
    assert first.sizes == network.sizes
    zeros = (0,) * len(network.vectors)
    assert len({net.cost(zeros) for net in (network, first, second)}) == 3


def test_shuffling_keeps_the_numbers():
    network = CostNetwork.load(INSTANCES / "alexnet_8.npz")
    hard = shuffled(network)
    for ours, theirs in zip(hard.edges, network.edges, strict=True):
        np.testing.assert_array_equal(np.sort(ours.matrix.ravel()), np.sort(theirs.matrix.ravel()))
    assert any((ours.matrix != theirs.matrix).any() for ours, theirs in zip(hard.edges, network.edges, strict=True))


def test_variations_cover_graphs_devices_bandwidth_and_batch():
    drawn = [Variation.draw(seed) for seed in range(500)]
    assert drawn == [Variation.draw(seed) for seed in range(500)]
    assert len({variation.graph for variation in drawn}) == 7
    assert {variation.devices for variation in drawn} == {2, 4, 6, 8, 12, 16, 24, 32, 64}
    assert len({variation.batch for variation in drawn if isinstance(variation.batch, int)}) == 9
    assert min(variation.bandwidth for variation in drawn) < 0.1 < 10 < max(variation.bandwidth for variation in drawn)


def test_bandwidth_of_a_variation_changes_communication_only(tmp_path):
    workshop, seed = Workshop(tmp_path), 0
    while not (Variation.draw(seed).graph == "densenet-direct" and Variation.draw(seed).devices == 4):
        seed += 1
    slow, fast = (search_networks.price(search_networks.dataclasses.replace(
        Variation.draw(seed), bandwidth=factor), workshop)[0] for factor in (1.0, 4.0))
    for one, other in zip(slow.edges, fast.edges, strict=True):
        np.testing.assert_allclose(one.matrix, 4 * other.matrix)
    assert all((a >= b).all() for a, b in zip(slow.vectors, fast.vectors, strict=True))


# -- processes, the page -----------------------------------------------------------------------------------------------
def test_process_from_a_graph(tmp_path, capsys):
    path = tmp_path / "graph.json"
    perceptron().save(path)
    outcome, seconds = search_sections._run("benchmarks.search_process", str(path), "--machine=h100", "--devices=4",
                                            "--repeat=1", timeout=300)
    assert outcome["optimal"]
    assert outcome["layers"] == len(ComputationGraph.load(path).layers)
    assert outcome["warm_seconds"] == pytest.approx(outcome["warm_build_seconds"] + outcome["warm_search_seconds"])
    assert outcome["warm_seconds"] < seconds
    assert 50e6 < outcome["peak_bytes"] < 1e9  # Python, numpy and numba, no worker of pytest
    assert search_process([str(tmp_path / "missing.json")]) == 2
    assert "cannot read" in capsys.readouterr().err


def _result(cost=1.0, **more):
    return {"cost": cost, "optimal": True, "lower_bound": cost, "seconds": 1.0, "peak_bytes": 1e8, "limit": 60.0,
            "process_seconds": 2.0, **more}


def test_limits_are_met_or_not():
    rows = {"x_8": {**_result(), "process_seconds": 0.9, "start_seconds": 0.5, "search_seconds": 0.1}}
    (_, limit, measured, proven, met), = search_document.limits({"instances": rows})
    assert (limit, measured, proven, met) == ("0.5 s above start-up", "at most 400 ms (x_8)", "1 of 1", True)
    rows["x_8"]["process_seconds"] = 1.1
    assert not search_document.limits({"instances": rows})[0][-1]
    rows["x_8"] |= {"process_seconds": 0.9, "optimal": False}
    assert search_document.limits({"instances": rows})[0][-2:] == ("0 of 1", False)
    deep = {"transformer-big-96+96_1024": {**_result(), "process_seconds": 5.0, "load_seconds": 1.0, "layers": 3,
                                           "build_seconds": 1.0, "search_seconds": 1.0, "edges": 2}}
    assert search_document.limits({"scale": deep})[0][-1]
    deep["transformer-big-96+96_1024"]["peak_bytes"] = 1.1e9
    assert not search_document.limits({"scale": deep})[0][-1]
    exported = {"transformer-big-96+96, exported": {"layers": 3, "operations": 9, "export_seconds": 14.0,
                                                    "program_seconds": 6.0, "process_seconds": 24.0}}
    assert search_document.limits({"scale": exported})[0][1:] == (
        "15 s", "14 s (making the program 6.00 s; whole process 24 s)", "", True)
    exported["transformer-big-96+96, exported"]["export_seconds"] = 15.1
    assert not search_document.limits({"scale": exported})[0][-1]
    hard = {"shuffled": {"hard": _result(optimal=False, lower_bound=0.9)}}
    assert search_document.limits(hard)[0][2:] == ("gap 10.0% after 1.00 s, 100 MB", "no (hard by construction)", True)
    hard["shuffled"]["hard"] = {"error": "out of memory"}
    assert not search_document.limits(hard)[0][-1]
    assert search_document.limits({"scale": {"x": {"error": "broke"}}}) == [("x", "", "broke", "no", False)]


def test_page():
    results = {
        "facts": {"all": {"machine": "Chip, 2 cores", "versions": "Python 9"}},
        "variations": {"0": {"what": "a net", "build_seconds": 1.0, "search_seconds": 5.0, "optimal": True, "gap": 0.0,
                             "commit": "abc"}},
        "rivals": {"x_8 | size": {"layers": 1, "edges": 0, "configurations": 2}, "x_8 | exact": _result(),
                   "x_8 | mcmc (1)": _result(2.0, optimal=False, lower_bound=-math.inf, start="random"),
                   "x_8 | pase": {"error": "pase: tables of 1e+09 entries need 12 GB, 8 GB are free; use exact"},
                   "x_8 | toulbar2": {"error": "not installed"}}}
    text = search_document.document(results)
    assert row_of(text, "x_8")[1:] == ["1, 0, 2", "1.00 s, 100 MB, proven", "refused: tables of 12 GB", "",
                                       "1.00 s, 100 MB, +100.00%", "", "", "not installed"]
    assert row_of(text, "1 random variations, build and search")[1:] == ["5 s", "at most 6.00 s (a net)", "1 of 1",
                                                                         "**no**"]
    for word in ("Chip, 2 cores", "Python 9", "commit abc"):
        assert word in text


# -- memory limits -----------------------------------------------------------------------------------------------------
def test_memory_section(tmp_path):
    """The sweep of a small network: its numbers are those of the searches, its page and plot show them."""
    network = price_densenet(densenet(8, blocks=(2,)), 4)
    row = search_memory.sweep(network, 300.0, (0.0, 0.5, 1.0))
    usage = network.memory
    free = solve(network.network)
    first, _, last = row["points"]
    assert row["cost"] == last["cost"] == free.cost
    assert last["limit_bytes"] == pytest.approx(sum(entry[choice] for entry, choice in zip(
        usage, free.assignment, strict=True)))
    assert row["least_bytes"] == first["limit_bytes"] == least_memory(network.network, usage)[0]
    assert row["below"]["right"]
    assert row["below"]["limit_bytes"] < row["least_bytes"]
    assert all(point["optimal"] and point["bytes"] <= point["limit_bytes"] for point in row["points"])
    assert first["cost"] > last["cost"]
    assert search_memory.largest_gap(row) == 0
    results = {"memory": {"densenet-layer_4": row}}
    text = search_document.document(results)
    assert [f"{first['cost'] / row['cost'] - 1:+.3%}", "0, proven"] in [cells[3:5] for cells in rows(text)]
    swept, below = search_document.limits(results)
    assert swept[1:] == ("gap at most 1%", "gap 0 everywhere", "3 of 3", True)
    assert below[-2:] == ("1 of 1", True)
    first |= {"lower_bound": 0.98 * first["cost"], "optimal": False}
    row["below"]["right"] = False
    swept, below = search_document.limits(results)
    assert swept[2:] == ("largest gap 2.000% (densenet-layer_4)", "2 of 3", False)
    assert not below[-1]
    assert "2.000%" in [cells[4] for cells in rows(search_document.document(results)) if len(cells) == 6]
    assert "WRONG" in search_document.document(results)
    search_plot.plot_memory(results, tmp_path / "memory.svg")
    assert "p = 4" in (tmp_path / "memory.svg").read_text()
    assert search_document.limits({"memory": {"x": {"error": "broke"}}}) == [("x", "", "broke", "no", False)]


def test_networks_of_the_memory_section(tmp_path, capsys):
    assert search_memory.main(["alexnet-big_7", f"--work={tmp_path}"]) == 2
    assert "did you mean 'alexnet-big_8'" in capsys.readouterr().err
    network = search_memory.priced("densenet-layer_8", Workshop(tmp_path))
    assert network.devices == 8
    assert [len(entry) for entry in network.memory] == list(network.network.sizes)


def test_a_proof_of_other_prices_is_not_wrong():
    """Where one method was measured anew, or a budget ended within a network, the others had proved wrong optima."""
    size = {"layers": 3, "edges": 2, "configurations": 9, "network": "new"}
    text = search_document.comparison({"x | size": size, "x | exact": _result(2.0, network="new"),
                                       "x | milp": _result(1.0)})
    assert "WRONG" not in text
    assert "proven, earlier run" in row_of(text, "x")[7]
    assert row_of(text, "x")[2].endswith("proven")


def test_a_wrong_proof_would_be_seen():
    rows = {"x | exact": _result(1.0), "x | pase": _result(2.0)}
    assert "WRONG" in search_document.comparison(rows)


def test_best_is_called_optimal_only_where_somebody_proved_it():
    rows = {"x | exact": _result(1.0, optimal=False, lower_bound=0.5)}
    assert "best known, gap 50.0%" in search_document.comparison(rows)
    rows["x | pase"] = _result(1.0)
    assert "optimal, no proof, gap 50.0%" in search_document.comparison(rows)


def test_the_start_of_a_process_is_taken_off_where_it_was_measured(tmp_path, monkeypatch):
    """Rows of another computer had this one's start taken off; earlier versions kept one for all."""
    path = tmp_path / "search.json"
    search.save({"instances": {"start": {"process_seconds": 0.25}, "x_8": _result(), "y_8": _result(
        start_seconds=1.75)}}, path)
    results = search.load(path)
    results["instances"]["x_8"]["search_seconds"] = results["instances"]["y_8"]["search_seconds"] = 0.1
    text = search_document.document(results)
    assert [cells[:2] for cells in rows(text) if cells[0] in ("x_8", "y_8")] == [["x_8", "1.75 s"], ["y_8", "250 ms"]]
    assert "takes 250 ms to 1.75 s, which" in text
    asked = []
    monkeypatch.setattr(search_sections, "start_seconds", lambda repeats: asked.append(repeats) or 0.5)
    monkeypatch.setattr(search_sections, "_network_process", lambda path, repeats: {"process_seconds": 1.0})
    options = search_sections.Options(Workshop(tmp_path), networks=["rnnlm"])
    found = [run() for _, run in search_sections.SECTIONS["instances"](options)]
    assert found == [{"start_seconds": 0.5, "process_seconds": 1.0}] * len(found)
    assert len(found) > 1
    assert asked == [options.repeats]  # once for all of a run


def test_rows_stand_until_they_are_measured_again(tmp_path, monkeypatch):
    """Those that an interrupted run does not come to were gone; the next --resume measures these."""
    path, results = tmp_path / "search.json", {}

    def measured(found, **more):
        def section(options):
            return [(name, lambda name=name: found(name)) for name in ("first", "second")]
        monkeypatch.setattr(search, "SECTIONS", {"dense": section, "rivals": section})
        return search._measure(["dense", "rivals"], None, results, path, **{"resume": False, "budget": 1e9, **more})

    def interrupted(name):
        if name == "second":
            raise KeyboardInterrupt
        return {"cost": 2}

    def kept():
        results.clear()
        results.update(search.load(path))
        return [row["cost"] for name in ("dense", "rivals") for row in results[name].values()]

    monkeypatch.setattr(search, "warm_up", lambda: None)
    assert measured(found=lambda name: {"cost": 1})
    assert kept() == [1, 1, 1, 1]
    assert not measured(found=interrupted, budget=-1.0)
    assert kept() == [1, 1, 1, 1]
    with pytest.raises(KeyboardInterrupt):
        measured(found=interrupted)
    assert kept() == [2, 1, 1, 1]
    assert measured(found=lambda name: {"cost": 3}, resume=True)
    assert kept() == [2, 3, 3, 3]
    assert measured(found=None, resume=True)


@pytest.mark.slow
def test_whole_run_piece_by_piece(tmp_path, capsys):
    def run(*flags):
        return search.main(["--networks=rnnlm_8", "--methods=exact,mcmc (1)", "--limit=1", "--mcmc-limit=0.2",
                            "--repeats=1", "--variations=2", f"--output={tmp_path}", f"--work={tmp_path / 'work'}",
                            *flags])
    assert run("--sections=rivals", "--budget=0") == 0
    assert "--resume" in capsys.readouterr().err
    assert run("--sections=instances,rivals") == 0
    first = search.load(tmp_path / "search.json")
    assert first["rivals"]["rnnlm_8 | exact"]["cost"] == 4024963186688
    assert set(first["instances"]) == {"rnnlm_8"}
    assert run("--sections=rivals,plot", "--resume", "--note=Quiet.") == 0
    assert search.load(tmp_path / "search.json")["rivals"] == first["rivals"]
    assert run("--sections=rivals", "--budget=0") == 0
    left = search.load(tmp_path / "search.json")["rivals"]
    assert {name: row | first["rivals"][name] for name, row in left.items()} == left
    assert set(left) == set(first["rivals"])
    text = (tmp_path / "search.md").read_text()
    assert ["rnnlm_8", "4, 3, 123"] in [cells[:2] for cells in rows(text)]
    assert "Quiet." in text
    assert "networks of the paper's graphs" in text
    for name in ("search.svg", "search-mcmc.svg", "search-memory.svg"):
        assert (tmp_path / name).stat().st_size > 10000


def test_a_flag_that_makes_no_sense(tmp_path, capsys):
    for flag in ("--sections=nothing", "--methods=guess"):
        assert search.main([flag, f"--output={tmp_path}", f"--work={tmp_path / 'work'}"]) == 2
        assert flag in capsys.readouterr().err


def test_sections_name_what_they_measure(tmp_path):
    options = search_sections.Options(Workshop(tmp_path))
    rows = {name: [key for key, _ in section(options)] for name, section in search_sections.SECTIONS.items()}
    assert len(rows["instances"]) == 11 + 2 * 10
    assert len(rows["variations"]) == 500
    assert {f"densenet-layer_{devices}" for devices in (8, 16, 32, 64, 128, 256)} <= set(rows["dense"])
    assert all(len(keys) == len(set(keys)) for keys in rows.values())


def test_a_rival_is_loaded_before_its_clock_starts(tmp_path, monkeypatch, capsys):
    """What importing scipy took, a tenth of a second, counted as the solver's; ours has its compiled code loaded."""
    (tmp_path / "pytoulbar2.py").write_text("")
    monkeypatch.setattr(solvers.sys, "path", [str(tmp_path), *solvers.sys.path])
    modules = solvers.sys.modules
    monkeypatch.setitem(modules, "pytoulbar2", None)  # so that what was there before comes back
    monkeypatch.delitem(modules, "pytoulbar2")
    monkeypatch.setitem(solvers.SOLVERS, "toulbar2", lambda network, limit: {
        "cost": 1.0, "optimal": True, "loaded": "pytoulbar2" in modules})
    monkeypatch.setattr(solvers.resource, "setrlimit", lambda *_: None)
    assert solvers.main(["toulbar2", str(INSTANCES / "rnnlm_8.npz")]) == 0
    assert json.loads(capsys.readouterr().out)["loaded"]


def test_the_page_says_whether_whole_processes_make_a_certificate(monkeypatch):
    """It said that one was included; the command makes one with --check alone."""
    commands = []

    def run(command, **_):
        commands.append(command)
        pathlib.Path(command[-1].partition("=")[2]).write_text('{"seconds": 1.0, "optimal": true, "cost": 2.0}')
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(search_sections.subprocess, "run", run)
    row = {"start_seconds": 0.1, **search_sections._network_process("x.npz", 1)}
    text = search_document.document({"instances": {"x_8": row}})
    assert ("certificate included" in text) == ("--check" in commands[0])
