"""Programs of the mesh-tensorflow package as they are: exported completely, and trained as one device trains them."""

import collections
import itertools

import numpy as np
import pytest
from harness import under_strategy
from programs import training

from benchmarks import programs
from pase_mtf.compat import mtf
from pase_mtf.export.exporter import export_graph
from pase_mtf.export.phases import phases_of
from pase_mtf.launch.strategies.finding import random_configurations
from pase_mtf.machine.machine import Machine
from pase_mtf.operations.facts import read_operations
from pase_mtf.strategy.find import find_strategy
from pase_mtf.strategy.strategy import evaluate_strategy

MACHINE = Machine.load("2080ti")


def _check_export(graph):
    exported = export_graph(graph)
    counts = collections.Counter(operation.index for layer in exported.layers for operation in layer.operations
                                 if operation.type != "Assign")
    assert counts == {index: 1 for index, operation in enumerate(graph.operations)
                      if not isinstance(operation, mtf.Assign)}
    assert {operation.index for layer in exported.layers for operation in layer.operations} == set(
        range(len(graph.operations)))
    assert exported.parameters == sum(variable.size for variable in graph.trainable_variables)
    for layer in exported.layers:
        for operation in layer.operations:
            assert (operation.phase == "backward") >= ("/gradients/" in operation.name)
            assert (operation.phase == "update") >= (operation.type == "Assign")
    return exported


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_every_operation_is_exported_once(name):
    with training.built(name) as program:
        exported = _check_export(program.graph)
        assert exported.edges
        # What costs most can be split.
        work = sum(operation.flops for layer in exported.layers if not layer.splittable
                   for operation in layer.operations)
        assert work < 0.02 * exported.flops


@pytest.mark.slow
def test_a_graph_of_two_thousand_forward_operations_is_exported():
    with training.built("lm", "full") as program:
        assert phases_of(program.graph, read_operations(program.graph)).count("forward") > 2000
        assert len(_check_export(program.graph).layers) < 500


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_batches_repeat_and_fit_their_placeholders(name):
    with training.built(name) as program:
        one, other = (list(itertools.islice(program.batches(), 2)) for _ in range(2))
        for batch, same in zip(one, other, strict=True):
            assert batch.keys() == program.placeholders.keys()
            for key, placeholder in program.placeholders.items():
                assert list(batch[key].shape) == placeholder.shape.as_list()
                np.testing.assert_array_equal(batch[key], same[key])


def _strategy(kind, graph):
    if kind == "exact":
        return find_strategy(graph, training.DEVICES, MACHINE, simulate=0)
    return evaluate_strategy(graph, random_configurations(graph, training.DEVICES, int(kind), seed=5),
                             training.DEVICES, MACHINE)


@pytest.mark.parametrize(("name", "kind"), [
    *(pytest.param(name, kind, marks=pytest.mark.slow) for name, kind in (
        ("bert", "exact"), ("bert_moe", "0"), ("lm", "0"), ("translation", "0"), ("lm_moe", "exact"),
        ("unet_2d", "exact"), ("unet_3d", "0"))),
    ("digits", "0"), ("toy", "0")])
def test_strategies_train_as_one_device_does(name, kind):
    losses = training.losses_of(name, under_strategy(lambda graph: _strategy(kind, graph), training.DEVICES))
    np.testing.assert_allclose(losses, training.one_device(name), rtol=training.TOLERANCE)
    assert len(set(losses)) == training.STEPS
