"""Programs that lower deep inside: captured before it, or lowered in our way."""

import re
import threading

import numpy as np
import pytest
from harness import device_names, read_before_updating, session
from nets import build
from own_operations import Doubled

import pase_mtf
from pase_mtf.calibration.cache import kernels_path
from pase_mtf.compat import mtf, placement_mesh_impl, tf
from pase_mtf.errors import MismatchError, UsageError
from pase_mtf.export.exporter import export_graph
from pase_mtf.layout.capture import capture_graph, swap_lowering
from pase_mtf.layout.find import find_layout
from pase_mtf.lowering.lowering import PlanLowering
from pase_mtf.machine.kernel_file import load_times
from pase_mtf.machine.kernel_table import save_tables
from pase_mtf.strategy.find import find_strategy

Lowering = mtf.Lowering  # as a program that imports the class by itself has it


def model_fn(mesh_shape="a:2;b:2", layout="batch:a", lower=None, devices=None):
    """A program as people have it: builds, lowers, and returns what a training loop runs."""
    net = build("mlp", "sgd", tf.float64)
    impl = placement_mesh_impl.PlacementMeshImpl(mesh_shape, layout, devices or device_names(4))
    try:
        lowering = (lower or mtf.Lowering)(net.graph, {net.mesh: impl})
    except Exception as error:  # a program may well do that
        raise AssertionError("the program saw an exception") from error
    loss = lowering.export_to_tf_tensor(net.loss)
    update = tf.group([lowering.lowered_operation(op) for op in net.updates])
    return lowering, loss, update


def losses(made, steps=3):
    lowering, loss, update = made
    read_before_updating(lowering, [loss.op, update])
    fill = lowering.copy_masters_to_slices()
    with session(4) as run:
        run.run(tf.global_variables_initializer())
        run.run(fill)
        return [run.run([loss, update])[0] for _ in range(steps)]


@pytest.mark.parametrize("lower", [None, Lowering, mtf.ops.Lowering])
def test_the_graph_is_captured_and_the_program_stopped(lower):
    with tf.Graph().as_default():
        reached = False
        with capture_graph() as captured:
            model_fn(lower=lower)
            reached = True
        assert not reached
        assert captured.found
        found = find_layout(captured.graph, 4, machine="h100")
        assert mtf.convert_to_shape(found.mesh_shape).size == 4
        # The program runs as before, in another graph.
    with tf.Graph().as_default():
        made = model_fn(found.mesh_shape, found.layout_rules)
        assert type(made[0]) is mtf.Lowering
        assert np.isfinite(losses(made)).all()


def test_capturing_nothing_is_told():
    with capture_graph() as captured:
        pass
    assert not captured.found
    with pytest.raises(UsageError, match="never came to"):
        _ = captured.graph


def test_an_error_of_the_program_goes_through():
    before = mtf.Lowering.__init__
    with pytest.raises(ZeroDivisionError), capture_graph():
        _ = 1 / 0
    assert mtf.Lowering.__init__ is before


@pytest.mark.parametrize("lower", [None, Lowering])
def test_swapped_lowering_trains_as_one_device_does(lower):
    before = mtf.Lowering.__init__
    with tf.Graph().as_default():
        want = losses(model_fn("all:1", "", devices=[""]))
    with tf.Graph().as_default(), swap_lowering(machine="h100") as swapped:
        made = model_fn(lower=lower)
        assert isinstance(made[0], PlanLowering)
        assert isinstance(made[0], mtf.Lowering)
        assert swapped.lowerings == [made[0]]
        assert swapped.strategies[0].devices == 4
        got = losses(made)
    np.testing.assert_allclose(got, want, rtol=1e-9)
    assert mtf.Lowering.__init__ is before


