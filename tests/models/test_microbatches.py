"""A batch computed in microbatches trains as the whole batch does."""

import dataclasses
import itertools
import json

import harness
import numpy as np
import pytest
from micro_models import SIZES

from pase_mtf import models
from pase_mtf.compat import tf
from pase_mtf.errors import UsageError
from pase_mtf.export.exporter import export_graph
from pase_mtf.launch.arms.program import build_program, variables_by_name
from pase_mtf.models.checks import divisors


def _config(name, tmp_path, **changes):
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps({**SIZES[name], "preset": "tiny"}))
    return dataclasses.replace(models.load_config(name, str(path), dtype="float64"), **{"dropout": 0.0, **changes})


def _program(name, config, count, optimizer="sgd"):
    return build_program(models.get(name), config, config.batch, optimizer, config.learning_rate, 3, count)


@pytest.mark.parametrize(("name", "count", "kind"), harness.some_slow(
    [("transformer", 2, "random1")],
    [("transformer", 4, "exact"), ("gnmt", 2, "exact"), ("gnmt", 4, "random0"), ("biglstm", 8, "exact"),
     ("alexnet", 2, "random0"), ("alexnet", 8, "exact")]))
def test_losses_and_variables_are_those_of_the_whole_batch(name, count, kind, tmp_path):
    """Sentences are padded to different degrees, so that a mean of means would be another loss."""
    config = _config(name, tmp_path)
    with tf.Graph().as_default():
        program = _program(name, config, count)
        found = harness.train(program, harness.under_strategy(kind)(program),
                              itertools.islice(harness.model_batches(name, config), harness.STEPS),
                              values=harness.random_values(program.graph))
    wanted = harness.one_device(name, config)
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=1e-9)
    harness.assert_same(found.changes, wanted.changes, 1e-6)


@pytest.mark.slow
def test_every_microbatch_has_a_mask_of_its_own(tmp_path):
    """Of dropout: the same examples in both microbatches give other losses than each of them alone."""
    config = _config("transformer", tmp_path, dropout=0.5, learning_rate=1e-30)
    batch = next(harness.model_batches("transformer", config))
    doubled = {name: value if name == "step" else np.repeat(value[::2], 2, axis=0) for name, value in batch.items()}

    def loss(step):
        with tf.Graph().as_default():
            program = _program("transformer", config, 2)
            return harness.train(program, harness.stock()(program), [{**doubled, "step": step}],
                                 values=harness.random_values(program.graph)).losses[0]

    def alone(step):
        half = dataclasses.replace(config, batch=config.batch // 2)
        with tf.Graph().as_default():
            program = _program("transformer", half, 1)
            fed = {name: value if name == "step" else value[::2] for name, value in batch.items()}
            return harness.train(program, harness.stock()(program), [{**fed, "step": step}],
                                 values=harness.random_values(program.graph)).losses[0]

    first, second = alone(14), alone(15)
    assert first != second
    np.testing.assert_allclose(loss(7), (first + second) / 2, rtol=1e-9)


def test_activations_of_one_piece_count(tmp_path):
    config = _config("transformer", tmp_path)
    with tf.Graph().as_default(), variables_by_name():
        whole = export_graph(_program("transformer", config, 1).graph)
    with tf.Graph().as_default(), variables_by_name():
        pieces = export_graph(_program("transformer", config, 4).graph)
    least = [harness.find("exact", graph, 1).memory["activations"] for graph in (whole, pieces)]
    assert least[1] < 0.5 * least[0]


@pytest.mark.parametrize(("name", "count", "message"), [
    ("alexnet", 3, r"microbatches=3: a batch of 8 does not split so; take 2"),
    ("alexnet", 16, r"microbatches=16: .* take 8"),
    ("resnet101", 2, r"resnet101 normalises over the batch")])
def test_what_does_not_add_up_is_refused(name, count, message, tmp_path):
    with tf.Graph().as_default(), pytest.raises(UsageError, match=message):
        _program(name, _config(name, tmp_path), count)


def test_divisors():
    for size in range(1, 100):
        for most in (1, 7, size - 1, size, size + 1):
            assert divisors(size, most) == [number for number in range(1, most + 1) if size % number == 0]
    assert divisors(2 ** 31 - 2, 2 ** 31 - 3)[-2:] == [715827882, 1073741823]  # as fast as it is needed


@pytest.mark.parametrize("name", models.names())
def test_models_that_normalise_over_the_batch_say_so(name, tmp_path):
    with tf.Graph().as_default(), variables_by_name():
        program = _program(name, _config(name, tmp_path), 1)
    centred = any(operation.name.rsplit("/", 1)[-1].startswith("center") for operation in program.graph.operations)
    assert models.get(name).batch_statistics == centred
