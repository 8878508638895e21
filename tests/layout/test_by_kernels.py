"""Layouts priced by the kernels that stock Mesh-TensorFlow makes of them; a clock that tells what it is asked to stands
for the machine's."""

import dataclasses
import itertools
import time
from types import SimpleNamespace
from unittest.mock import MagicMock

import harness
import pytest

from pase_mtf.calibration.cache import kernels_path
from pase_mtf.calibration.meter import KernelMeter
from pase_mtf.compat import mtf, placement_mesh_impl, tf
from pase_mtf.cost.roofline import still_true
from pase_mtf.errors import InfeasibleError, UsageError
from pase_mtf.layout import by_kernels
from pase_mtf.layout.by_kernels import machine_of_kernels
from pase_mtf.layout.find import find_layout
from pase_mtf.layout.kernels import COMPUTE, layout_kernels
from pase_mtf.layout.space import parse_layout
from pase_mtf.lowering.equal_nodes import first_of_equal
from pase_mtf.lowering.nodes import kernel_of
from pase_mtf.machine.kernel_file import load_times
from pase_mtf.machine.kernel_table import save_tables
from pase_mtf.machine.kernels import SENT, send_kernel
from pase_mtf.machine.references import REFERENCES
from pase_mtf.strategy import warm


def build():
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    batch, io, hidden = mtf.Dimension("batch", 16), mtf.Dimension("io", 64), mtf.Dimension("hidden", 512)
    x = mtf.import_tf_tensor(mesh, tf.zeros([16, 64]), mtf.Shape([batch, io]))
    w = mtf.get_variable(mesh, "w", mtf.Shape([io, hidden]))
    v = mtf.get_variable(mesh, "v", mtf.Shape([hidden, io]))
    y = mtf.einsum([mtf.relu(mtf.einsum([x, w], mtf.Shape([batch, hidden]))), v], mtf.Shape([batch, io]))
    loss = mtf.reduce_mean(mtf.square(y - x))
    mtf.optimize.SgdOptimizer(0.1).apply_grads(mtf.gradients([loss], [w, v]), [w.operation, v.operation])
    return graph, [loss]


def build_for(mesh_shape="all:4", layout="batch:all"):
    return build()


def build_loop():
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    x = mtf.import_tf_tensor(mesh, tf.zeros([8]), mtf.Shape([mtf.Dimension("batch", 8)]))
    zero = mtf.constant(mesh, 0, mtf.Shape([]), tf.int32)
    _, y = mtf.while_loop(lambda i, y: mtf.less(i, 3), lambda i, y: [i + 1, y + x], [zero, x])
    return graph, [mtf.reduce_sum(y)]


@pytest.mark.parametrize("layout", harness.some_slow(
    ["all:4;batch:all", "all:4;hidden:all", "all:4"], ["rows:2;cols:2;batch:rows;io:cols"]))
def test_the_kernels_of_a_layout_are_those_of_the_graph_that_runs(layout):
    shape, rules = parse_layout(layout)
    with tf.Graph().as_default():
        graph, outputs = build()
        found = layout_kernels(graph, outputs, shape, rules)
    assert not found.unknown
    with tf.Graph().as_default() as tf_graph:
        graph, outputs = build()
        devices = [f"/device:CPU:{number}" for number in range(4)]
        impl = placement_mesh_impl.PlacementMeshImpl(str(shape), ",".join(f"{dim}:{axis}" for dim, axis in
                                                                          rules.items()), devices)
        lowering = mtf.Lowering(graph, {outputs[0].mesh: impl})
        targets = [lowering.lowered_operation(operation) for operation in graph.operations
                   if isinstance(operation, mtf.Assign)]
        targets += [block.op for block in lowering.tensors[outputs[0]].to_laid_out_tensor().all_slices]
        names = tf.graph_util.extract_sub_graph(tf_graph.as_graph_def(), [target.name for target in targets]).node
        run = {node.name for node in names}
        kernels = list(map(kernel_of, first_of_equal(node for node in tf_graph.get_operations() if node.name in run)))
    together = sum(found.parts.values(), type(found.parts[COMPUTE])())
    nodes = type(together)({kernel: times for kernel, times in together.items() if kernel.operation != SENT})
    assert nodes == type(together)(kernel for kernel in kernels if kernel is not None)
    assert ("all-reduce" in found.parts) == bool(rules)


