"""find_layout against all layouts there are, and against random ones."""

import copy
import dataclasses
import itertools
import math
import pickle

import numpy as np
import pytest
from harness import model_program
from nets import NETS, build
from uniform import layouts_and_uniform_strategies_agree

from pase_mtf import models
from pase_mtf.amounts import bytes_text, needed_text
from pase_mtf.compat import mtf, tf
from pase_mtf.errors import InfeasibleError, MismatchError, UsageError
from pase_mtf.export.exporter import export_graph
from pase_mtf.layout import search as search_module
from pase_mtf.layout.costs import LayoutCosts
from pase_mtf.layout.find import find_layout
from pase_mtf.layout.graph import GraphSearch
from pase_mtf.layout.legality import Problem, StockLegality
from pase_mtf.layout.search import Candidate, Search
from pase_mtf.layout.space import MeshShape, mesh_shapes, parse_mesh_shape, parse_rules
from pase_mtf.machine.machine import Link, Machine

# Compute costs much and messages little, so that even small nets are worth splitting.
_RATES = dict.fromkeys(("matmul", "convolution", "pointwise", "reduction", "gather"), 1e6)
FLAT = Machine("flat", _RATES, 1e9, 1e12, 1e-6, (Link(64, 1e7, 1e-7),))
FAST = Machine("flat", _RATES, 1e9, 1e12, 1e-6, (Link(64, 1e8, 1e-7),))
STEEP = Machine("steep", _RATES, 1e7, 1e12, 1e-6, (Link(2, 1e8, 1e-8), Link(64, 1e6, 1e-6)))
SHARED = Machine("shared", _RATES, 1e7, 1e12, 1e-6, (Link(64, 1e7, 1e-7),), shared_cores=True)
MACHINES = {"flat": FLAT, "steep": STEEP, "shared": SHARED}


