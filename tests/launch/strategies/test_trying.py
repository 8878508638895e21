"""Steps that are tried before training, and what becomes of the arms then."""

import json
from types import SimpleNamespace

import pytest

from pase_mtf.launch.arms.arm import Arm
from pase_mtf.launch.strategies import trying
from pase_mtf.launch.strategies.trying import Tried, close_ones, fastest, try_steps
from pase_mtf.launch.training import BLOCK, Timing
from pase_mtf.machine.machine import Machine
from pase_mtf.strategy.strategy import Strategy


class _Arm:
    """Takes what it is told to, and twice as long for its first steps."""

    def __init__(self, name, seconds, told):
        self.name, self._seconds, self._told, self.steps = name, seconds, told, 0

    def step(self, batch):
        self.steps += 1
        self._told.append(self.name)
        return 0.0, (2.0 if self.steps <= 2 else 1.0 + 0.02 * (self.steps % 3)) * self._seconds


@pytest.mark.parametrize(("seconds", "budget", "counted"), [
    ((1.0, 1.0), 1e9, (40, 40)),  # the same: as often as there are turns
    ((1.0, 1.01), 1e9, (20, 20)),  # nearly the same, always by as much
    ((1.0, 1.5), 1e9, (BLOCK, BLOCK)),  # one turn that counts tells them apart
    ((1.0, 1.1), 1e9, (2 * BLOCK, 2 * BLOCK)),  # one turn may have been on a bad moment
    ((1.0, 1.01, 1.5), 1e9, (20, 20, BLOCK)),  # those that are left go on
    ((1.0, 1.01), 0.0, (3, 3))])  # no time: a turn all the same, a short one
def test_arms_take_turns_until_they_are_told_apart(seconds, budget, counted):
    told = []
    arms = [_Arm(str(number), value, told) for number, value in enumerate(seconds)]
    found = try_steps(arms, range(BLOCK), budget, clock=lambda: float(len(told)))
    assert tuple(found.timings[arm.name].steps for arm in arms) == counted
    assert all(found.timings[arm.name].median == pytest.approx(value, rel=0.05)
               for arm, value in zip(arms, seconds, strict=True))
    assert told[0] != told[2 * len(arms)]  # every turn begins with another


def test_a_bad_moment_does_not_decide():
    """All steps of a turn of the faster one take a tenth longer, then none does."""
    told = []
    fast, slow = _Arm("fast", 1.0, told), _Arm("slow", 1.05, told)
    step = fast.step
    fast.step = lambda batch: (0.0, step(batch)[1] * (1.1 if fast.steps <= 2 + BLOCK else 1.0))
    found = try_steps([fast, slow], range(BLOCK), 1e9, clock=lambda: float(len(told)))
    assert fastest(found.turns, {"fast": 1.0, "slow": 1.0}, 0.12) == "fast"


@pytest.mark.parametrize(("seconds", "expected"), [
    ({"data_parallel": 1.5, "search": 1.0, "expert": 1.04}, ["search", "expert"]),
    ({"search": 1.0, "expert": 0.9}, ["search", "expert"]),
    ({"search": 1.0}, ["search"])])
def test_what_predictions_tell_apart_is_not_tried(seconds, expected):
    assert close_ones(seconds, "search", 0.25) == expected


_QUIET, _RESTLESS = (1.0, 1.002, 0.999, 1.001), (1.0, 1.25, 0.8, 1.0)
"""How turns deviate, beside those of an arm that always takes the same."""


def _turns(seconds, deviations):
    return [seconds * deviation for deviation in deviations]


@pytest.mark.parametrize(("simple", "promised", "deviations", "expected"), [
    (1.0, 1.0, _QUIET, "data_parallel"),  # as fast
    (1.005, 1.2, _QUIET, "data_parallel"),  # many steps on a quiet machine say more than what is promised
    (1.05, 1.0, _QUIET, "search"),
    (1.0, 1.2, _RESTLESS, "search"),  # what is promised says more than a few steps on a restless one
    (1.0, 1.0, _RESTLESS, "data_parallel"),
    (1.1, 1.0, _RESTLESS, "data_parallel"),  # neither promised nor clear
    (1.1, 1.1, _RESTLESS, "search"),
    (1.6, 1.0, _RESTLESS, "search"),
    (0.7, 1.2, _RESTLESS, "data_parallel")])
def test_steps_and_predictions_decide_together(simple, promised, deviations, expected):
    turns = {"search": [1.0] * 4, "data_parallel": _turns(simple, deviations)}
    assert fastest(turns, {"search": 1.0, "data_parallel": promised}, 0.12, "data_parallel") == expected


def test_what_slows_all_down_decides_nothing():
    """A machine that becomes slower and slower: turn by turn the first is two hundredths ahead."""
    slower = (1.0, 1.2, 1.5, 2.0)
    turns = {"search": _turns(1.0, slower), "expert": _turns(1.02, slower), "data_parallel": _turns(1.03, slower)}
    predicted = dict.fromkeys(turns, 1.0)
    assert fastest(turns, predicted, 0.12, "data_parallel") == "search"
    assert fastest({**turns, "expert": _turns(0.98, slower)}, predicted, 0.12) == "expert"


