"""A strategy never changes the mathematics: model, export, strategy, lowering, training, against one device."""

import dataclasses

import numpy as np
import pytest

from pase_mtf import models
from pase_mtf.compat import mtf, placement_mesh_impl, tf
from pase_mtf.errors import MismatchError
from pase_mtf.export.exporter import export_graph
from pase_mtf.launch.program import build_program
from pase_mtf.launch.strategies import random_configurations
from pase_mtf.lowering.lowering import lower
from pase_mtf.machine.machine import Machine
from pase_mtf.strategy.find import find_strategy
from pase_mtf.strategy.strategy import evaluate_strategy

DEVICES = 8
STEPS = 3

_BATCH = 8


def _config(name, **changes):
    """Small, and in double precision: what differs is wrong, not rounded."""
    config = models.load_config(name, "tiny")
    if name == "transformer":
        sizes = {"layers": 1, "d_model": 16, "heads": 8, "d_k": 8, "d_ff": 32, "length": 8, "vocab": 64}
    else:
        narrow = tuple(dataclasses.replace(layer, channels=8 * number)
                       for number, layer in enumerate(config.convolutions, start=1))
        sizes = {"fully_connected": (64, 32), "convolutions": narrow}
    return dataclasses.replace(config, **{"dtype": "float64", **sizes, **changes})


def _batches(placeholders, vocabulary):
    rng = np.random.default_rng(1)
    for step in range(STEPS):
        batch = {}
        for name, tensor in placeholders.items():
            shape = tensor.shape.as_list()
            if name == "step":
                batch[tensor] = step
            elif tensor.dtype.is_integer:
                batch[tensor] = rng.integers(1, vocabulary, shape)
            else:
                batch[tensor] = rng.standard_normal(shape)
        yield batch


def _train(name, config, optimizer, strategy_of=None):
    """Losses of a few steps and the variables after them; strategy_of(graph) -> strategy, None: stock, one device."""
    with tf.Graph().as_default():
        program = build_program(models.get(name), config, _BATCH, optimizer, 0.001, seed=3)
        if strategy_of is None:
            implementation = placement_mesh_impl.PlacementMeshImpl(
                mtf.convert_to_shape("all:1"), mtf.convert_to_layout_rules(""), ["/device:CPU:0"])
            lowering = mtf.Lowering(program.graph, {program.mesh: implementation}, autostack=False)
        else:
            strategy = strategy_of(export_graph(program.graph, name=name))
            lowering = lower(program.graph, strategy, [f"/device:CPU:{number}" for number in range(DEVICES)])
        loss = lowering.export_to_tf_tensor(program.loss)
        updates = [lowering.lowered_operation(update) for update in program.updates]
        back = lowering.copy_slices_to_masters()
        start = tf.global_variables_initializer()
        fill = lowering.copy_masters_to_slices()
        settings = tf.ConfigProto(device_count={"CPU": DEVICES})
        settings.graph_options.rewrite_options.disable_meta_optimizer = True
        with tf.Session(config=settings) as session:
            session.run(start)
            session.run(fill)
            losses = [session.run([loss, updates], batch)[0]
                      for batch in _batches(program.placeholders, getattr(config, "vocab", 10))]
            session.run(back)
            variables = session.run({variable.name: variable.get_master() for variable in program.graph.all_variables})
    return np.array(losses), variables


@pytest.fixture(scope="module")
def one_device():
    found = {}

    def get(name, optimizer):
        if (name, optimizer) not in found:
            found[name, optimizer] = _train(name, _config(name), optimizer)
        return found[name, optimizer]

    return get


def _choose(kind):
    machine = Machine.load("2080ti")
    if kind.startswith("random"):
        return lambda graph: evaluate_strategy(
            graph, random_configurations(graph, DEVICES, int(kind.removeprefix("random")), seed=5), DEVICES, machine)
    if kind == "idle":
        return lambda graph: find_strategy(graph, DEVICES, machine, idle=True)
    return lambda graph: find_strategy(graph, DEVICES, machine, kind)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "optimizer"), [("transformer", "adam"), ("transformer", "adafactor"),
                                                 ("alexnet", "sgd"), ("alexnet", "adam")])
@pytest.mark.parametrize("kind", ["data_parallel", "expert", "exact", "random0", "random3"])
def test_same_losses_and_variables_as_one_device(name, optimizer, kind, one_device):
    losses, variables = one_device(name, optimizer)
    got_losses, got_variables = _train(name, _config(name), optimizer, _choose(kind))
    np.testing.assert_allclose(got_losses, losses, rtol=1e-8)  # Adam magnifies rounding
    assert losses[0] != losses[-1]
    assert got_variables.keys() == variables.keys()
    for key, value in variables.items():
        np.testing.assert_allclose(got_variables[key], value, rtol=1e-7, atol=1e-7, err_msg=key)


def test_dropout_draws_the_same_mask_under_every_strategy():
    config = _config("transformer", dropout=0.3)
    losses, _ = _train("transformer", config, "sgd")
    plain, _ = _train("transformer", _config("transformer"), "sgd")
    assert abs(losses[0] - plain[0]) > 1e-3
    for kind in ("data_parallel", "random0"):
        np.testing.assert_allclose(_train("transformer", config, "sgd", _choose(kind))[0], losses, rtol=1e-9)


def test_a_strategy_for_another_graph_is_refused():
    with tf.Graph().as_default():
        program = build_program(models.get("transformer"), _config("transformer"), 8, "sgd", 0.1, seed=1)
        strategy = find_strategy(export_graph(program.graph), DEVICES, "1080ti")
    with tf.Graph().as_default():
        other = build_program(models.get("transformer"), _config("transformer"), 8, "adam", 0.1, seed=1)
        with pytest.raises(MismatchError, match="search again"):
            lower(other.graph, strategy, [f"/device:CPU:{number}" for number in range(DEVICES)])