def perceptron(size=8):
    """Three dense layers of the user's own names, with a rename between them."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    batch, wide, narrow = mtf.Dimension("batch", size), mtf.Dimension("wide", 16), mtf.Dimension("narrow", 8)
    x = mtf.import_tf_tensor(mesh, tf.ones([size, 8]), [batch, narrow])
    w = [mtf.get_variable(mesh, f"w{number}", dims, initializer=tf.ones_initializer()) for number, dims in enumerate(
        ([narrow, wide], [wide, narrow], [mtf.Dimension("other", 8), wide]))]
    y = mtf.relu(mtf.einsum([x, w[0]], [batch, wide]))
    y = mtf.rename_dimension(mtf.einsum([y, w[1]], [batch, narrow]), "narrow", "other")
    loss = mtf.reduce_mean(mtf.square(mtf.einsum([y, w[2]], [batch, wide])))
    updates = mtf.optimize.SgdOptimizer(0.1).apply_grads(
        mtf.gradients([loss], w), [variable.operation for variable in w])
    return graph, loss, updates


def costs_of(graph, machine, devices, outputs=()):
    legality = StockLegality(graph, outputs, devices)
    return LayoutCosts(export_graph(graph), machine, legality), legality


def all_layouts(legality, meshes):
    """Every legal layout of every mesh shape."""
    for mesh in meshes:
        choices = []
        for name in legality.dims():
            if name.startswith("_"):
                continue
            choices.append([(name, None), *((name, axis) for axis in range(len(mesh.sizes))
                                            if legality.problem_of(name, axis, mesh.sizes) is None)])
        for entry in itertools.product(*choices):
            axis_of = {name: axis for name, axis in entry if axis is not None}
            if legality.problem(axis_of, mesh.sizes) is None:
                yield mesh, axis_of


def test_what_is_dearer_than_the_limit_is_not_lowered():
    graph, _, _ = perceptron()
    costs, _ = costs_of(graph, FLAT, 4)
    meshes, lowered = mesh_shapes(4, FLAT), []

    def search():
        lowered.clear()
        return Search(costs, meshes, {}, math.inf, lambda *layout: lowered.append(layout))
    in_order = list(itertools.islice(search(), 3))
    piecewise, least = search(), in_order[0].cost
    assert piecewise.next_below(least * (1 - 1e-9)) is None
    assert not lowered
    assert piecewise.next_below(least * (1 + 1e-9)) == in_order[0]
    assert piecewise.next_below(least * (1 - 1e-9)) is None
    assert len(lowered) == 1
    assert [piecewise.next_below(math.inf) for _ in in_order[1:]] == in_order[1:]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(("name", "devices"), [("perceptron", 4), ("perceptron", 8), ("mlp", 4), ("odd_shapes", 4)])
def test_it_finds_what_brute_force_finds(name, devices, machine):
    with tf.Graph().as_default():
        if name == "perceptron":
            graph, loss, _ = perceptron()
        else:
            net = build(name, "sgd", tf.float32)
            graph, loss = net.graph, net.loss
        found = find_layout(graph, devices, [loss], MACHINES[machine])
        costs, legality = costs_of(graph, MACHINES[machine], devices, [loss])
        seconds = [costs.total(mesh, axis_of) for mesh, axis_of in
                   all_layouts(legality, mesh_shapes(devices, MACHINES[machine]))]
        assert len(seconds) > 3
        assert found.seconds == pytest.approx(min(seconds), rel=1e-9)
        assert found.search["optimal"]
        later = [entry.seconds for entry in found.alternatives]
        assert later == sorted(later)
        assert not later or later[0] >= found.seconds * (1 - 1e-9)


@pytest.mark.parametrize(("name", "machine"), [
    case if case in [("mlp", "steep"), ("cnn", "flat"), ("transformer", "shared")]
    else pytest.param(*case, marks=pytest.mark.slow)
    for case in itertools.product(["mlp", "cnn", "transformer", "odd_functions"], MACHINES)])
def test_no_random_legal_layout_is_cheaper(name, machine):
    with tf.Graph().as_default():
        net = build(name, "adam", tf.float32)
        found = find_layout(net.graph, 4, [net.loss], MACHINES[machine])
        costs, legality = costs_of(net.graph, MACHINES[machine], 4, [net.loss])
        rng = np.random.default_rng(1)
        names, tried = [n for n in legality.dims() if not n.startswith("_")], 0
        for _ in range(1500):
            mesh = MeshShape((("all", 4),)) if rng.random() < 0.3 else MeshShape((("a", 2), ("b", 2)))
            chosen = rng.permutation(names)[:rng.integers(1, 6)]
            axis_of = {str(n): int(rng.integers(len(mesh.sizes))) for n in chosen}
            if legality.problem(axis_of, mesh.sizes) is None:
                tried += 1
                assert costs.total(mesh, axis_of) >= found.seconds * (1 - 1e-9), (mesh, axis_of)
        assert tried > 20
        if found.data_parallel is not None and not found.data_parallel.problem:
            assert found.seconds <= found.data_parallel.seconds * (1 + 1e-9)


@pytest.mark.parametrize("name", NETS)
def test_costs_are_those_of_the_strategy_with_one_layout(name):
    """The layout's cost is that of the configurations it gives the layers, costed the ordinary way."""
    with tf.Graph().as_default():
        net = build(name, "adam", tf.float32)
        assert layouts_and_uniform_strategies_agree(net.graph, export_graph(net.graph), STEEP) >= 8


@pytest.mark.slow
@pytest.mark.parametrize("name", models.names())
def test_costs_are_those_of_the_strategy_with_one_layout_in_every_model(name):
    with tf.Graph().as_default():
        program = model_program(name, models.load_config(name, "tiny"))
        assert layouts_and_uniform_strategies_agree(program.graph, export_graph(program.graph), STEEP) >= 4


def test_strings_are_what_mesh_tf_parses():
    with tf.Graph().as_default():
        graph, loss, _ = perceptron()
        found = find_layout(graph, 8, [loss], FLAT)
        shape = mtf.convert_to_shape(found.mesh_shape)
        rules = mtf.convert_to_layout_rules(found.layout_rules)
        assert shape.size == 8
        parsed = parse_rules(found.layout_rules, parse_mesh_shape(found.mesh_shape))
        assert parsed
        assert rules._pairs == set(parsed.items())


def test_what_is_fixed_stays():
    with tf.Graph().as_default():
        graph, loss, _ = perceptron()
        found = find_layout(graph, 8, [loss], FLAT, fixed={"narrow": "model", "batch": None})
        rules = parse_rules(found.layout_rules, parse_mesh_shape(found.mesh_shape))
        assert rules["narrow"] == "model"
        assert "batch" not in rules
        free = find_layout(graph, 8, [loss], FLAT)
        assert free.seconds <= found.seconds


def test_a_given_mesh_shape_is_kept():
    with tf.Graph().as_default():
        graph, loss, _ = perceptron()
        for text in ("a:2;b:4", "b:4;a:2", "x:1;y:8"):
            assert find_layout(graph, outputs=[loss], machine=FLAT, mesh_shape=text).mesh_shape == text


