"""The simulator against the prices that it is made of, against a plain one, and against itself after changes."""

import dataclasses
import itertools
import json
import math

import harness
import nets
import numpy as np
import pytest
from prices import price_strategy
from small_graphs import perceptron

from pase_mtf import models
from pase_mtf.compat import tf
from pase_mtf.cost.build import build_network
from pase_mtf.cost.dim_relations import Sharded
from pase_mtf.cost.resharding import Reshardings
from pase_mtf.cost.tables import ConfigurationTable, dim_positions, positions_of
from pase_mtf.errors import UsageError
from pase_mtf.export.exporter import export_graph
from pase_mtf.graph.configurations import Configuration, enumerate_configurations
from pase_mtf.graph.partition import Partition
from pase_mtf.machine.machine import Link, Machine
from pase_mtf.pipeline.blocks import of_microbatch
from pase_mtf.search import solve
from pase_mtf.simulator import mcmc
from pase_mtf.simulator.schedule import PICOSECONDS, Tasks, schedule
from pase_mtf.simulator.simulate import Simulator
from pase_mtf.simulator.slots import join
from pase_mtf.simulator.stages import Stages, gradient_seconds
from pase_mtf.simulator.step import Step
from pase_mtf.simulator.timeline import Slice, Timeline
from pase_mtf.simulator.transfers import transfers
from pase_mtf.strategy.find import find_strategy
from pase_mtf.strategy.simulated import shortest_simulated

TWO_LEVELS = Machine("two levels", dict.fromkeys(Machine.load("1080ti").rates, 1e12), 1e11, 1e10, 1e-6,
                     (Link(4, 2e10, 3e-6), Link(64, 1e9, 2e-5)))


def shared(machine):
    fields = {name: getattr(machine, name) for name in machine.__dataclass_fields__}
    return Machine(**{**fields, "name": "shared", "shared_cores": True})


def random_assignment(priced, seed):
    rng = np.random.default_rng(seed)
    return [int(rng.integers(len(choices))) for choices in priced.configurations]


@pytest.fixture(scope="module")
def graphs():
    return [perceptron(), harness.export_model("alexnet", models.load_config("alexnet", "tiny")),
            harness.export_model("gnmt", models.load_config("gnmt", "tiny"))]


def test_the_slowest_receiver_takes_what_resharding_costs(graphs):
    """Without contention; counted in two ways that share no code."""
    reshardings, compared = Reshardings(TWO_LEVELS), 0
    rng = np.random.default_rng(3)
    for graph in graphs:
        for edge in graph.edges:
            ends = []
            for layer, dims in ((graph.layers[edge.source], edge.source_dims),
                                (graph.layers[edge.target], edge.target_dims)):
                choices = enumerate_configurations(layer, 8)
                chosen = choices[int(rng.integers(len(choices)))]
                position = dim_positions(layer)
                ends.append(ConfigurationTable.build([chosen], position, len(layer.dims)).shardings(
                    positions_of(dims, position)))
            source, target = (Partition(tuple(range(int(one.devices[0]))), tuple(zip(
                one.shards[0].tolist(), one.strides[0].tolist(), strict=True))) for one in ends)
            taken = dict.fromkeys(range(8), 0.0)
            moved = transfers(source, target, edge.shape, TWO_LEVELS.links)
            for receiver, level, elements, messages in zip(*moved[1:], strict=True):
                link = TWO_LEVELS.links[level]
                taken[receiver] += elements * edge.itemsize / link.bandwidth + messages * link.latency
            ends = [Sharded(one.devices, one.shards, one.strides) for one in ends]
            nbytes = float(math.prod(edge.shape) * edge.itemsize)
            assert max(taken.values()) == pytest.approx(reshardings.critical_path_seconds(*ends, nbytes)[0, 0],
                                                        rel=1e-9)
            compared += max(taken.values()) > 0
    assert compared > 20