def test_what_a_ring_hands_on_is_sent():
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh, io = mtf.Mesh(graph, "mesh"), mtf.Dimension("io", 64)
        x = mtf.import_tf_tensor(mesh, tf.zeros([16, 64]), mtf.Shape([mtf.Dimension("batch", 16), io]))
        y = mtf.reshape(mtf.square(x), mtf.Shape([mtf.Dimension("rows", 16), io]))
        parts = layout_kernels(graph, [y], *parse_layout("all:4;batch:all")).parts
    assert parts["resharding"][send_kernel(4 * 64, 4)] == 12  # to each of four devices the blocks of three others


def test_by_the_machine_at_hand_and_by_a_file(cache_dir, timed_kernels, tmp_path):
    here = find_layout(build, 4, prices="measured", measure_seconds=600, compare=["all:4;io:all"])
    report = here.search["kernels"]
    assert report["of_strategy"] == report["measured_of_strategy"] > 10
    assert here.search["gap"] >= 0.0
    costs = [here.best, here.data_parallel, *here.compared, *here.alternatives]
    assert here.seconds == min(cost.seconds for cost in costs)
    assert all(cost.seconds == pytest.approx(sum(cost.parts.values())) for cost in costs)
    times = load_times(kernels_path(4))
    with tf.Graph().as_default():
        graph, outputs = build()
        parts = layout_kernels(graph, outputs, *parse_layout((here.mesh_shape, here.layout_rules))).parts
    assert here.seconds == pytest.approx(sum(times.get(kernel).seconds * count for counts in parts.values()
                                             for kernel, count in counts.items()), rel=1e-3)
    assert f"all {report['of_strategy']} kernels of it measured" in str(here)
    with pytest.raises(UsageError, match="explain is for roofline prices"):
        here.explain("batch")
    save_tables(tmp_path / "mine.json", [times])
    timed_kernels.clear()
    there = find_layout(build, 4, machine=tmp_path / "mine.json", compare=["all:4;io:all"])
    assert not timed_kernels
    assert (there.mesh_shape, there.layout_rules) == (here.mesh_shape, here.layout_rules)
    assert there.seconds == pytest.approx(here.seconds, rel=1e-3)


def test_what_is_estimated_is_no_proof():
    """A layout that may take less than the best, by its bound, and whose kernels were not all measured."""
    seconds, bounds = {"A": 10.0, "B": 12.0, "C": 20.0}, {"A": 7.0, "B": 8.0, "C": 11.0}
    one, judge = MagicMock(), MagicMock(still_true=1.0)
    one.__iter__.return_value = iter([SimpleNamespace(cost=bounds[name], mesh=name, rules={}) for name in "ABC"])
    one.cost = lambda _, mesh, rules: SimpleNamespace(name=mesh, seconds=seconds[mesh], problem=None)
    judge.cost, judge.effect = lambda cost: cost, lambda cost: cost.name
    judge.expired.return_value, judge.is_measured = False, lambda cost: cost.name == "A"
    usable, bound = by_kernels._candidates(one, judge, [], [])
    assert (usable[0].name, bound) == ("A", 8.0)


def test_what_slows_the_machine_is_told(cache_dir, timed_kernels, monkeypatch, capsys):
    monkeypatch.setattr("pase_mtf.calibration.kernels.KernelTimer.disturbed", 3)
    find_layout(build, 4, prices="measured", measure_seconds=600)
    assert "others slow this machine" in capsys.readouterr().err


def test_without_outputs_a_step_computes_what_nobody_reads():
    """A function that comes to mtf.Lowering tells none; what it assigns need not be all."""
    def kernels(*, counts, told):
        with tf.Graph().as_default():
            graph = mtf.Graph()
            mesh, (batch, io) = mtf.Mesh(graph, "mesh"), (mtf.Dimension("batch", 16), mtf.Dimension("io", 64))
            x = mtf.import_tf_tensor(mesh, tf.zeros([16, 64]), mtf.Shape([batch, io]))
            w = mtf.get_variable(mesh, "w", mtf.Shape([io]))
            y = mtf.einsum([x, w], mtf.Shape([batch]))
            if counts:
                step = mtf.get_variable(mesh, "step", mtf.Shape([]))
                mtf.assign(step.operation, step + 1.0)
            return layout_kernels(graph, [y] if told else [], *parse_layout("all:4;io:all")).parts
    for counts in (False, True):
        found = kernels(counts=counts, told=False)
        assert found["all-reduce"]
        assert found == kernels(counts=counts, told=True)
    with tf.Graph().as_default():  # the gradient of its input is never run
        graph, outputs = build()
        shape, rules = parse_layout("all:4;batch:all")
        assert layout_kernels(graph, [], shape, rules) == layout_kernels(graph, outputs, shape, rules)


