"""Builds a program, lowers it, trains it for a few steps and returns what came out: the one harness of all tests.

A *program* has `graph`, `mesh`, `loss` and `updates`, and may have `placeholders` (feature -> tf.Tensor) and
`global_step`: a net of tests/nets.py, a model's training step (`model_program`), a program of benchmarks/programs.
A *lowering rule* is a function of the program to an mtf.Lowering: `stock`, `planned` or `under_strategy`. What every
other rule is compared with is `stock()`: Mesh-TensorFlow's own lowering on one device.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from pase_mtf import models
from pase_mtf.compat import mtf, placement_mesh_impl, tf
from pase_mtf.export.exporter import export_graph
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.graph.configurations import Configuration
from pase_mtf.launch.arms.program import Program, build_program, variables_by_name
from pase_mtf.launch.strategies.finding import random_configurations
from pase_mtf.lowering.lowering import PlanLowering, lower
from pase_mtf.lowering.mesh_spec import MeshSpec
from pase_mtf.machine.machine import Link, Machine
from pase_mtf.runtime import Devices, session_config
from pase_mtf.strategy.find import find_strategy
from pase_mtf.strategy.strategy import Strategy, evaluate_strategy

DEVICES = 4
"""Of the gate's trainings: a TensorFlow node costs about 0.3 ms of a core, and every device has nodes of its own."""
STEPS = 2
"""The second loss shows what the first update did; `Trained.variables` shows the second."""

MACHINE = Machine("splits everything", dict.fromkeys(
    ("matmul", "convolution", "pointwise", "reduction", "gather"), 1e6), 1e7, 1e12, 1e-6,
    (Link(2, 1e8, 1e-8), Link(64, 1e7, 1e-7)))
"""So slow that even the nets of the tests are worth splitting: elsewhere their best strategy is one device."""

LoweringRule = Callable[[Any], mtf.Lowering]
Batch = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a training gave.

    Attributes:
      losses: of every step.
      outputs: the program's further outputs, of the last step.
      variables: name -> value after the last step.
      changes: name -> what the steps added to a trainable variable; with SGD a multiple of the gradients' sum.
    """

    losses: np.ndarray
    outputs: list[np.ndarray]
    variables: dict[str, np.ndarray]
    changes: dict[str, np.ndarray]


# Devices and sessions

def device_names(devices: int = DEVICES) -> list[str]:
    """Virtual devices of this process."""
    return list(Devices.first(devices, "cpu").names)


def session(devices: int = 8) -> tf.Session:
    """A session with virtual devices, set up as for training."""
    return tf.Session(config=session_config(Devices.first(devices, "cpu")))


# Rules of lowering

def stock(mesh_shape: str = "one:1", layout: str = "", autostack: bool = False) -> LoweringRule:
    """Mesh-TensorFlow's own lowering; by default on one device."""
    return lambda program: stock_lowering(program.mesh, mesh_shape, layout, autostack)


def stock_lowering(mesh: mtf.Mesh, mesh_shape: str = "one:1", layout: str = "", autostack: bool = False,
                   ) -> mtf.Lowering:
    """Mesh-TensorFlow's own lowering of a mesh's graph; by default on one device.

    Args:
      mesh: of the graph.
      mesh_shape, layout: as Mesh-TensorFlow takes them.
      autostack: whether it may merge variables (as it does unless told otherwise); then they lose their names.
    """
    shape = mtf.convert_to_shape(mesh_shape)
    return mtf.Lowering(mesh.graph, {mesh: placement_mesh_impl.PlacementMeshImpl(
        shape, mtf.convert_to_layout_rules(layout), device_names(shape.size))}, autostack)


def planned(plan_of: Callable[[mtf.Graph], Mapping[mtf.Operation, MeshSpec]], devices: int = DEVICES,
            **options: Any) -> LoweringRule:
    """Our lowering with a mesh and layout of its own for every operation."""
    return lambda program: PlanLowering(program.graph, plan_of(program.graph), device_names(devices), **options)