@pytest.mark.parametrize("machine", [TWO_LEVELS, shared(TWO_LEVELS)], ids=["own", "shared"])
def test_stages_add_up_to_what_a_layer_costs(graphs, machine):
    for graph in graphs:
        priced = build_network(graph, machine, 8)
        stages = Stages(priced)
        for number, (layer, choices) in enumerate(zip(graph.layers, priced.configurations, strict=True)):
            for choice in range(0, len(choices), 7):
                found, total = stages.of(number, choice), 0.0
                for stage in found.stages:
                    total += stage.kernels * (found.devices if machine.shared_cores else 1) + stage.moves
                    for groups, seconds in (*stage.sums, *stage.gradients):
                        total += seconds * (len(groups) if machine.shared_cores else 1)
                        assert sorted(itertools.chain(*groups)) == list(range(found.devices))
                assert total == pytest.approx(priced.network.vectors[number][choice], rel=1e-9), layer.name


def test_where_cores_are_shared_a_step_is_the_sum(graphs):
    for graph in graphs:
        priced = build_network(graph, shared(TWO_LEVELS), 4)
        for seed in range(2):
            assignment = random_assignment(priced, seed)
            assert Simulator(priced).seconds(assignment) == pytest.approx(priced.network.cost(assignment), rel=1e-6)


def test_on_one_device_a_step_is_the_sum(graphs):
    for graph in graphs:
        priced = build_network(graph, TWO_LEVELS, 1)
        assert Simulator(priced).seconds([0] * len(graph.layers)) == pytest.approx(
            priced.network.cost([0] * len(graph.layers)), rel=1e-6)


def plainly(tasks):
    """When every task starts: of those whose predecessors are done, always the one that became ready first."""
    start, end, free = {}, {}, [0] * tasks.resources
    before = {task: [] for task in range(len(tasks.duration))}
    for one, other in zip(tasks.before.tolist(), tasks.after.tolist(), strict=True):
        before[other].append(one)
    while len(end) < len(before):
        ready = {task: max((end[one] for one in before[task]), default=0) for task in before
                 if task not in end and all(one in end for one in before[task])}
        task = min(ready, key=lambda one: (ready[one], int(tasks.order[one])))
        needs = tasks.resource[tasks.resource_at[task]:tasks.resource_at[task + 1]].tolist()
        start[task] = max([ready[task], *(free[one] for one in needs)])
        end[task] = start[task] + int(tasks.duration[task])
        for one in needs:
            free[one] = end[task]
    return [start[task] for task in sorted(start)]


def test_a_plain_simulation_says_the_same():
    rng = np.random.default_rng(0)
    for _ in range(20):
        count, resources = int(rng.integers(1, 25)), int(rng.integers(1, 4))
        needs = [sorted(rng.choice(resources, int(rng.integers(0, resources + 1)), replace=False))
                 for _ in range(count)]
        pairs = [(one, other) for other in range(count) for one in range(other) if rng.random() < 0.15]
        before, after = np.array(pairs, np.int64).reshape(-1, 2).T
        tasks = Tasks(rng.integers(0, 6, count), rng.permutation(count), np.cumsum([0, *map(len, needs)]),
                      np.array([*itertools.chain(*needs)], np.int64), before, after, resources)
        assert schedule(tasks).start.tolist() == plainly(tasks)


def test_a_circle_is_no_step():
    ends = np.array([0, 1])
    none = np.zeros(0, np.int64)
    with pytest.raises(ValueError, match="circle"):
        schedule(Tasks(np.ones(2, np.int64), ends, np.zeros(3, np.int64), none, ends, ends[::-1].copy(), 1))


