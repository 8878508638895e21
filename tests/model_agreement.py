"""Loss and gradients of a model, all ways round: plain TensorFlow, one device, and any strategy on eight."""

import dataclasses

import numpy as np

from pase_mtf import models
from pase_mtf.compat import mtf, placement_mesh_impl, tf
from pase_mtf.export.exporter import export_graph
from pase_mtf.graph.configurations import Configuration
from pase_mtf.launch.program import build_program
from pase_mtf.launch.strategies import random_configurations
from pase_mtf.lowering.lowering import PlanLowering, plan_from_configurations
from pase_mtf.machine.machine import Machine
from pase_mtf.strategy.experts import data_parallel, expert
from pase_mtf.strategy.find import find_strategy

DEVICES = 8


def _session():
    options = tf.ConfigProto(device_count={"CPU": DEVICES})
    options.graph_options.rewrite_options.disable_meta_optimizer = True
    return tf.Session(config=options)


def loss_and_gradients(name, config, feed, *, strategy=None, reference=None):
    """What a model computes, by variable, from random values of all variables.

    Args:
      name: of the model.
      config: its sizes.
      feed: feature -> array.
      strategy: function of the exported graph to a configuration per layer; None: one device, stock Mesh-TF.
      reference: function (features, variables by name, config) -> loss, in plain TensorFlow; computed instead.

    Returns:
      {"loss": ..., variable name: its gradient}.
    """
    model = models.get(name)
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        fed, features = models.placeholders(mesh, model.features(config, config.batch))
        loss = model.loss(mesh, features, config)
        variables = graph.trainable_variables
        names = [variable.name for variable in variables]
        gradients = mtf.gradients([loss], [variable.outputs[0] for variable in variables])
        masters = {variable.name: variable.get_master() for variable in variables}
        fill = []
        if reference:
            total = reference(fed, masters, config)
            wanted = [total, *tf.gradients(total, list(masters.values()))]
        else:
            if strategy is None:
                one = placement_mesh_impl.PlacementMeshImpl("one:1", "", ["/device:CPU:0"])
                lowering = mtf.Lowering(graph, {mesh: one}, autostack=False)
            else:
                exported = export_graph(graph, name=name)
                plan = plan_from_configurations(graph, exported, strategy(exported), DEVICES)
                lowering = PlanLowering(graph, plan, [f"/device:CPU:{number}" for number in range(DEVICES)])
            wanted = [lowering.export_to_tf_tensor(tensor) for tensor in (loss, *gradients)]
            fill = [lowering.copy_masters_to_slices()]
        # Zeros and ones would hide what multiplies or adds them.
        generator = np.random.default_rng(1)
        assigned = [master.assign(generator.normal(0.1, 0.3, master.shape)) for master in masters.values()]
        with _session() as session:
            session.run(tf.global_variables_initializer())
            session.run(assigned)
            session.run(fill)
            values = session.run(wanted, {fed[key]: value for key, value in feed.items()})
    return dict(zip(["loss", *names], map(_dense, values), strict=True))


def _dense(value):
    """tf.gather's gradient is a list of rows."""
    if not hasattr(value, "indices"):
        return np.asarray(value)
    result = np.zeros(value.dense_shape)
    np.add.at(result, value.indices, value.values)
    return result


def assert_same(found, wanted, tolerance=1e-10):
    """The same loss and the same gradient of every variable."""
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        np.testing.assert_allclose(found[key], value, rtol=tolerance, atol=tolerance * np.abs(value).max(), err_msg=key)
        assert np.abs(value).max() > 0, f"{key}: a gradient of zeros compares nothing"


def random_strategy(number, **wanted):
    """A strategy drawn at random: a function for `loss_and_gradients`.

    Args:
      number: of the strategy.
      **wanted: dim -> the Configuration of every layer that can split that dim so, whatever is drawn.
    """
    def choose(graph):
        drawn = list(random_configurations(graph, DEVICES, number, 0))
        for place, layer in enumerate(graph.layers):
            for dim, configuration in wanted.items():
                if dim in layer.splittable and layer.dims[dim] % configuration.parts(dim) == 0:
                    drawn[place] = configuration
        return drawn
    return choose


STRATEGIES = {
    "searched": lambda graph: find_strategy(graph, DEVICES, Machine.load("1080ti")).configurations,
    "data parallel": lambda graph: data_parallel(graph, DEVICES),
    "expert": lambda graph: expert(graph, DEVICES),
    "random 0": random_strategy(0),
    "random 1": random_strategy(1),
    "pipeline": random_strategy(2, layers=Configuration((("layers", 2), ("batch", 4))),
                                directions=Configuration((("batch", 2), ("directions", 2), ("units", 2)))),
    "pipeline, units": random_strategy(3, layers=Configuration((("units", 2), ("layers", 2), ("inputs", 2))),
                                       directions=Configuration((("directions", 2), ("units", 2), ("inputs", 2)))),
}
"""Name -> function of the exported graph to a configuration per layer, for a recurrent model."""


def exported(name, preset, **changes):
    """(the computation graph of a model's training step, its configuration)."""
    config = dataclasses.replace(models.load_config(name, preset), **changes)
    with tf.Graph().as_default():
        program = build_program(models.get(name), config, config.batch, config.optimizer, 0.1, seed=0)
        return export_graph(program.graph, name=name), config