@pytest.mark.parametrize("trainable", [False, True])
def test_gradients_are_computed_where_nothing_is_trained(trainable):
    """For somebody outside of the graph, which keeps averages alone."""
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh, (batch, io) = mtf.Mesh(graph, "mesh"), (mtf.Dimension("batch", 16), mtf.Dimension("io", 64))
        x = mtf.import_tf_tensor(mesh, tf.zeros([16, 64]), mtf.Shape([batch, io]))
        w = mtf.get_variable(mesh, "w", mtf.Shape([io]))
        kept = mtf.get_variable(mesh, "kept", mtf.Shape([]), trainable=trainable)
        loss = mtf.reduce_sum(mtf.square(mtf.einsum([x, w], mtf.Shape([batch]))))
        gradient, = mtf.gradients([loss], [w])
        mtf.assign(kept.operation, kept + 1.0)
        shape, rules = parse_layout("all:4;batch:all")
        told, untold = (layout_kernels(graph, outputs, shape, rules).parts for outputs in ([loss, gradient], []))
    assert any(counts - untold[part] for part, counts in told.items()) == trainable


@pytest.mark.slow
def test_the_best_of_all_layouts_or_a_gap_to_it(cache_dir, timed_kernels):
    found = find_layout(build, 4, prices="measured", measure_seconds=600)
    times = load_times(kernels_path(4))
    every = [";".join(["rows:4", *(f"{dim}:rows" for dim in dims)]) for count in range(3)
             for dims in itertools.combinations(("batch", "io", "hidden"), count)]
    every += [f"rows:2;cols:2;{one}:rows;{other}:cols" for one, other in itertools.permutations(
        ("batch", "io", "hidden"), 2)]
    costs = find_layout(build, 4, prices="measured", measure_seconds=600, compare=every).compared
    lowering = [cost.seconds for cost in costs if not cost.problem]
    assert len(lowering) > 8
    assert found.seconds <= min(lowering) * (1 + found.search["gap"]) * (1 + 1e-3)
    assert len(times) > len(REFERENCES)
    # What layouts are tried in the order of: at the best rates of all kernels no layout takes more than its kernels do.
    least = find_layout(build, 4, machine=machine_of_kernels(KernelMeter(4)), compare=every).compared
    assert len(least) == len(costs)
    assert all(low.seconds <= cost.seconds * (1 + 1e-9) for low, cost in zip(least, costs, strict=True)
               if not cost.problem)


def test_what_was_a_bound_is_less_of_one_once_faster_kernels_are_known(cache_dir, timed_kernels):
    meter = KernelMeter(4)
    meter.start()
    before = machine_of_kernels(meter)
    assert still_true(before, before) == 1.0
    meter.times.update({kernel: dataclasses.replace(timing, seconds=timing.seconds / 3)
                        for kernel, timing in list(meter.times.items())})
    now = machine_of_kernels(meter)
    least = still_true(before, now)
    assert least == pytest.approx(1 / 3)
    assert still_true(now, before) == 1.0
    slow, fast = (find_layout(build, 4, machine=machine, compare=["all:4;io:all", "all:4;hidden:all"])
                  for machine in (before, now))
    for one, other in zip(slow.compared, fast.compared, strict=True):
        assert least * one.seconds <= other.seconds * (1 + 1e-9)


def test_within_memory_and_what_is_fixed(cache_dir, timed_kernels):
    found = find_layout(build, 4, prices="measured", measure_seconds=600, fixed={"hidden": None}, mesh_shape="all:4")
    assert "hidden" not in found.layout_rules
    with pytest.raises(InfeasibleError, match="the least that any layout needs"):
        find_layout(build, 4, prices="measured", memory_limit=1000)


def test_without_seconds_it_is_estimated_and_said(cache_dir, timed_kernels):
    found = find_layout(build, 4, prices="measured", measure_seconds=1e-9)
    assert set(timed_kernels) == set(REFERENCES)
    assert not found.search["optimal"]
    assert "the others estimated" in str(found)


@pytest.mark.parametrize(("program", "arguments", "says"), [
    (build_for, {}, r"its graph may depend on the layout \(mesh_shape, layout\)"),
    (build_loop, {}, "is a loop, whose kernels nobody knows; take roofline prices, and a machine with rates"),
    (build, {"machine": "h100"}, "'h100' is neither"),
    (build, {"prices": "mesured"}, "did you mean 'measured'"),
    (build, {"measure_seconds": 0.0}, "measure_seconds=0.0")])