def test_compared_layouts_are_costed_and_judged():
    with tf.Graph().as_default():
        graph, loss, _ = perceptron()
        found = find_layout(graph, 8, [loss], FLAT, compare=[
            "a:2;b:4;batch:a;wide:b", ("a:2;b:4", {"narrow": "a", "other": "b"}), "a:8;batch:a;wide:a"])
        first, second, third = found.compared
        assert not first.problem
        assert first.seconds >= found.seconds
        assert "wrong values" in second.problem
        assert "narrow" in second.problem
        assert "both are in one tensor" in third.problem
        assert "does not lower" in str(found)


def test_explain_lists_every_axis():
    with tf.Graph().as_default():
        graph, loss, _ = perceptron()
        found = find_layout(graph, 8, [loss], FLAT, mesh_shape="rows:2;cols:4")
        text = found.explain("wide")
        for label in ("(none)", "rows:2", "cols:4", "chosen"):
            assert label in text
        with pytest.raises(UsageError, match="did you mean 'wide'"):
            found.explain("wid")


def test_memory_limit():
    with tf.Graph().as_default():
        graph, loss, _ = perceptron(32)
        free = find_layout(graph, 4, [loss], FAST)
        costs, legality = costs_of(graph, FAST, 4, [loss])
        everything = [(costs.total(mesh, axis_of), sum(costs.memory(mesh, axis_of).values()))
                      for mesh, axis_of in all_layouts(legality, mesh_shapes(4, FAST))]
        least = min(memory for _, memory in everything)
        limit = (least + free.memory_bytes) / 2
        assert limit < free.memory_bytes
        found = find_layout(graph, 4, [loss], FAST, memory_limit=limit)
        assert found.memory_bytes <= limit
        assert found.seconds == pytest.approx(min(cost for cost, memory in everything if memory <= limit), rel=1e-9)
        with pytest.raises(InfeasibleError) as caught:
            find_layout(graph, 4, [loss], FAST, memory_limit=least * 0.9)
        with pytest.raises(InfeasibleError):
            find_layout(graph, 4, [loss], FAST, memory_limit=least - 1)
        # What the error names is enough.
        assert find_layout(graph, 4, [loss], FAST, memory_limit=needed_text(least)).memory_bytes == least
        assert f"needs {needed_text(least)} per device, the limit is {bytes_text(least * 0.9)}" in str(caught.value)


def test_what_is_explained_fits_the_memory():
    with tf.Graph().as_default():
        graph, loss, _ = perceptron(32)
        costs, legality = costs_of(graph, FLAT, 4, [loss])
    mesh = parse_mesh_shape("rows:2;cols:2")
    layouts = [(costs.total(mesh, axis_of), costs.peak_memory(mesh, axis_of)[0], axis_of)
               for _, axis_of in all_layouts(legality, [mesh])]
    limit = min(memory for _, memory, _ in layouts)
    search = Search(costs, [mesh], {}, limit, lambda shape, rules: None)
    for dim in legality.dims():
        for axis in (None, 0, 1):
            fitting = [cost for cost, memory, axis_of in layouts
                       if axis_of.get(dim) == axis and memory <= limit * (1 + 1e-9)]
            found = search.cheapest_with(mesh, dim, axis)
            assert (found.cost if found else math.inf) == pytest.approx(min(fitting, default=math.inf))


def _all_within(costs, legality, meshes, limit):
    """What all layouts cost that fit, each number once, in order."""
    return sorted({float(f"{costs.total(mesh, axis_of):.9g}") for mesh, axis_of in all_layouts(legality, meshes)
                   if costs.peak_memory(mesh, axis_of)[0] <= limit})


@pytest.mark.parametrize("share", [0.1, 0.4, 0.8])
def test_layouts_within_memory_come_in_order_and_none_is_missing(share):
    graph, loss, _ = perceptron(32)
    costs, legality = costs_of(graph, FLAT, 4, [loss])
    meshes = mesh_shapes(4, FLAT)
    needs = [costs.peak_memory(mesh, axis_of)[0] for mesh, axis_of in all_layouts(legality, meshes)]
    limit = min(needs) + share * (max(needs) - min(needs))
    found = [candidate.cost for candidate in Search(costs, meshes, {}, limit, lambda *layout: None)]
    assert found == sorted(found)
    assert sorted({float(f"{cost:.9g}") for cost in found}) == _all_within(costs, legality, meshes, limit)