def test_what_strikes_one_turn_of_an_arm_decides_nothing():
    """Another process ran in that turn: its steps took three times as long."""
    turns = {"search": [0.085, 0.084, 0.26, 0.085, 0.086, 0.085, 0.084, 0.085],
             "expert": [0.091, 0.090, 0.090, 0.091, 0.092, 0.091, 0.090, 0.091]}
    assert fastest(turns, {"search": 0.0440, "expert": 0.0439}, 0.125) == "search"


def test_one_turn_decides_where_it_is_clear():
    predicted = {"search": 1.0, "data_parallel": 1.1}
    assert fastest({"search": [1.0], "data_parallel": [0.8]}, predicted, 0.12, "data_parallel") == "data_parallel"
    assert fastest({"search": [1.0], "data_parallel": [0.99]}, predicted, 0.12, "data_parallel") == "search"


def _losses(folder, arm):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["arm"] == arm]


@pytest.mark.parametrize("prices", [pytest.param("measured", marks=pytest.mark.slow), "roofline"])
def test_the_search_takes_what_is_faster(launch, cache_dir, timed_kernels, monkeypatch, prices):
    """Under every name stands what its strategy says, and all begin as if no step had been tried."""
    monkeypatch.setattr("pase_mtf.calibration.load.load_machine", lambda *_, **__: Machine.load("a100"))
    flags = ["--machine=local", f"--prices={prices}", "--compare=expert,search", "--measure_seconds=5", "--mesh=4",
             "--nocheckpoint"]
    code, folder, out, _ = launch(*flags, "--notrial", output="predicted")
    assert code == 0
    assert "trial" not in out
    predicted = Strategy.load(folder / "strategy.json")
    losses, summary = _losses(folder, "search"), json.loads((folder / "summary.json").read_text())
    assert summary["arms"]["expert"]["same_as"] is None

    closed, tried = [], try_steps

    def expert_is_faster(arms, batches, seconds):
        assert [arm.name for arm in arms] == ["search", "expert"]
        assert set(tried(arms, batches, 0.0).timings) == {"search", "expert"}
        return Tried({"search": Timing(2.0, 1.9, 2.1, 5), "expert": Timing(1.0, 0.9, 1.1, 5)},
                     {"search": [2.0], "expert": [1.0]})
    close = Arm.close
    monkeypatch.setitem(trying._WITHIN, prices, 1e3)
    monkeypatch.setattr(trying, "try_steps", expert_is_faster)
    monkeypatch.setattr(Arm, "close", lambda arm: (closed.append(arm.name), close(arm)))
    code, folder, out, err = launch(*flags, output="tried")
    assert code == 0, err
    assert "chosen by up to 5 steps of each: search 2000.0 ± 100.0 ms, expert 1000.0 ± 100.0 ms (taken)" in out
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["arms"]["expert"]["same_as"] == "search"
    assert summary["search"]["trial"]["taken"] == "expert"
    assert summary["spent"]["trial_steps"] > 0.0
    assert summary["search"]["optimal"] is False
    assert summary["search"]["gap"] == pytest.approx(
        summary["arms"]["search"]["predicted_ms"] / (1e3 * summary["search"]["lower_bound"]) - 1.0, rel=0.01)
    strategy = Strategy.load(folder / "strategy.json")
    assert strategy.configurations != predicted.configurations
    assert "expert 1000.0 ± 100.0 ms (taken)" in strategy.verdict
    assert _losses(folder, "search") == pytest.approx(losses, rel=1e-5)
    assert not _losses(folder, "expert")
    assert closed == ["search", "search"]  # what lost, and in the end what was trained


def test_what_is_priced_for_other_devices_is_not_tried(launch, monkeypatch):
    """Neither is its order theirs, nor would a user who asks for an A100's strategy want another."""
    monkeypatch.setitem(trying._WITHIN, "roofline", 1e3)
    monkeypatch.setattr(trying, "try_steps", None)
    code, _, out, err = launch("--machine=a100", "--compare=expert,search", "--mesh=4", "--nocheckpoint")
    assert code == 0, err
    assert "chosen by" not in out


@pytest.mark.parametrize(("simulated", "expected"), [
    ((0.058, 0.060), ["search", "data_parallel"]), ((None, None), ["search"]), ((0.058, None), ["search"])])
def test_simulated_steps_tell_what_is_tried(simulated, expected):
    strategies = {name: SimpleNamespace(seconds=seconds, simulated_seconds=step) for name, seconds, step in zip(
        ("search", "data_parallel"), (0.064, 0.100), simulated, strict=True)}
    assert close_ones(trying.predicted_steps(strategies), "search", 0.5) == expected