def test_what_measured_prices_cannot(cache_dir, timed_kernels, program, arguments, says):
    with pytest.raises(UsageError, match=says):
        find_layout(program, 4, **{"prices": "measured", **arguments})
    assert not timed_kernels


def _equal_layers():
    """Two variables of one shape, which mtf.Lowering would stack."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    batch, io = mtf.Dimension("batch", 16), mtf.Dimension("io", 64)
    x = mtf.import_tf_tensor(mesh, tf.zeros([16, 64]), mtf.Shape([batch, io]))
    scales = [mtf.get_variable(mesh, name, mtf.Shape([io])) for name in ("one", "other")]
    loss = mtf.reduce_mean(mtf.square(x * scales[0] + scales[1]))
    mtf.optimize.SgdOptimizer(0.1).apply_grads(mtf.gradients([loss], scales), [scale.operation for scale in scales])
    return graph, [loss]


@pytest.mark.parametrize("inside", [True, False])
def test_the_users_graph_is_left_as_it_was(cache_dir, timed_kernels, inside):
    """Also where it is not built in the tf.Graph that is current when it is priced."""
    with tf.Graph().as_default() as tf_graph:
        graph, outputs = _equal_layers()
        before = list(graph.operations)
        if inside:
            found = find_layout(graph, 4, outputs=outputs, prices="measured")
    if not inside:
        found = find_layout(graph, 4, outputs=outputs, prices="measured")
    assert found.seconds > 0
    assert graph.operations == before
    with tf_graph.as_default():
        assert len(tf.global_variables()) == 2
        impl = placement_mesh_impl.PlacementMeshImpl(*(
            found.mesh_shape, found.layout_rules), [f"/device:CPU:{number}" for number in range(4)])
        mtf.Lowering(graph, {outputs[0].mesh: impl})


def test_a_function_that_builds_in_a_graph_of_its_own(cache_dir, timed_kernels):
    def program():
        with tf.Graph().as_default():
            return _equal_layers()
    assert find_layout(program, 4, prices="measured").seconds > 0


def test_a_layout_to_compare_with_may_be_the_answer(cache_dir, timed_kernels, monkeypatch):
    seen, candidates = [], by_kernels._candidates

    def noting(one, judge, allowed, asked):
        seen.extend(cost.layout_rules for cost in allowed)
        return candidates(one, judge, allowed, asked)
    monkeypatch.setattr(by_kernels, "_candidates", noting)
    find_layout(build, 4, prices="measured", measure_seconds=600, compare=["all:4;io:all"])
    assert "io:all" in seen


def test_to_compile_is_not_of_the_time_for_measuring(cache_dir, timed_kernels, monkeypatch):
    whole, late = time.perf_counter, [0.0]

    def compile_kernels():
        late[0] += 1000.0
    monkeypatch.setattr(time, "perf_counter", lambda: whole() + late[0])
    monkeypatch.setattr(warm, "_done", [])
    monkeypatch.setattr(warm, "compile_kernels", compile_kernels)
    kernels = find_layout(build, 4, prices="measured", measure_seconds=600).search["kernels"]
    assert late == [1000.0]
    assert kernels["of_strategy"] == kernels["measured_of_strategy"]


def test_a_dim_that_no_rule_can_mention(cache_dir, timed_kernels):
    """It is told of the layout that names it, and costs nobody the answer."""
    def program():
        graph = mtf.Graph()
        mesh, batch, io = mtf.Mesh(graph, "mesh"), mtf.Dimension("my batch", 16), mtf.Dimension("io", 64)
        x = mtf.import_tf_tensor(mesh, tf.zeros([16, 64]), mtf.Shape([batch, io]))
        y = mtf.einsum([x, mtf.get_variable(mesh, "w", mtf.Shape([io]))], mtf.Shape([batch]))
        return graph, [mtf.reduce_sum(mtf.square(y))]
    found = find_layout(program, 4, prices="measured", measure_seconds=600,
                        compare=[("all:4", {"my batch": "all"})])
    assert "layout rules cannot mention this name" in found.compared[0].problem
    assert found.seconds > 0


def test_where_no_dim_can_be_split_it_is_told(cache_dir, timed_kernels):
    with pytest.raises(InfeasibleError, match="no dim can be split over 3 devices"):
        find_layout(build, 3, prices="measured", measure_seconds=600)


def test_without_time_what_is_fixed_is_an_answer(cache_dir, timed_kernels):
    found = find_layout(build, 4, prices="measured", time_limit=1e-9, fixed={"hidden": "rows"})
    assert (found.layout_rules, found.best.problem) == ("hidden:rows", "")
    assert not found.search["optimal"]