def test_what_cannot_be_the_answer_is_not_searched_within_memory(monkeypatch):
    """A mesh shape whose cheapest layout costs more than the answer, and what comes after the answer."""
    graph, loss, _ = perceptron(32)
    costs, legality = costs_of(graph, FLAT, 4, [loss])
    meshes = mesh_shapes(4, FLAT)
    free = next(iter(Search(costs, meshes, {}, math.inf, lambda *layout: None)))
    least = min(costs.peak_memory(mesh, axis_of)[0] for mesh, axis_of in all_layouts(legality, meshes))
    limit = (least + costs.peak_memory(free.mesh, free.axis_of)[0]) / 2
    solved, enumerated = [], []
    monkeypatch.setattr(search_module, "minimise_within_peak",
                        lambda *args, solve=search_module.minimise_within_peak, **options: (
                            solved.append(args) or solve(*args, **options)))
    monkeypatch.setattr(search_module, "cheapest", lambda *args, order=search_module.cheapest: (
        enumerated.append(args) or entry for entry in order(*args)))
    search = Search(costs, meshes, {}, limit, lambda *layout: None)
    best = search.next_below(math.inf)
    looked_at = len(enumerated)
    assert search.next_below(best.cost) is None
    assert len(enumerated) == looked_at
    # With a limit below every unconstrained optimum, nothing is solved within memory.
    del solved[:]
    assert Search(costs, meshes, {}, limit, lambda *layout: None).next_below(free.cost * (1 - 1e-9)) is None
    assert not solved


def _few_together(mesh, rules):
    """Two dims that fail together, and as the verifier names them three or more none of which fails by itself."""
    fails = len(rules) > 2 or set(rules) == {"batch", "wide"}
    return Problem("wide", tuple(rules), "these dims together") if fails else None


@pytest.mark.parametrize("share", [None, 0.4])
@pytest.mark.parametrize(("patience", "most"), [("_PATIENCE", 1), ("_PATIENCE", 7), ("_REPEATED", 0)])
def test_what_is_given_up_leaves_its_bound(monkeypatch, patience, most, share):
    graph, loss, _ = perceptron(32)
    costs, legality = costs_of(graph, FLAT, 8, [loss])
    mesh = parse_mesh_shape("a:2;b:2;c:2")
    every = list(all_layouts(legality, [mesh]))
    needs = [costs.peak_memory(*layout)[0] for layout in every]
    limit = math.inf if share is None else min(needs) + share * (max(needs) - min(needs))
    monkeypatch.setattr(search_module, patience, most)
    search = Search(costs, [mesh], {}, limit, _few_together)
    found = {candidate.effect for candidate in search}
    missing = [Candidate(costs.total(*layout), *layout) for layout, nbytes in zip(every, needs, strict=True)
               if nbytes <= limit and _few_together(*layout) is None]
    least = min(candidate.cost for candidate in missing if candidate.effect not in found)
    assert (0.0 if share is None else -math.inf) < search.bound <= least * (1 + 1e-9)


def test_what_is_given_up_is_not_called_impossible(monkeypatch):
    monkeypatch.setattr(GraphSearch, "_verify", lambda _, *layout: _few_together(*layout))

    def find(**fixed):
        with tf.Graph().as_default():
            graph, loss, _ = perceptron()
            return find_layout(graph, 8, [loss], FLAT, "a:2;b:2;c:2", fixed=fixed)
    best = find()
    assert best.search["optimal"]
    monkeypatch.setattr(search_module, "_PATIENCE", 1)
    hasty = find()
    assert not hasty.search["optimal"]
    assert 0.0 < hasty.seconds / (1 + hasty.search["gap"]) <= best.seconds < hasty.seconds
    with pytest.raises(InfeasibleError, match="layouts that were tried lowers, and there are more"):
        find(batch="a", wide="b")


def test_what_a_device_holds_is_the_limit_unless_another_is_given():
    with tf.Graph().as_default():
        graph, loss, _ = perceptron(32)
        free = find_layout(graph, 4, [loss], FAST)
        lightest = find_layout(graph, 4, [loss], FAST, memory_limit=free.memory_bytes * 0.99)
        small = dataclasses.replace(FAST, memory_bytes=lightest.memory_bytes)
        assert find_layout(graph, 4, [loss], small).best == lightest.best
        beyond = find_layout(graph, 4, [loss], small, memory_limit="none")
        assert beyond.best == free.best
        needs = f"best: needs {needed_text(free.memory_bytes)} per device, flat holds {bytes_text(small.memory_bytes)}"
        assert needs in str(beyond)
        assert needs not in str(find_layout(graph, 4, [loss], FAST))
        with pytest.raises(InfeasibleError, match="a device of flat holds 1 B"):
            find_layout(graph, 4, [loss], dataclasses.replace(FAST, memory_bytes=1.0))