def test_tasks_keep_their_order_and_share_nothing(graphs):
    for graph in graphs:
        priced = build_network(graph, TWO_LEVELS, 8)
        step = Step(priced)
        tasks, _ = join(step.slots(random_assignment(priced, 1)), [(one.source, one.target) for one in graph.edges],
                        step.resources)
        times = schedule(tasks)
        assert (times.end[tasks.before] <= times.start[tasks.after]).all()
        for resource in range(tasks.resources):
            mine = [task for task in range(len(tasks.duration))
                    if resource in tasks.resource[tasks.resource_at[task]:tasks.resource_at[task + 1]]]
            spans = sorted((times.start[task], times.end[task]) for task in mine)
            assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 12), marks=pytest.mark.slow)])
@pytest.mark.parametrize("devices", [4, 6])
def test_what_is_simulated_after_changes_is_what_a_whole_simulation_says(graphs, devices, seeds):
    """To the last digit."""
    for graph, seed in itertools.product(graphs, seeds):
        priced = build_network(graph, TWO_LEVELS, devices)
        rng, assignment = np.random.default_rng(seed), random_assignment(priced, seed)
        changing, whole = Simulator(priced), Simulator(priced)
        changing.seconds(assignment)
        for _ in range(40):
            layer = int(rng.integers(len(assignment)))
            assignment[layer] = int(rng.integers(len(priced.configurations[layer])))
            assert changing.change(layer, assignment[layer]) == whole.seconds(assignment)


def test_gradients_are_summed_while_the_backward_pass_goes_on():
    """Data parallelism of three layers on a slow link: by hand."""
    graph = perceptron()
    split = [Configuration((("batch", 4),))] * 3
    priced = build_network(graph, TWO_LEVELS, 4, [[one] for one in split])
    timeline = Simulator(priced).timeline([0, 0, 0])
    sums = [one for one in timeline.slices if (one.kind, one.device) == ("gradient all-reduce", 3)]
    assert [one.layer for one in sums] == ["dense2", "dense1", "dense0"]
    kernels = {one.layer: one for one in timeline.slices
               if (one.kind, one.phase, one.device) == ("kernels", "backward", 0)}
    assert sums[0].begin == kernels["dense2"].end
    assert sums[0].begin == kernels["dense1"].begin
    cost = price_strategy(graph, TWO_LEVELS, 4, split).total
    assert timeline.seconds < cost - 0.9 * sum(kernels[name].end - kernels[name].begin for name in ("dense0", "dense1"))


def test_what_is_summed_between_nodes_leaves_the_links_within_them_to_others():
    """Two nodes of four: a gradient goes across while the nodes sum what the backward pass hands on."""
    split = [Configuration((("batch", 2), (f"width{number + 1}", 4))) for number in range(3)]
    priced = build_network(perceptron(), TWO_LEVELS, 8, [[one] for one in split])
    begun = {one.kind: one.begin for one in Simulator(priced).timeline([0, 0, 0]).slices
             if (one.layer, one.phase, one.device) == ("dense2", "backward", 0)}
    assert begun["gradient all-reduce"] == begun["all-reduce"] > begun["kernels"]


def test_senders_share_their_link():
    """One device holds all that three others want: it sends to one after the other."""
    graph = perceptron(widths=(64, 128, 64), training=False)
    split = [Configuration(), Configuration((("batch", 4),))]
    priced = build_network(graph, TWO_LEVELS, 4, [[one] for one in split])
    sent = [one for one in Simulator(priced).timeline([0, 0]).slices if one.kind == "transfer"]
    assert [one.receiver for one in sent] == [1, 2, 3]
    assert all(one.end == pytest.approx(other.begin) for one, other in itertools.pairwise(sent))


def test_where_all_send_to_all_nobody_waits_for_a_port():
    """From rows to columns on four devices of one level: every device sends and receives all the time."""
    graph = perceptron(widths=(64, 64, 64), training=False)
    split = [Configuration((("batch", 4),)), Configuration((("width1", 4),))]
    priced = build_network(graph, TWO_LEVELS, 4, [[one] for one in split])
    sent = [one for one in Simulator(priced).timeline([0, 0]).slices if one.kind == "transfer"]
    assert len(sent) == 4 * 3
    assert max(one.end for one in sent) - min(one.begin for one in sent) == pytest.approx(
        3 * max(one.end - one.begin for one in sent))