def under_strategy(choose: str | Callable[[ComputationGraph], Any], devices: int = DEVICES, *,
                   sharded_updates: bool = False) -> LoweringRule:
    """Export, a strategy, our lowering: the whole way that a user goes.

    Args:
      choose: "random" and a number, or a method of `find_strategy`; or a function of the exported graph to a Strategy
        or to a configuration per layer.
      devices: p.
      sharded_updates: of `export_graph`.
    """
    def rule(program: Any) -> mtf.Lowering:
        exported = export_graph(program.graph, sharded_updates=sharded_updates)
        chosen = choose(exported) if callable(choose) else find(choose, exported, devices)
        if not isinstance(chosen, Strategy):
            chosen = evaluate_strategy(exported, chosen, devices, MACHINE)
        return lower(program.graph, chosen, device_names(devices))

    return rule


def find(kind: str, graph: ComputationGraph, devices: int = DEVICES, **options: Any) -> Strategy:
    """The strategy of that kind (see `under_strategy`)."""
    if kind.startswith("random"):
        drawn = random_configurations(graph, devices, int(kind.removeprefix("random")), seed=5)
        return evaluate_strategy(graph, drawn, devices, MACHINE)
    return find_strategy(graph, devices, MACHINE, kind, **{"simulate": 0, **options})


def random_with(number: int, devices: int = DEVICES, **wanted: Configuration,
                ) -> Callable[[ComputationGraph], list[Configuration]]:
    """A strategy drawn at random, with the layers that can split the dim `wanted` names split as it says."""
    def choose(graph: ComputationGraph) -> list[Configuration]:
        drawn = list(random_configurations(graph, devices, number, 0))
        for place, layer in enumerate(graph.layers):
            for dim, configuration in wanted.items():
                if dim in layer.splittable and layer.dims[dim] % configuration.shards(dim) == 0:
                    drawn[place] = configuration
        return drawn

    return choose


def some_slow(gate: Sequence[Any], slow: Sequence[Any]) -> list[Any]:
    """Values for pytest's parametrize of which the second ones are not part of the gate."""
    return [*gate, *(pytest.param(*value, marks=pytest.mark.slow) if isinstance(value, tuple) else
                     pytest.param(value, marks=pytest.mark.slow) for value in slow)]


def presets(name: str) -> list[Any]:
    """The sizes of a model for pytest's parametrize; only the smallest is part of the gate."""
    return some_slow(["tiny"], [preset for preset in models.presets(name) if preset != "tiny"])


# Running

def evaluate(lowering: mtf.Lowering, tensors: Sequence[mtf.Tensor], feed: Mapping[tf.Tensor, Any] | None = None, *,
             values: Mapping[str, np.ndarray] | None = None, also: Any = ()) -> Any:
    """The values of Mesh-TF tensors under a lowering.

    Args:
      lowering: of their graph.
      tensors: to evaluate.
      feed: as of session.run.
      values: variable name -> initial value, where it is not the initializer's.
      also: TensorFlow tensors to evaluate with them; then (values of tensors, values of these) is returned.
    """
    wanted = [lowering.export_to_tf_tensor(tensor) for tensor in tensors]
    fill = lowering.copy_masters_to_slices()
    with session() as run:
        _initialize(run, lowering.graph, values or {})
        run.run(fill)
        found, others = run.run([wanted, also], feed)
    return (found, others) if also else found


def train(program: Any, lowering: mtf.Lowering, batches: Iterable[Batch], *,
          outputs: Sequence[mtf.Tensor] = (), values: Mapping[str, np.ndarray] | None = None) -> Trained:
    """Trains a lowered program, one step per batch.

    Args:
      program: of the current tf.Graph.
      lowering: of the program.
      batches: feature -> value, per step.
      outputs: tensors to evaluate with the loss.
      values: variable name -> initial value, where it is not the initializer's.
    """
    wanted = [lowering.export_to_tf_tensor(tensor) for tensor in (program.loss, *outputs)]
    update = tf.group([lowering.lowered_operation(operation) for operation in program.updates])
    read_before_updating(lowering, [*(tensor.op for tensor in wanted), update])
    fill, collect = lowering.copy_masters_to_slices(), lowering.copy_slices_to_masters()
    masters = {variable.name: variable.get_master() for variable in program.graph.all_variables}
    global_step = getattr(program, "global_step", None)
    advance = tf.no_op() if global_step is None else tf.assign_add(global_step, 1)
    found = []
    with session() as run:
        _initialize(run, program.graph, values or {})
        before = run.run(masters)
        run.run(fill)
        for batch in batches:
            feed = {program.placeholders[name]: value for name, value in batch.items()}
            found.append(run.run([wanted, update], feed)[0])
            run.run(advance)
        run.run(collect)
        variables = run.run(masters)
    changes = {variable.name: variables[variable.name] - before[variable.name]
               for variable in program.graph.trainable_variables}
    return Trained(np.asarray([values[0] for values in found]), found[-1][1:], variables, changes)


