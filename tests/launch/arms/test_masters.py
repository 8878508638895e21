"""The slices of a rank are filled from masters that come and go: with what filling them all at once gives."""

import itertools
import json

import numpy as np
import pytest
from micro_models import SIZES

from pase_mtf.compat import tf
from pase_mtf.export.exporter import export_graph
from pase_mtf.launch.arms import masters
from pase_mtf.launch.arms.masters import PassingMasters, few_at_a_time
from pase_mtf.launch.arms.program import program_of
from pase_mtf.launch.command_line import parse_command_line
from pase_mtf.launch.plan import resolve
from pase_mtf.launch.strategies.finding import random_configurations
from pase_mtf.lowering.lowering import lower
from pase_mtf.machine.machine import Machine
from pase_mtf.runtime import Devices, session_config
from pase_mtf.strategy.strategy import evaluate_strategy


def test_groups_hold_no_more_than_fits(monkeypatch):
    monkeypatch.setattr(masters, "_ELEMENTS_AT_A_TIME", 10)
    found = few_at_a_time({"a": 4, "b": 6, "c": 1, "d": 50, "e": 2})
    assert [*map(tuple, found)] == [("a", "b"), ("c",), ("d",), ("e",)]


class _Rank:
    """A lowered program of two devices, in a session of its own."""

    def __init__(self, plan):
        devices = Devices.first(2, "cpu")
        with tf.Graph().as_default() as self.graph:
            program = program_of(plan)
            graph = export_graph(program.graph)
            strategy = evaluate_strategy(graph, random_configurations(graph, 2, 0, 0), 2, Machine.load("a100"))
            lowering = lower(program.graph, strategy, list(devices.names), step=program.global_step.read_value())
            self.passing = PassingMasters(lowering, tf.global_variables())
            self.fill = lowering.copy_masters_to_slices()
            self.initialize = tf.global_variables_initializer()
            self.saver = tf.train.Saver(tf.global_variables())
            self.slices = [slices.read() for slices in lowering.variables.values()]
            self.masters = [variable.get_master().read_value() for variable in lowering.variables]
            self.step = program.global_step
        self.session = tf.Session(graph=self.graph, config=session_config(devices))

    def run(self, fetches, feed=None):
        with self.graph.as_default():
            return self.session.run(fetches, feed)

    def values(self):
        return [*itertools.chain(*self.run(self.slices)), self.run(self.step)]


@pytest.mark.parametrize("resumed", [False, True])
def test_slices_are_those_of_masters_that_stay(tmp_path, monkeypatch, resumed):
    monkeypatch.setattr(masters, "_ELEMENTS_AT_A_TIME", 500)
    sizes = tmp_path / "sizes.json"
    sizes.write_text(json.dumps({"preset": "tiny", **SIZES["alexnet"]}))
    plan = resolve(parse_command_line(["--model=alexnet", f"--preset={sizes}", "--mesh=2", "--devices=cpu",
                                       "--machine=a100", f"--output_dir={tmp_path / 'run'}"]))
    staying, passing, prefix = _Rank(plan), _Rank(plan), None
    staying.run(staying.initialize)
    if resumed:
        staying.run(staying.initialize)  # which draws other numbers
        staying.run(staying.step.initializer, {staying.step.initializer.inputs[1]: 7})
        with staying.graph.as_default():
            prefix = staying.saver.save(staying.session, str(tmp_path / "model"), write_meta_graph=False)
    staying.run(staying.fill)
    passing.passing.fill(passing.run, prefix)
    for mine, theirs in zip(passing.values(), staying.values(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    for master in passing.masters:
        with pytest.raises(tf.errors.OpError):
            passing.run(master)