def test_the_answer_says_what_memory_is_for():
    with tf.Graph().as_default():
        graph, loss, _ = perceptron()
        found = find_layout(graph, 4, [loss], FLAT)
    line, = (line for line in str(found).splitlines() if line.startswith("memory per device: "))
    for part, amount in found.best.memory.items():
        assert (f"{part} {bytes_text(amount)}" in line) == (amount > 0)
    assert f"{bytes_text(found.memory_bytes)} of {bytes_text(FLAT.memory_bytes)}" in line


def test_noise_is_told():
    with tf.Graph().as_default():
        graph, loss, _ = perceptron()
        assert "random" not in str(find_layout(graph, 4, [loss], FLAT))
        mtf.dropout(loss.operation.inputs[0], is_training=True, keep_prob=0.5, name="mask")
        assert "the program draws random numbers (mask" in str(find_layout(graph, 4, [loss], FLAT))


def test_orders_of_axes_compete_where_links_differ():
    assert [str(mesh) for mesh in mesh_shapes(8, FLAT)] == ["rows:8", "rows:2;cols:4", "rows:2;cols:2;tubes:2"]
    assert "rows:4;cols:2" in [str(mesh) for mesh in mesh_shapes(8, STEEP)]
    with tf.Graph().as_default():
        graph, _, _ = perceptron()
        costs, _ = costs_of(graph, FLAT, 8)
        # On a flat machine the order makes no difference.
        one = costs.total(MeshShape((("a", 2), ("b", 4))), {"batch": 0, "wide": 1})
        other = costs.total(MeshShape((("b", 4), ("a", 2))), {"batch": 1, "wide": 0})
        assert one == pytest.approx(other, rel=1e-12)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"fixed": {"batc": "rows"}}, "did you mean 'batch'"),
    ({"fixed": {"batch": "rows"}, "mesh_shape": "a:8"}, "no axis 'rows'"),
    ({"mesh_shape": "a:8;b"}, "not a pair"),
    ({"mesh_shape": "a:2;b:2"}, "make them agree"),
    ({"mesh_shape": "a:0"}, "positive"),
    ({"devices": 0}, "at least one device"),
    ({"devices": 3, "fixed": {"batch": "rows"}, "mesh_shape": "rows:3"}, "does not divide by 3"),
    ({"fixed": {"batch": "rows", "wide": "rows"}, "mesh_shape": "rows:8"}, "both are in one tensor"),
    ({"compare": ["a:2;batch:a"]}, "compare meshes of one size"),
    ({"compare": ["a:8;batch:b"]}, "no axis 'b'"),
    ({"machine": "nothing"}, "unknown machine"),
    ({"fixed": {"batch": "my axis"}}, "layout rules cannot mention this name"),
    ({"mesh_shape": mtf.Shape([mtf.Dimension("my axis", 8)])}, "layout rules cannot mention this name"),
])
def test_mistakes_are_told_in_one_line(arguments, message):
    with tf.Graph().as_default():
        graph, loss, _ = perceptron()
        with pytest.raises((UsageError, InfeasibleError), match=message) as caught:
            find_layout(graph, **{"devices": 8, "outputs": [loss], "machine": FLAT, **arguments})
        assert "\n" not in str(caught.value)


def test_an_export_of_another_graph_is_refused(monkeypatch):
    with tf.Graph().as_default():
        smaller = export_graph(perceptron(4)[0])
    with tf.Graph().as_default():
        net = build("mlp", "sgd", tf.float32)
        with pytest.raises(MismatchError, match="without sharded_updates"):
            find_layout(net.graph, 8, [net.loss], FLAT, exported=export_graph(net.graph, sharded_updates=True))
    with tf.Graph().as_default():
        graph, loss, _ = perceptron()
        exported = export_graph(graph)
        for other in (smaller, export_graph(mtf.Graph())):
            with pytest.raises(MismatchError, match="is not what export_graph makes of this graph") as caught:
                find_layout(graph, 8, [loss], FLAT, exported=other)
            assert other.hash in str(caught.value)
        # One that was read from a file is told by its hash; the graph's own last one is not made again.
        found = find_layout(graph, 8, [loss], FLAT, exported=dataclasses.replace(exported, name="of a file"))
        exported = export_graph(graph)
        monkeypatch.setattr("pase_mtf.export.exporter.phases_of", None)
        assert find_layout(graph, 8, [loss], FLAT, exported=exported).best == found.best
        monkeypatch.undo()
        mtf.square(loss)
        with pytest.raises(MismatchError):
            find_layout(graph, 8, [loss], FLAT, exported=exported)