def _initialize(run: tf.Session, graph: mtf.Graph, values: Mapping[str, np.ndarray]) -> None:
    run.run(tf.global_variables_initializer())
    # All in one go: every run of other nodes takes a look through the whole graph.
    set_by = {variable.get_master().initializer: values[variable.name]
              for variable in graph.all_variables if variable.name in values}
    run.run(list(set_by), {initializer.inputs[1]: value for initializer, value in set_by.items()})


def read_before_updating(lowering: mtf.Lowering, fetches: Iterable[tf.Operation]) -> None:
    """Orders what stock Mesh-TF leaves open: it reads a variable at every use, before or after its update."""
    if isinstance(lowering, PlanLowering):
        return
    readers, updates = collections.defaultdict(list), []
    for operation in _closure(fetches, lambda operation: (
            *(tensor.op for tensor in operation.inputs), *operation.control_inputs)):
        if operation.type.startswith("Assign") and operation.type.endswith("VariableOp"):
            updates.append(operation)
        else:  # a loop reads the variables that are handed to it
            for tensor in operation.inputs:
                if tensor.dtype == tf.resource:
                    readers[tensor.op].append(operation)
    for update in updates:
        after = _closure([update], lambda operation: (
            *operation._control_outputs, *(user for output in operation.outputs for user in output.consumers())))
        update._add_control_inputs([reader for reader in readers[update.inputs[0].op] if reader not in after])


def _closure(start: Iterable[tf.Operation], following: Callable[[tf.Operation], Iterable[tf.Operation]],
             ) -> set[tf.Operation]:
    found = set(start)
    stack = list(found)
    while stack:
        for other in following(stack.pop()):
            if other not in found:
                found.add(other)
                stack.append(other)
    return found


# Models

def model_program(name: str, config: Any, optimizer: str = "sgd") -> Program:
    """A model's training step, in the current tf.Graph."""
    return build_program(models.get(name), config, config.batch, optimizer, config.learning_rate, seed=3)


def export_model(name: str, config: Any) -> ComputationGraph:
    """The computation graph of a model's training step."""
    with tf.Graph().as_default(), variables_by_name():
        return export_graph(model_program(name, config).graph, name=name)


def _model_loss(name: str, config: Any) -> tuple[dict[str, tf.Tensor], mtf.Mesh, mtf.Tensor]:
    """Placeholders, mesh and loss of a model, without what trains it."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    placeholders, features = models.placeholders(mesh, models.get(name).features(config, config.batch))
    return placeholders, mesh, models.get(name).loss(mesh, features, config)


def model_variables(name: str, config: Any) -> dict[str, list[int]]:
    """The shapes of a model's trainable variables, by name."""
    with tf.Graph().as_default(), variables_by_name():
        _, mesh, _ = _model_loss(name, config)
        return {variable.name: variable.shape.to_integer_list for variable in mesh.graph.trainable_variables}


def parameters(name: str, config: Any) -> int:
    """How many trainable numbers a model has."""
    return sum(math.prod(shape) for shape in model_variables(name, config).values())