def test_where_all_send_to_all_over_two_nodes_nobody_waits_either():
    """From rows to columns on two nodes of four: every device sends to the four of the other node all the time."""
    graph = perceptron(widths=(64, 64, 64), training=False)
    split = [Configuration((("batch", 8),)), Configuration((("width1", 8),))]
    priced = build_network(graph, TWO_LEVELS, 8, [[one] for one in split])
    sent = [one for one in Simulator(priced).timeline([0, 0]).slices
            if one.kind == "transfer" and one.device // 4 != one.receiver // 4]
    assert len(sent) == 8 * 4
    assert max(one.end for one in sent) - min(one.begin for one in sent) == pytest.approx(
        4 * max(one.end - one.begin for one in sent))


@pytest.mark.parametrize(("source", "target", "kinds"), [
    ("batch", "width1", ["copying", "transfer", "copying"]), ("width1", "batch", ["transfer", "copying"]),
    ("batch", "", ["transfer", "copying"]), ("", "width1", ["copying"]), ("", "batch", []), ("batch", "batch", [])])
def test_pieces_are_sliced_and_put_together(source, target, kinds):
    """On four devices that all do the same: what is copied within them is neither left out nor hidden."""
    graph = perceptron(widths=(64, 64, 64), training=False)
    priced = build_network(graph, TWO_LEVELS, 4, [[Configuration(((dim, 4),))] for dim in (source, target)])
    timeline = Simulator(priced).timeline([0, 0])
    assert timeline.seconds == pytest.approx(priced.network.cost([0, 0]), rel=1e-6)
    found = sorted((one.begin, one.kind) for one in timeline.slices
                   if 2 in (one.device, one.receiver) and one.kind in ("copying", "transfer"))
    assert [kind for kind, _ in itertools.groupby(kind for _, kind in found)] == kinds


def test_parts_of_a_sum_are_added_up():
    """A reduce-scatter: every device slices, sends, and adds up what it gets."""
    layers = perceptron(widths=(64, 64, 64), training=False)
    pending = dataclasses.replace(layers, edges=(dataclasses.replace(layers.edges[0], pending=("width0",)),))
    priced = build_network(pending, TWO_LEVELS, 4, [[Configuration(((dim, 4),))] for dim in ("width0", "width1")])
    timeline = Simulator(priced).timeline([0, 0])
    found = [one for one in timeline.slices if one.device == 2 and one.receiver == 2]
    block = 4 * 32 * 64 / 4  # bytes of a quarter
    assert [one.end - one.begin for one in found if one.kind == "copying"] == pytest.approx(
        [2 * 4 * block / 1e11 + 1e-6, (4 + 1) * block / 1e11 + 1e-6])
    assert timeline.seconds == pytest.approx(priced.network.cost([0, 0]), rel=1e-6)


def test_a_timeline_can_be_opened(tmp_path, graphs):
    strategy = find_strategy(graphs[1], 4, TWO_LEVELS)
    timeline = strategy.timeline()
    timeline.save(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(1e6 * timeline.seconds)
    assert {event["pid"] for event in spans} == set(range(4))
    assert all(0 < busy <= 1 for busy in timeline.busy)
    from matplotlib.figure import Figure
    axes = Figure().add_subplot()
    timeline.draw(axes)
    assert len(axes.get_yticklabels()) == 4


def _rows_of(trace):
    """(device, row's name) -> (begin, end) of its events, in nanoseconds, as Perfetto reads them."""
    events = trace["traceEvents"]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    found = {(pid, name): [] for (pid, _), name in names.items()}
    assert len(found) == len(names)
    for event in events:
        if event["ph"] == "X":
            begin, took = int(1000 * event["ts"]), int(1000 * event["dur"])
            found[event["pid"], names[event["pid"], event["tid"]]].append((begin, begin + took))
    return found


def test_what_is_sent_over_several_links_at_once_has_rows_of_its_own():
    """Perfetto drops what overlaps in part in one row."""
    graph = perceptron(widths=(64, 64, 64), training=False)
    split = [Configuration((("batch", 8),)), Configuration((("width1", 8),))]
    priced = build_network(graph, TWO_LEVELS, 8, [[one] for one in split])
    timeline = Simulator(priced).timeline([0, 0])
    rows = _rows_of(json.loads(json.dumps(timeline.trace())))
    assert sum(map(len, rows.values())) == len(timeline.slices)
    # Each sends to one of its own four and to one of the others at once.
    assert {device for device, name in rows if name == "communication (2)"} == set(range(8))
    for spans in rows.values():
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(sorted(spans)))


def test_kernels_of_one_device_that_run_at_once():
    """As TensorFlow runs them: one begins within another, and one after all, on the nanosecond."""
    spans = ((1.0e-6, 1.001e-6), (0.0, 4.001e-6), (2.0e-6, 9.0e-6), (4.001e-6, 7.0e-6))
    timeline = Timeline("traced", 2, 9e-6, tuple(
        Slice("kernels", "forward", f"layer {number}", 1, 1, *span) for number, span in enumerate(spans)))
    assert _rows_of(timeline.trace()) == {
        (0, "kernels"): [], (0, "communication"): [], (1, "communication"): [],
        (1, "kernels"): [(0, 4001), (4001, 7000)], (1, "kernels (2)"): [(1000, 1001), (2000, 9000)]}
    from matplotlib.figure import Figure
    axes = Figure().add_subplot()
    timeline.draw(axes)
    # Neither hides the other: they share the height of their row, the third of four.
    boxes = sorted({(round(path.get_extents().ymin, 3), round(path.get_extents().ymax, 3))
                    for bars in axes.collections for path in bars.get_paths()})
    assert boxes == [(1.6, 2.0), (2.0, 2.4)]


def test_an_empty_timeline():
    assert Timeline("nothing", 2, 0.0, ()).busy == (0.0, 0.0)


def test_layers_that_are_alike_keep_their_names():
    """Their tasks are made once."""
    graph = perceptron(widths=(64, 64, 64, 64), training=False)
    timeline = find_strategy(graph, 4, TWO_LEVELS).timeline()
    assert {one.layer for one in timeline.slices if one.kind == "kernels"} == {layer.name for layer in graph.layers}


@pytest.mark.slow
def test_the_shortest_simulated_of_the_cheapest_is_taken(graphs):
    graph = graphs[1]
    cheapest = find_strategy(graph, 8, TWO_LEVELS, simulate=0)
    found = find_strategy(graph, 8, TWO_LEVELS, simulate=20)
    simulator = Simulator(build_network(graph, TWO_LEVELS, 8))
    strategies = solve(simulator._priced.network, "k_best", k=20).statistics["strategies"]
    shortest = min(simulator.seconds(assignment) for _, assignment in strategies)
    parallel = find_strategy(graph, 8, TWO_LEVELS, "data_parallel")
    shortest = min(shortest, parallel.timeline().seconds)
    told = found.search
    assert told["simulated_seconds"] <= (1 + 1e-3) * shortest
    assert told.get("shortest_simulated_seconds", told["simulated_seconds"]) <= shortest
    assert found.timeline().seconds == found.search["simulated_seconds"]
    assert found.seconds >= cheapest.seconds
    assert (found.search["simulated_rank"] == 1) == found.search["optimal"]
    assert f"simulated {1e3 * told['simulated_seconds']:.3f} ms, the shortest of {told['simulated']}" in str(found)
    limit = cheapest.memory_bytes
    assert find_strategy(graph, 8, TWO_LEVELS, simulate=20, memory_limit=limit).memory_bytes <= limit * (1 + 1e-9)


@pytest.mark.parametrize(("shorter_by", "taken"), [(0.5e-3, 0), (2e-3, 1)])
def test_a_proof_is_not_given_up_for_next_to_nothing(graphs, monkeypatch, shorter_by, taken):
    """Steps of the simulator as if the second cheapest were a little shorter."""
    priced = build_network(graphs[0], TWO_LEVELS, 4)
    network = priced.network
    (_, first), (_, second) = solve(network, "k_best", k=2).statistics["strategies"]
    monkeypatch.setattr(Simulator, "seconds", lambda self, assignment: {
        tuple(first): 1.0, tuple(second): 1.0 - shorter_by}.get(tuple(assignment), 2.0))
    found, told = shortest_simulated(priced, solve(network), 2, None)
    assert found.assignment == (tuple(first), tuple(second))[taken]
    assert found.optimal == (taken == 0)
    assert told["simulated_seconds"] == 1.0 - taken * shorter_by
    assert told.get("shortest_simulated_seconds") == (None if taken else 1.0 - shorter_by)


def test_gradients_that_are_hidden_count_less(graphs):
    cheapest, found = (find_strategy(graphs[1], 8, TWO_LEVELS, simulate=simulate) for simulate in (0, 1))
    assert found.search["simulated_seconds"] <= cheapest.timeline().seconds
    assert found.search["simulated"] > 1
    machine = Machine("slow links", dict.fromkeys(TWO_LEVELS.rates, 1e11), 1e30, 1e10, 0.0, (Link(8, 1e9, 0.0),))
    graph, split = perceptron(widths=(256, 256), batch=4096), [
        Configuration((("batch", 4),)), Configuration((("width0", 4),))]
    (hidden,) = gradient_seconds(build_network(graph, machine, 4, [split]))
    assert hidden.tolist() == [pytest.approx(2 * 3 / 4 * 4 * 256 * 256 / 1e9), 0.0]


def test_the_chain_improves_what_it_starts_from(graphs):
    priced = build_network(graphs[1], TWO_LEVELS, 8)
    start = random_assignment(priced, 0)
    found = mcmc.search_simulated(priced, start, proposals=400, seed=1)
    assert found == mcmc.search_simulated(priced, start, proposals=400, seed=1)
    assert found.seconds < found.first_seconds == Simulator(priced).seconds(start)
    assert found.seconds == Simulator(priced).seconds(found.assignment)
    assert found.proposals <= 400


@pytest.mark.parametrize("wrong", [lambda priced: mcmc.search_simulated(priced, [0, 0, 0]),
                                   lambda priced: mcmc.search_simulated(priced, [0, 0, 0], proposals=0),
                                   lambda priced: Simulator(priced).change(0, 1),
                                   lambda priced: Simulator(priced).seconds([0]),
                                   lambda priced: find_strategy(priced.graph, 4, TWO_LEVELS, simulate=-1),
                                   lambda priced: find_strategy(priced.graph, 4, TWO_LEVELS, "pase", simulate=3),
                                   lambda priced: find_strategy(priced.graph, 4, TWO_LEVELS, "mcmc", simulate=1,
                                                                gap=0.1),
                                   lambda priced: Simulator(build_network(priced.graph, TWO_LEVELS, 4, model="pase"))])
def test_mistakes_are_told(wrong):
    with pytest.raises(UsageError):
        wrong(build_network(perceptron(), TWO_LEVELS, 4))


def test_times_are_whole():
    assert PICOSECONDS == 1e12


def test_a_proposal_too_long_to_be_simulated_is_refused():
    """What splits a layer sums 32 kB of gradients at a byte a second."""
    slow = dataclasses.replace(TWO_LEVELS, links=(Link(4, 1.0, 0.0), Link(64, 1.0, 0.0)))
    priced = build_network(perceptron(), slow, 4)
    start = [priced.index(layer, Configuration((("", 4),))) for layer in range(3)]
    split = priced.index(0, Configuration((("batch", 4),)))
    simulator = Simulator(priced)
    first = simulator.seconds(start)
    for _ in range(2):  # nothing has changed
        with pytest.raises(UsageError, match="a task of"):
            simulator.change(0, split)
    assert simulator.change(0, start[0]) == first
    found = mcmc.search_simulated(priced, start, proposals=50)
    assert found.seconds <= found.first_seconds == first


@pytest.mark.parametrize("wrong", [
    lambda simulator: simulator.timeline([0]), lambda simulator: simulator.timeline([0] * 4),
    lambda simulator: simulator.tasks([0]), lambda simulator: simulator.change(-1, 1),
    lambda simulator: simulator.change(3, 0)])
def test_what_is_no_strategy_or_layer(wrong):
    simulator = Simulator(build_network(perceptron(), TWO_LEVELS, 4))
    simulator.seconds([0, 0, 0])
    with pytest.raises(UsageError):
        wrong(simulator)


def test_what_a_loop_adds_up_is_hidden_by_nothing():
    """It is summed when the loop has ended, and with it the backward pass."""
    machine = Machine("slow links", dict.fromkeys(TWO_LEVELS.rates, 1e6), 1e30, 1e10, 0.0, (Link(8, 1e4, 0.0),))
    graph = export_graph(nets.build("microbatches", "sgd", tf.float32).graph)
    split = [[Configuration((("batch" if "batch" in layer.splittable else "", 4),))] for layer in graph.layers]
    priced = build_network(graph, machine, 4, split)
    assert not any(seconds.any() for seconds in gradient_seconds(priced))
    mine = [one for one in Simulator(priced).timeline([0] * len(graph.layers)).slices
            if one.device == 0 and one.phase == "backward"]
    kernels, sums = ([one for one in mine if one.kind in kinds]
                     for kinds in (("kernels",), ("all-reduce", "gradient all-reduce")))
    assert len(sums) > 1
    assert all(one.end <= other.begin or other.end <= one.begin for one in kernels for other in sums)


def _begins_when_all_is_there(graph, layer, phase):
    """Whether one of two layers begins when it has all that it reads of the other, which is split in another way."""
    split = [[Configuration(((dim, 4),))] for dim in ("batch", "width1")]
    mine = [one for one in Simulator(build_network(graph, TWO_LEVELS, 4, split)).timeline([0, 0]).slices
            if (one.layer, one.phase, one.device) == (layer, phase, 0)]
    arrived = max(one.end for one in mine if one.kind == "copying")
    return [one.begin for one in mine if one.kind == "kernels"] == [arrived]


def test_what_adds_up_microbatches_stands_nowhere_in_the_program():
    """A layer with weights waits for the gradient of one without."""
    graph = perceptron(widths=(64, 64, 64))
    first, second = graph.layers
    graph = dataclasses.replace(graph, layers=(first, dataclasses.replace(second, variables=())))
    assert _begins_when_all_is_there(graph, "dense0", "backward")
    assert _begins_when_all_is_there(of_microbatch(graph, 2), "dense0", "backward")


def test_where_its_weights_are_made_tells_not_when_a_layer_begins():
    """Programs may make them before all else; what reads them waits for the layer before it all the same."""
    graph = perceptron(widths=(64, 64, 64), training=False)
    first, second = (dataclasses.replace(layer.operations[0], index=number)
                     for number, layer in enumerate(graph.layers, 1))
    made = dataclasses.replace(second, index=0, kind="none", flops=0.0, inputs=(), outputs=second.inputs[1:],
                               reduced=(), held=())
    layers = tuple(dataclasses.replace(layer, operations=operations) for layer, operations in zip(
        graph.layers, ((first,), (made, second)), strict=True))
    assert _begins_when_all_is_there(dataclasses.replace(graph, layers=layers), "dense1", "forward")