def test_swapped_lowering_takes_a_strategy():
    with tf.Graph().as_default():
        strategy = find_strategy(export_graph(build("mlp", "sgd", tf.float64).graph), 4, "h100", "data_parallel")
        other = find_strategy(export_graph(build("cnn", "sgd", tf.float64).graph), 4, "h100", "data_parallel")
    with tf.Graph().as_default():
        want = losses(model_fn("all:4", "batch:all"))
    with tf.Graph().as_default(), swap_lowering(strategy) as swapped:
        np.testing.assert_allclose(losses(model_fn()), want, rtol=1e-9)
        assert swapped.strategies == [strategy]
    with tf.Graph().as_default(), swap_lowering(other), pytest.raises(AssertionError) as caught:
        model_fn()
    assert isinstance(caught.value.__cause__, MismatchError)


def test_swapped_lowering_of_updates_in_shards(cache_dir, timed_kernels):
    """As layers of their own: of a strategy that is given, and of one that is searched for."""
    with tf.Graph().as_default():
        want = losses(model_fn("all:1", "", devices=[""]))
    with tf.Graph().as_default():
        graph = build("mlp", "sgd", tf.float64).graph
        sharded = find_strategy(graph, 4, "h100", "zero", sharded_updates=True)
        assert sharded.graph_hash != export_graph(graph).hash
    for given in ({"strategy": sharded}, {"machine": "h100", "sharded_updates": True},
                  {"prices": "measured", "sharded_updates": True}):
        with tf.Graph().as_default(), swap_lowering(**given) as swapped:
            np.testing.assert_allclose(losses(model_fn()), want, rtol=1e-9)
        assert len(swapped.strategies[0].configurations) == len(sharded.configurations)


def test_swapped_lowering_by_measured_kernels(cache_dir, timed_kernels, tmp_path):
    with tf.Graph().as_default(), swap_lowering(prices="measured") as swapped:
        model_fn()
    here, = swapped.strategies
    assert here.search["kernels"]["of_strategy"] == here.search["kernels"]["measured_of_strategy"] > 5
    save_tables(tmp_path / "mine.json", [load_times(kernels_path(4))])
    with tf.Graph().as_default(), swap_lowering(machine=tmp_path / "mine.json") as swapped:
        assert np.isfinite(losses(model_fn())).all()
    # Which is the best of strategies that are as good depends on what was timed, and when; here nothing was.
    told = swapped.strategies[0]
    assert told.search["kernels"]["seconds"] == 0
    assert told.search["kernels"]["measured"] > 5
    gpus = [f"/device:GPU:{number}" for number in range(4)]
    with tf.Graph().as_default(), swap_lowering(prices="measured", devices=gpus), pytest.raises(
            AssertionError) as caught:
        model_fn()
    assert "those of CPUs only" in str(caught.value.__cause__)


def test_swapping_needs_devices():
    with tf.Graph().as_default(), swap_lowering(machine="h100"), pytest.raises(AssertionError) as caught:
        model_fn(devices=[""] * 4)
    assert "swap_lowering(devices=" in str(caught.value.__cause__)
    with tf.Graph().as_default():
        with swap_lowering(machine="h100", devices=device_names(4)):
            made = model_fn(devices=[""] * 4)
        assert isinstance(made[0], PlanLowering)


@pytest.mark.parametrize(("devices", "kind"), [(["/device:GPU:0", "/gpu:1"], "gpu"), (device_names(2), "cpu"),
                                               (["/job:worker/task:1/device:GPU:0", "/device:CPU:0"], "cpu")])
def test_the_machine_is_of_the_kind_of_the_devices(monkeypatch, devices, kind):
    asked = []

    def load(machine, count, of_kind):
        asked.append((machine, count, of_kind))
        raise UsageError("seen")

    monkeypatch.setattr("pase_mtf.layout.capture.load_machine", load)
    with tf.Graph().as_default(), swap_lowering(devices=devices), pytest.raises(AssertionError):
        model_fn(devices=[""] * 4)
    assert asked == [("local", 2, kind)]