def model_batches(name: str, config: Any) -> Iterator[dict[str, Any]]:
    """Random batches of a model, without end: pictures and labels, or words with padding behind some sentences."""
    generator = np.random.default_rng(0)
    features = models.get(name).features(config, config.batch)
    for step in range(1, 1000):
        batch: dict[str, Any] = {}
        for key, (shape, dtype) in features.items():
            if key == "step":
                batch[key] = step
            elif not dtype.is_integer:
                batch[key] = generator.standard_normal(shape.to_integer_list)
            elif key == "labels":
                batch[key] = generator.integers(config.classes, size=shape.to_integer_list)
            else:
                batch[key] = generator.integers(1, config.vocab, shape.to_integer_list)
                if "target" in features:  # sentences: every row has another length, its translation yet another
                    for row, line in enumerate(batch[key]):
                        line[config.length - (row + (key == "source")) % (config.length // 2 + 1):] = 0
        yield batch


def random_values(graph: mtf.Graph) -> dict[str, np.ndarray]:
    """Initial values of all trainable variables: zeros and ones would hide what they multiply or are added to."""
    generator = np.random.default_rng(1)
    return {variable.name: generator.normal(0.1, 0.3, variable.shape.to_integer_list)
            for variable in graph.trainable_variables}


def train_model(name: str, config: Any, rule: LoweringRule, optimizer: str = "sgd", steps: int = STEPS,
                batches: Iterable[Batch] | None = None) -> Trained:
    """Trains a model from random values of all variables, on the first of its random batches or on those given."""
    with tf.Graph().as_default():
        program = model_program(name, config, optimizer)
        chosen = itertools.islice(model_batches(name, config), steps) if batches is None else batches
        return train(program, rule(program), chosen, values=random_values(program.graph))


def losses_of_one_batch(name: str, config: Any) -> list[float]:
    """The losses of two steps with one batch and no learning: only dropout can make them differ."""
    batch = next(model_batches(name, config))
    still = dataclasses.replace(config, learning_rate=1e-30)
    batches = [{**batch, "step": step} for step in (1, 2)]
    return train_model(name, still, stock(), batches=batches).losses.tolist()


@functools.cache
def one_device(name: str, config: Any, optimizer: str = "sgd", steps: int = STEPS) -> Trained:
    """What stock Mesh-TensorFlow makes of `train_model` on one device; computed once in a process."""
    return train_model(name, config, stock(), optimizer, steps)


def against_plain(name: str, config: Any, reference: Callable[[Mapping, Mapping, Any], tf.Tensor],
                  ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Loss and gradients by the variable's name, of a model on one device and of a plain TensorFlow formulation.

    Args:
      name: of the model.
      config: its sizes.
      reference: `reference(features, variables by name, config)`, the loss in plain TensorFlow.
    """
    with tf.Graph().as_default():
        placeholders, mesh, loss = _model_loss(name, config)
        variables = mesh.graph.trainable_variables
        masters = {variable.name: variable.get_master() for variable in variables}
        gradients = mtf.gradients([loss], [variable.outputs[0] for variable in variables])
        plain = reference(placeholders, masters, config)
        batch = next(model_batches(name, config))
        found, wanted = evaluate(
            stock_lowering(mesh), [loss, *gradients], {placeholders[key]: value for key, value in batch.items()},
            values=random_values(mesh.graph), also=[plain, *tf.gradients(plain, list(masters.values()))])
    names = ["loss", *masters]
    return dict(zip(names, found, strict=True)), dict(zip(names, map(_dense, wanted), strict=True))


def _dense(value: Any) -> np.ndarray:
    """tf.gather's gradient is a list of rows."""
    if not hasattr(value, "indices"):
        return np.asarray(value)
    result = np.zeros(value.dense_shape)
    np.add.at(result, value.indices, value.values)
    return result


# Comparing

def assert_same(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray], tolerance: float = 1e-9) -> None:
    """Asserts that two sets of named values agree, by the largest of each, and that none is zero throughout."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        largest = np.abs(value).max()
        assert largest > 0, f"{name}: it is zero, which shows nothing"
        np.testing.assert_allclose(found[name], value, rtol=tolerance, atol=tolerance * largest, err_msg=name)


def assert_trains_as_one_device(name: str, config: Any, rule: LoweringRule, optimizer: str = "sgd",
                                steps: int = STEPS) -> None:
    """Asserts that a model in double precision trains under a lowering as it does on one device."""
    found, wanted = train_model(name, config, rule, optimizer, steps), one_device(name, config, optimizer, steps)
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=1e-8)
    assert len(set(wanted.losses.tolist())) == steps, "an update that changes no loss shows nothing"
    # Adam and Adafactor magnify rounding where the gradient is next to nothing.
    assert_same(found.variables, wanted.variables, 1e-7)
    if optimizer == "sgd":
        assert_same(found.changes, wanted.changes, 1e-6)
