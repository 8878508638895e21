"""Gradients of tables: devices give each other the rows that they looked up, and train as one device does."""

import collections
import dataclasses
import json

import harness
import nets
import numpy as np
import pytest
from micro_models import SIZES

from pase_mtf import models
from pase_mtf.compat import mtf, tf
from pase_mtf.export.exporter import export_graph
from pase_mtf.graph.configurations import Configuration
from pase_mtf.graph.looked_up import LookedUp, summed_as_rows
from pase_mtf.graph.partition import Partition
from pase_mtf.launch.strategies.finding import random_configurations
from pase_mtf.lowering import summed_rows
from pase_mtf.lowering.lowering import PlanLowering
from pase_mtf.lowering.plans import plan_from_configurations, uniform_plan, updates_from_configurations
from pase_mtf.lowering.summed_rows import SumOfRows

_TABLES = {"alone", "twice", "across"}

# A layout on four devices -> of which tables rows travel. Parts of the other are added up as they are: what is added to
# them is all of a table, and adding comes first. The rows of two gathers are more than two parts of half a table.
_LAYOUTS = [("a:4", "batch:a", _TABLES), ("a:2;b:2", "batch:a;words:b", _TABLES - {"twice"}),
            ("a:2;b:2", "words:a;batch:b", _TABLES - {"twice"}), ("a:2;b:2", "batch:a;length:b", _TABLES),
            ("a:2;b:2", "model:a;batch:b", _TABLES), ("a:2;b:2", "length:b;words:a", _TABLES - {"twice"}),
            ("a:4", "words:a", set()), ("a:4", "model:a", set())]


def _lowered(net, mesh, layout):
    devices = harness.device_names(4)
    return PlanLowering(net.graph, uniform_plan(net.graph, mesh, layout, devices), devices, shared_memory=False)


@pytest.fixture
def summed(monkeypatch):
    """The sums that are made of rows, in order: shapes."""
    found, make = [], SumOfRows._summed
    monkeypatch.setattr(SumOfRows, "_summed", lambda self: found.append(tuple(
        self.shape.dimension_names)) or make(self))
    return found


def _same(found, wanted):
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=1e-9)
    harness.assert_same(found.variables, wanted.variables)


@pytest.mark.parametrize(("mesh", "layout", "tables"), _LAYOUTS)
def test_rows_make_the_gradient_that_one_device_makes(mesh, layout, tables, summed):
    found = nets.train_net("embeddings", "sgd", tf.float64, lambda net: _lowered(net, mesh, layout))
    _same(found, nets.one_device("embeddings", "sgd", tf.float64))
    expected = {"alone": ("words", "model"), "twice": ("words", "model"), "across": ("model", "words")}
    assert collections.Counter(summed) == collections.Counter(expected[name] for name in tables)


def _wrong_rows(self, term, tensor, laid_out, right=SumOfRows._gathered):
    """The rows of one device are those of another."""
    made = list(right(self, term, tensor, laid_out))
    return made if tensor is term.found.indices else [made[0], *([tf.zeros_like(made[0])] * (len(made) - 1))]


def _wrong_places(sums, depth, emitter, right=summed_rows._adding):
    """Whatever a device holds of a table begins at the first position."""
    add = right(sums, depth, emitter)
    return lambda device, indices, rows, begin: add(device, indices, rows, 0)


@pytest.mark.parametrize(("owner", "name", "wrong"), [
    (SumOfRows, "_gathered", _wrong_rows), (summed_rows, "_adding", _wrong_places)])
def test_wrong_sums_are_noticed(owner, name, wrong, monkeypatch):
    monkeypatch.setattr(owner, name, wrong)
    found = nets.train_net("embeddings", "sgd", tf.float64, lambda net: _lowered(net, "a:2;b:2", "batch:a;words:b"))
    with pytest.raises(AssertionError):
        _same(found, nets.one_device("embeddings", "sgd", tf.float64))


def _strategy(seed, sharded_updates):
    def rule(net):
        exported = export_graph(net.graph, sharded_updates=sharded_updates)
        drawn = _data_parallel(exported) if seed is None else random_configurations(exported, 4, seed, 5)
        return PlanLowering(
            net.graph, plan_from_configurations(net.graph, exported, drawn, 4), harness.device_names(4),
            shared_memory=False, updates=updates_from_configurations(net.graph, exported, drawn))
    return rule


@pytest.mark.parametrize("seed", [None, *range(2), *(pytest.param(seed, marks=pytest.mark.slow)
                                                     for seed in range(2, 12))])
@pytest.mark.parametrize("sharded_updates", [False, True])
def test_random_strategies_train_as_one_device_does(seed, sharded_updates, summed):
    found = nets.train_net("embeddings", "adam", tf.float64, _strategy(seed, sharded_updates))
    _same(found, nets.one_device("embeddings", "adam", tf.float64))
    assert seed is not None or len(summed) == len(_TABLES)