def test_blocks_nest_and_restore():
    before = mtf.Lowering.__init__
    with tf.Graph().as_default(), swap_lowering(machine="h100"):
        with capture_graph() as captured:
            model_fn()
        assert captured.found
        with tf.variable_scope("again"):
            assert isinstance(model_fn()[0], PlanLowering)
    assert mtf.Lowering.__init__ is before


def test_public_names():
    assert pase_mtf.capture_graph is capture_graph
    assert pase_mtf.swap_lowering is swap_lowering
    assert pase_mtf.find_layout is find_layout


def _in_another_thread(call):
    """What a call returns or raises there."""
    found = []

    def run():
        try:
            found.append(call())
        except BaseException as error:  # what leaves a program is none that it may catch
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(300)
    return found[0]


def _lowered():
    with tf.Graph().as_default():
        return type(model_fn()[0])


def test_other_threads_lower_as_ever():
    with tf.Graph().as_default(), swap_lowering(machine="h100"):
        assert _in_another_thread(_lowered) is mtf.Lowering
        assert isinstance(model_fn()[0], PlanLowering)
    with tf.Graph().as_default():
        with capture_graph() as captured:
            assert _in_another_thread(_lowered) is mtf.Lowering
            model_fn()
        assert captured.found


def test_programs_are_built_in_two_threads_at_once():
    """Each comes to its lowering while the other one is still building; afterwards all is as it was."""
    places = [(mtf.Lowering, "__init__"), (mtf.Variable, "__init__"), (mtf.Shape, "__init__"), (re, "sub"),
              (mtf.ops, "binary_arguments_to_tensors")]
    before, found = [getattr(*place) for place in places], {}
    building, captured = threading.Event(), threading.Event()

    def first(mesh_shape="a:4", layout=""):
        building.set()
        assert captured.wait(300)
        model_fn(mesh_shape or "a:4", layout)

    def second(mesh_shape="a:4", layout=""):
        assert building.wait(300)
        model_fn(mesh_shape or "a:4", layout)

    def find(name, program):
        found[name] = _in_another_thread(lambda: find_layout(program, 4, machine="h100"))
        captured.set()

    threads = [threading.Thread(target=find, args=(program.__name__, program)) for program in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    layouts = {name: getattr(layout, "layout_rules", layout) for name, layout in found.items()}
    assert layouts["first"] == layouts["second"]
    assert isinstance(layouts["first"], str)
    assert [getattr(*place) for place in places] == before
    assert _lowered() is mtf.Lowering


def test_what_is_tried_on_the_way_is_not_swapped():
    """An Operation class of the program's own is tried by lowering it as Mesh-TF does."""
    with tf.Graph().as_default(), swap_lowering(machine="h100") as swapped:
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        x = mtf.import_tf_tensor(mesh, tf.zeros([8, 4]), mtf.Shape([mtf.Dimension("a", 8), mtf.Dimension("b", 4)]))
        y = Doubled(x).outputs[0]
        mtf.Lowering(graph, {mesh: placement_mesh_impl.PlacementMeshImpl("all:4", "", device_names(4))})
        assert len(swapped.lowerings) == 1
        assert "a" in export_graph(graph).layers[-1].splittable
        assert y.shape == x.shape


def test_the_gpus_that_are_named_are_those_that_are_measured(monkeypatch):
    asked = []

    def load(machine, count, of_kind, over=None):
        asked.append(over and over.names)
        raise UsageError("seen")

    monkeypatch.setattr("pase_mtf.layout.capture.load_machine", load)
    monkeypatch.setattr("pase_mtf.layout.capture.gpu_names", lambda: ["T4", "A100", "A100"], raising=False)
    for devices in (["/device:GPU:1", "/gpu:2"], ["/device:GPU:0", "/gpu:1"]):
        with tf.Graph().as_default(), swap_lowering(devices=devices), pytest.raises(AssertionError):
            model_fn(devices=[""] * 4)
    assert asked == [("/device:GPU:1", "/device:GPU:2"), None]