def test_a_layout_is_copied_pickled_and_hashed():
    with tf.Graph().as_default():
        graph, loss, _ = perceptron()
        found, other = (find_layout(graph, devices, [loss], FLAT) for devices in (8, 4))
    copies = [copy.copy(found), copy.deepcopy(found), pickle.loads(pickle.dumps(found))]
    for again in copies:
        assert again == found
        assert str(again) == str(found)
        assert again.format("json") == found.format("json")
        assert {found: 1, other: 2}[again] == 1
    for again in copies[:2]:
        assert again.explain("batch") == found.explain("batch")
    assert copies[1].search is not found.search
    with pytest.raises(UsageError, match=r"explain\('batch'\): a layout that was unpickled"):
        copies[2].explain("batch")
    assert len({found.best, copies[2].best, other.best}) == 2


def test_what_belongs_to_a_graph_is_refused_beside_a_function():
    with tf.Graph().as_default():
        graph, loss, _ = perceptron()
        exported = export_graph(graph)
        for argument, value in (("outputs", ["anything"]), ("outputs", iter([loss])), ("exported", exported)):
            with pytest.raises(UsageError, match=f"find_layout: {argument} is of a graph"):
                find_layout(lambda: perceptron()[0], 8, machine=FLAT, **{argument: value})


def test_nothing_to_split_names_operations_and_dims():
    with tf.Graph().as_default():
        graph = mtf.Graph()
        x = mtf.import_tf_tensor(mtf.Mesh(graph, "mesh"), tf.ones([6, 10]), mtf.Shape(
            [mtf.Dimension("batch", 6), mtf.Dimension("features", 10)]))
        y = mtf.square(x, name="squared")
        with pytest.raises(InfeasibleError, match=r"operation import, dim batch: size 6 does not divide by 4"):
            find_layout(graph, 4, [y], FLAT, mesh_shape="all:4")


@pytest.mark.parametrize(("batch", "told"), [(12, ""), (10, "devices do useful work")])
def test_devices_that_repeat_the_work_of_others_are_told(batch, told):
    with tf.Graph().as_default():
        graph, loss, _ = perceptron(batch)
        layout = find_layout(graph, 12, [loss], machine=FLAT)
    # No size but 12 divides by 3: an axis of 3 has nothing to split.
    assert any("devices do useful work" in note for note in layout.notes) == bool(told)
    if told:
        useful = float(next(note for note in layout.notes if told in note).split()[1])
        assert 1.0 <= useful < 12.0
        assert f"{told} (the others repeat it or idle)" in str(layout)


def test_what_is_found_first_is_not_preferred_to_what_costs_less(monkeypatch):
    """Within a memory limit what is found first is not always proven to be the cheapest."""
    with tf.Graph().as_default():
        graph, loss, _ = perceptron(32)
        given = {"mesh_shape": "rows:2;cols:2", "machine": FLAT}
        proven = find_layout(graph, 4, [loss], **given)
        monkeypatch.setattr(GraphSearch, "candidates", lambda self, most, known=GraphSearch.candidates: known(
            self, most)[::-1])
        found = find_layout(graph, 4, [loss], **given)
    assert found.seconds == pytest.approx(proven.seconds)
    assert found.seconds <= min(entry.seconds for entry in found.alternatives)


def test_what_is_beyond_the_limit_that_was_given_is_named():
    with tf.Graph().as_default():
        graph, loss, _ = perceptron(32)
        free = find_layout(graph, 4, [loss], FAST)
        limit = 0.99 * free.memory_bytes
        found = find_layout(graph, 4, [loss], FAST, memory_limit=limit,
                            compare=[f"{free.mesh_shape};{free.layout_rules}"])
    given, = found.compared
    assert given.memory_bytes > limit >= found.memory_bytes
    needs = f"given 1: needs {needed_text(free.memory_bytes, limit)} per device, the limit is {bytes_text(limit)}"
    assert needs in str(found)