def _data_parallel(exported):
    return [Configuration((("batch", 4),)) if "batch" in layer.splittable else Configuration()
            for layer in exported.layers]


@pytest.mark.parametrize(("name", "seed"), harness.some_slow([("transformer", None)], [
    ("transformer", 4), ("rnnlm", None), ("rnnlm", 3), ("gnmt", None), ("gnmt", 3)]))
def test_models_train_as_one_device_does(name, seed, summed, tmp_path):
    """Of words enough that few are looked up."""
    path = tmp_path / "micro.json"
    path.write_text(json.dumps({**SIZES[name], "vocab": 256, "preset": "tiny"}))
    config = dataclasses.replace(models.load_config(name, str(path)), dtype="float64")

    def rule(program):
        exported = export_graph(program.graph)
        drawn = _data_parallel(exported) if seed is None else random_configurations(exported, 4, seed, 5)
        return PlanLowering(program.graph, plan_from_configurations(program.graph, exported, drawn, 4),
                            harness.device_names(4), shared_memory=False)

    harness.assert_trains_as_one_device(name, config, rule)
    assert seed is not None or len(summed) == {"transformer": 2, "rnnlm": 1, "gnmt": 2}[name]


def _gradient(make, dtype=tf.float64, layout="batch:a", shared_memory=False):
    """What a function of (mesh, table, looked-up rows, indices) makes of a table's rows, on four devices."""
    batch, model, words = (mtf.Dimension(*entry) for entry in (("batch", 64), ("model", 4), ("words", 512)))
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        rng = np.random.default_rng(0)
        table = mtf.import_tf_tensor(mesh, tf.constant(rng.normal(size=[512, 4]), dtype), mtf.Shape([words, model]))
        # Half of all is the same word.
        values = np.where(np.arange(64) % 2, 7, rng.integers(0, 512, 64))
        indices = mtf.import_tf_tensor(mesh, tf.constant(values, tf.int32), mtf.Shape([batch]))
        weights = mtf.import_tf_tensor(mesh, tf.constant(rng.normal(1.0, 0.1, [64, 4]), dtype),
                                       mtf.Shape([batch, model]))
        found = make(table, mtf.gather(table, indices, words) * weights)
        devices = harness.device_names(4)
        lowering = PlanLowering(graph, uniform_plan(graph, "a:4", layout, devices), devices,
                                shared_memory=shared_memory)
        return [np.asarray(value, np.float64) for value in harness.evaluate(lowering, found)]


def _clipped(table, rows):
    """By its norm, which needs the gradient, too."""
    gradient, = mtf.gradients([mtf.reduce_sum(mtf.square(rows))], [table])
    return [gradient / mtf.sqrt(mtf.reduce_sum(mtf.square(gradient)))]


def _accumulated(table, rows):
    """Over the iterations of a loop."""
    count = mtf.import_tf_tensor(table.mesh, tf.constant(0), [])
    def body(count):
        gradient, = mtf.gradients([mtf.reduce_sum(mtf.square(rows) * mtf.cast(count, rows.dtype))], [table])
        return [count + 1, gradient]
    return mtf.while_loop(lambda count, *_: mtf.less(count, 3), body, [count], has_accumulators=True)[1:]


@pytest.mark.parametrize("make", [_clipped, _accumulated])
def test_whoever_needs_a_gradient_gets_it(make):
    for found, wanted in zip(_gradient(make), _gradient(make, shared_memory=True), strict=True):
        assert np.abs(wanted).max() > 0
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-14)


def test_rows_of_two_bytes_are_added_up_in_four():
    """The word that half of all are sums up 32 numbers about 1: in bfloat16 their sum would be off by a percent."""
    def make(table, rows):
        return mtf.gradients([mtf.reduce_sum(mtf.cast(rows, tf.float32))], [table])

    (exact,), (found,) = _gradient(make, tf.float32), _gradient(make, tf.bfloat16)
    np.testing.assert_allclose(found, exact, rtol=2 ** -7, atol=1e-6)
    assert exact[7].min() > 16


def test_where_rows_are_less():
    """By hand: four parts of a table of 64 rows of 8, for whoever needs all of it, or a part."""
    whole, split = (Partition((0, 1, 2, 3), (cut, (1, 1))) for cut in ((1, 1), (4, 1)))

    def as_rows(indices, target):
        return summed_as_rows(LookedUp(indices, 0, 4), whole, [(4, 1)], target, (64, 8))

    # An all-reduce: 2 * 3 / 4 of 512 elements; rows: those of the three others, of 8 elements and an index.
    assert as_rows(4 * 28, whole)
    assert not as_rows(4 * 29, whole)
    # A reduce-scatter: three parts of a quarter of the table.
    assert as_rows(4 * 14, split)
    assert not as_rows(4 * 15, split)
    assert not summed_as_rows(LookedUp(4, 0, 4), whole, [], whole, (64, 8))
