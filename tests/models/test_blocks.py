"""What is computed again in the backward pass trains as what is kept."""

import dataclasses
import itertools
import json

import harness
import numpy as np
import pytest
from micro_models import SIZES

from pase_mtf import models
from pase_mtf.compat import tf
from pase_mtf.cost.memory import strategy_memory
from pase_mtf.errors import UsageError
from pase_mtf.export.exporter import export_graph
from pase_mtf.graph.configurations import Configuration
from pase_mtf.launch.arms.memory import peak_bytes_per_device, variable_bytes_per_device
from pase_mtf.launch.arms.program import build_program, variables_by_name
from pase_mtf.models.blocks import ALL, blocks_of, choices_of, sets_of


def _config(name, tmp_path, **changes):
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps({**SIZES[name], "preset": "tiny"}))
    return dataclasses.replace(models.load_config(name, str(path), dtype="float64"), **changes)


def _program(name, config, recompute=(), microbatches=1):
    return build_program(models.get(name), config, config.batch, "sgd", config.learning_rate, 3, microbatches,
                         recompute)


def _trained(name, config, rule, recompute, microbatches=1):
    with tf.Graph().as_default():
        program = _program(name, config, recompute, microbatches)
        return harness.train(program, rule(program),
                             itertools.islice(harness.model_batches(name, config), harness.STEPS),
                             values=harness.random_values(program.graph))


@pytest.mark.parametrize(("name", "kind"), harness.some_slow(
    [("resnet101", "random0")],
    list(zip(SIZES, itertools.cycle(("random1", "exact"))))))
def test_losses_and_variables_are_those_without(name, kind, tmp_path):
    """On one device without, under a strategy of its own with; dropout draws the same masks again."""
    config = _config(name, tmp_path, dropout=0.0 if models.get(name).batch_statistics else 0.3)
    wanted = harness.one_device(name, config)
    found = _trained(name, config, harness.under_strategy(kind), (ALL,))
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=1e-9)
    harness.assert_same(found.changes, wanted.changes, 1e-6)


@pytest.mark.slow
def test_in_microbatches(tmp_path):
    config = _config("transformer", tmp_path)
    wanted = harness.one_device("transformer", config)
    found = _trained("transformer", config, harness.under_strategy("exact"), ("encoder1",), 2)
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=1e-9)
    harness.assert_same(found.changes, wanted.changes, 1e-6)


@pytest.mark.parametrize("name", models.names())
def test_every_model_has_blocks_and_less_is_there(name):
    """Whatever is computed again is paid again, and layers and variables are the same."""
    config = models.load_config(name, "tiny")
    found = []
    for again in ((), (ALL,)):
        with tf.Graph().as_default(), variables_by_name():
            program = _program(name, config, again)
            found.append((export_graph(program.graph), blocks_of(program.graph)))
    (kept, blocks), (recomputed, same) = found
    assert blocks == same != ()
    assert recomputed.flops > kept.flops
    assert recomputed.parameters == kept.parameters
    before, after = (strategy_memory(graph, [Configuration()] * len(graph.layers))["activations"]
                     for graph in (kept, recomputed))
    assert after < 0.9 * before


def test_each_block_by_itself(tmp_path):
    config = _config("densenet121", tmp_path)
    flops = []
    for again in ((), ("block1_layer1",), ("block1_layer1", "block2_layer2"), (ALL,)):
        with tf.Graph().as_default(), variables_by_name():
            flops.append(export_graph(_program("densenet121", config, again).graph).flops)
    assert flops == sorted(set(flops))


@pytest.mark.slow
def test_what_tensorflow_holds_is_less_as_predicted():
    """Of layers whose activations are most of what a step holds."""
    config = dataclasses.replace(models.load_config("transformer", "tiny"), layers=3, vocab=64, batch=16, dropout=0.0)
    batch, measured, predicted = next(harness.model_batches("transformer", config)), [], []
    for again in ((), (ALL,)):
        with tf.Graph().as_default() as made:
            program = _program("transformer", config, again)
            exported = export_graph(program.graph)
            predicted.append(sum(strategy_memory(exported, [Configuration()] * len(exported.layers)).values()))
            lowering = harness.stock()(program)
            updates = [lowering.lowered_operation(operation) for operation in program.updates]
            fill = lowering.copy_masters_to_slices()
            held = variable_bytes_per_device(made, updates)
            with harness.session(1) as session:
                session.run(tf.global_variables_initializer())
                session.run(fill)
                feed = {placeholder: batch[key] for key, placeholder in program.placeholders.items()}
                peaks = []
                for _ in range(5):  # what runs beside what differs from step to step
                    metadata = tf.RunMetadata()
                    session.run(updates, feed, tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), metadata)
                    peaks.append(max(peak_bytes_per_device(metadata, held).values()))
                measured.append(max(peaks))
    assert measured[1] < 0.8 * measured[0]
    assert measured[0] - measured[1] == pytest.approx(predicted[0] - predicted[1], rel=0.4)


def test_names_that_no_block_has_are_refused(tmp_path):
    with tf.Graph().as_default(), pytest.raises(UsageError, match=r"recompute=encoder2: transformer has no such block; "
                                                                  r"did you mean.*encoder1"):
        _program("transformer", _config("transformer", tmp_path), ("encoder2",))


def test_sets_that_are_offered():
    few = ("encoder1", "encoder2", "decoder")
    assert choices_of(few) == (("encoder1",), ("encoder2",), ("decoder",))
    assert len(sets_of(choices_of(few))) == 8
    many = (*(f"encoder{number}" for number in range(1, 5)), *(f"decoder{number}" for number in range(1, 4)))
    assert choices_of(many) == (many[:4], many[4:])
    assert len(sets_of(choices_of(many))) == 5 * 4
    assert sets_of(choices_of(many))[-1] == many
    assert ("encoder1", "encoder2", "decoder1") in sets_of(choices_of(many))
