"""A right strategy raises no alarm however its float32 losses wander; a wrong one always does, in every model."""

import dataclasses
import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
from micro_models import SIZES
from planting import KINDS, Plant, planted

from pase_mtf import models
from pase_mtf.errors import DataError, FormatError
from pase_mtf.launch.arms.arm import build_arms
from pase_mtf.launch.arms.program import export_with_program
from pase_mtf.launch.checkpoints.checkpoint import CheckpointInfo
from pase_mtf.launch.command_line import parse_command_line
from pase_mtf.launch.data import ORDER, open_data
from pase_mtf.launch.judging import judge
from pase_mtf.launch.judging.judge import Judge
from pase_mtf.launch.judging.settling import Settled, settle
from pase_mtf.launch.plan import resolve
from pase_mtf.launch.strategies.finding import random_configurations
from pase_mtf.launch.training import train
from pase_mtf.machine.machine import Machine
from pase_mtf.strategy.find import find_strategy
from pase_mtf.strategy.strategy import evaluate_strategy

DEVICES = 4


class _Case:
    """A model of a few thousand parameters on four devices: a strategy drawn at random, and data parallelism."""

    def __init__(self, model, folder, *flags):
        sizes = folder / f"{model}.json"
        sizes.write_text(json.dumps({"preset": "tiny", **SIZES[model]}))
        self.plan = resolve(parse_command_line([
            f"--model={model}", f"--preset={sizes}", f"--mesh={DEVICES}", "--devices=cpu", "--machine=h100",
            "--compare=none", f"--output_dir={folder / 'run'}", *flags]))
        self.graph, _ = export_with_program(self.plan)
        machine = Machine.load("h100")
        self.strategies = {
            "search": evaluate_strategy(self.graph, random_configurations(self.graph, DEVICES, 2, 0), DEVICES, machine),
            "data_parallel": find_strategy(self.graph, DEVICES, machine, "data_parallel")}
        self.data = open_data(None, models.get(model), self.plan.config, self.plan.options.batch, 0)

    def build(self, *names):
        return build_arms(self.plan, self.graph, self.strategies, names)

    def judged(self, *arms, steps=4):
        judge = Judge(self.plan, self.strategies, arms, self.data)
        return train(arms, self.data.batches(), warmup=1, steps=steps, check=judge.check), judge

    def places(self, most=3):
        """Kind -> evenly spread communications of it, in the lowering of the strategy."""
        plant = Plant(KINDS[0])
        with planted(plant, self.strategies["search"].configurations):
            for arm in self.build("search"):
                arm.close()
        return {kind: sorted({number * seen // most for number in range(min(most, seen))})
                for kind in KINDS for seen in (plant.seen[kind],)}


def _assert_caught(case, kind, place, right):
    """Suspected in float32 beside the right arm, and wrong in float64; returns whether there was anything to catch."""
    right.restart()
    with planted(Plant(kind, place), case.strategies["search"].configurations):
        wrong, = case.build("search")
        try:
            history, _ = case.judged(wrong, right)
        finally:
            wrong.close()
        if not history.disagreement:  # then nothing that is computed depends on this communication
            found = settle(case.plan, case.strategies, ["search"], list(itertools.islice(case.data.batches(), 3)))
            assert found.wrong == {}, f"{kind} {place} goes unnoticed"
            return False
    assert "in float64 search computes something else than one device does" in history.disagreement
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_strategy_is_caught(tmp_path, kind):
    case = _Case("alexnet", tmp_path)
    right, = case.build("data_parallel")
    assert _assert_caught(case, kind, case.places()[kind][-1], right)
    right.close()


class _Narrow:
    """Takes the place of an arm: products with few bits after the point make its first step a bit other than exact."""

    def __init__(self, name, rounding):
        self.name, self.loss, self._after = name, 2.0 * (1.0 + rounding / 10), 1.0 + 1e-2 * (1.0 + rounding)

    def values(self, up_to_date=True):
        return {"weight": np.full(8, self._after if up_to_date else 1.0, np.float32)}.items()

    def differing_replicas(self):
        return None


@pytest.mark.parametrize(("dtype", "rounding", "settled"), [
    ("float32", 0.0, False), ("float32", 0.05, True), ("bfloat16", 0.05, False), ("bfloat16", 0.5, True)])
def test_products_of_few_bits_are_allowed_more(tmp_path, monkeypatch, dtype, rounding, settled):
    """What arms differ by in bfloat16, right ones too, would be settled in every run: a training in float64."""
    plan = resolve(parse_command_line([
        "--model=alexnet", "--preset=tiny", "--mesh=4", "--devices=cpu", "--machine=h100", f"--dtype={dtype}",
        f"--output_dir={tmp_path / 'run'}"]))
    asked = []
    monkeypatch.setattr(judge, "settle", lambda *of: asked.append(of) or Settled({}, 2.0, 3))
    arms = [_Narrow("search", 0.0), _Narrow("data_parallel", rounding)]
    data = SimpleNamespace(batches=lambda step: iter(()))
    found = Judge(plan, dict.fromkeys(("search", "data_parallel")), arms, data)
    losses = {arm.name: [arm.loss] for arm in arms}
    assert found.check(SimpleNamespace(losses=lambda name, since: losses[name][since:], first_step=0)) is None
    assert (len(asked) == 1) == (found.note is not None) == settled


# Both kinds in every model: half a minute each.
@pytest.mark.slow
@pytest.mark.parametrize(("model", "optimizer"), [
    (model, "adam" if model == "transformer" else "sgd") for model in SIZES])
def test_a_wrong_strategy_is_caught_in_every_model(tmp_path, monkeypatch, model, optimizer):
    # That data parallelism is right in float64 is asked below, once.
    monkeypatch.setattr(judge, "settle", lambda plan, chosen, names, *rest: settle(plan, chosen, ["search"], *rest))
    case = _Case(model, tmp_path, f"--optimizer={optimizer}")
    right, = case.build("data_parallel")
    for kind, places in case.places().items():
        # The first place that anything depends on: a plant takes two trainings of a few steps.
        assert any(_assert_caught(case, kind, place, right) for place in places), kind
    right.close()


@pytest.mark.slow
@pytest.mark.parametrize(("model", "optimizer"), [
    ("alexnet", "sgd"), ("rnnlm", "sgd"), ("transformer", "adam"), ("transformer", "adafactor")])
def test_a_right_strategy_is_right_in_float64(tmp_path, model, optimizer):
    case = _Case(model, tmp_path, f"--optimizer={optimizer}")
    found = settle(case.plan, case.strategies, ["search", "data_parallel", "stock_data_parallel"],
                   list(itertools.islice(case.data.batches(), 3)))
    assert found.wrong == {}


@pytest.mark.parametrize(("dropout", "kept", "started", "now", "expected"), [
    (0.5, 2, "2", "2", [1.0, 5.0]), (0.5, 2, "2", "02", [1.0, 5.0]), (0.5, None, "2", "2", [1.0, 5.0]),
    (0.5, 1, "2", "2", [4.0, 5.0]),  # of a run that went on in others, and was ended before its first checkpoint
    (0.5, 2, "1", "2", [1.0]), (0.5, 1, "1", "2", []), (0.5, None, "1", "2", []), (0.5, 1, "auto", "2", []),
    (0.0, 1, "4", "2", [1.0, 5.0])])
def test_losses_are_compared_with_those_of_the_same_dropout_masks(tmp_path, dropout, kept, started, now, expected):
    """Every microbatch draws a mask of its own; what a checkpoint tells is that of the run that wrote it."""
    sizes = tmp_path / "sizes.json"
    sizes.write_text(json.dumps({"preset": "tiny", "dropout": dropout}))
    plan = resolve(parse_command_line(["--model=alexnet", f"--preset={sizes}", "--mesh=2", "--devices=cpu",
                                       "--machine=h100", f"--microbatches={now}"]))
    (tmp_path / "metrics.jsonl").write_text("".join(
        json.dumps({"arm": "search", "step": step, "loss": float(step + 1)}) + "\n" for step in (3, 4)))
    plan = dataclasses.replace(
        plan, options=dataclasses.replace(plan.options, resume=str(tmp_path)),
        checkpoint=CheckpointInfo("step-3", 3, "abc", next_loss=1.0, order=ORDER, microbatches=kept),
        earlier={"strategy": "search", "microbatches": started})
    assert judge.losses_before(plan) == expected
    (tmp_path / "metrics.jsonl").unlink()
    assert judge.losses_before(plan) == [loss for loss in expected if loss == 1.0]


def test_losses_after_the_checkpoint_may_be_those_of_other_data(tmp_path):
    """Of a run that went on in the folder with these, and found that they are others."""
    plan = resolve(parse_command_line(["--model=alexnet", "--preset=tiny", "--mesh=2", "--devices=cpu",
                                       "--machine=h100"]))
    (tmp_path / "metrics.jsonl").write_text("".join(
        json.dumps({"arm": "search", "step": step, "loss": 5.0}) + "\n" for step in (3, 4)))
    info = CheckpointInfo("step-3", 3, "abc", next_loss=1.0, order=ORDER, microbatches=1)
    plan = dataclasses.replace(plan, options=dataclasses.replace(plan.options, resume=str(tmp_path), data="right"))
    for data, next_loss, expected in (("right", 1.0, [1.0, 5.0]), ("wrong", 1.0, [1.0]), ("moved", None, [5.0, 5.0])):
        assert judge.losses_before(dataclasses.replace(
            plan, checkpoint=dataclasses.replace(info, next_loss=next_loss),
            earlier={"strategy": "search", "data": data})) == expected


@pytest.mark.parametrize("line", ['{"arm": "search", "step": 1e999, "loss": 1.0}', "[" * 100_000,
                                  '{"arm": "search", "step": 4, "loss": 1' + "0" * 400 + "}"],
                         ids=["infinite", "nested", "digits"])
def test_lines_of_metrics_that_tell_no_loss_are_passed_over(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{line}\n{{"arm": "search", "step": 3, "loss": 2.0}}\n')
    assert judge._metrics(str(path), "search") == {3: 2.0}


def test_the_run_before_may_have_trained_a_file_that_is_gone(tmp_path):
    plan = resolve(parse_command_line(["--model=alexnet", "--preset=tiny", "--mesh=2", "--devices=cpu",
                                       "--machine=h100"]))
    (tmp_path / "metrics.jsonl").write_text('{"arm": "best", "step": 3, "loss": 4.0}\n')
    plan = dataclasses.replace(
        plan, options=dataclasses.replace(plan.options, resume=str(tmp_path)), earlier={"strategy": "best"},
        checkpoint=CheckpointInfo("step-3", 3, "abc", order=ORDER, microbatches=1))
    assert judge.losses_before(plan) == [4.0]


@pytest.mark.parametrize("error", [FormatError("gone"), DataError("gone")])
def test_what_a_run_began_with_may_be_gone_when_it_is_settled(tmp_path, monkeypatch, error):
    """Of another folder, which somebody has removed: what was measured is written all the same."""
    plan = resolve(parse_command_line(["--model=alexnet", "--preset=tiny", "--mesh=4", "--devices=cpu",
                                       "--machine=h100", f"--output_dir={tmp_path / 'run'}"]))
    monkeypatch.setattr(judge, "settle", lambda *_: (_ for _ in ()).throw(error))
    arms = [_Narrow("search", 0.0), _Narrow("data_parallel", 0.05)]
    losses = {arm.name: [arm.loss] for arm in arms}
    found = Judge(plan, dict.fromkeys(losses), arms, SimpleNamespace(batches=lambda step: iter(())))
    said = found.check(SimpleNamespace(losses=lambda name, since: losses[name][since:], first_step=0))
    assert "it cannot be settled in float64 (gone)" in said


def test_what_stock_mesh_tensorflow_loses_after_its_first_step_is_not_compared(tmp_path, monkeypatch):
    """It reads a variable before or after its update, as it happens."""
    plan = resolve(parse_command_line(["--model=alexnet", "--preset=tiny", "--mesh=4", "--devices=cpu",
                                       "--machine=h100", f"--output_dir={tmp_path / 'run'}"]))
    asked = []
    monkeypatch.setattr(judge, "settle", lambda *of: asked.append(of) or Settled({}, 2.0, 3))
    data = SimpleNamespace(batches=lambda step: iter(()))
    for first, settled in ((2.0, 0), (2.1, 1)):
        losses = {"search": [2.0, 1.9], "stock_data_parallel": [first, 1.8]}
        arms = [SimpleNamespace(name=name, differing_replicas=lambda: None) for name in losses]
        Judge(plan, {"search": None}, arms, data).check(SimpleNamespace(
            losses=lambda name, since, losses=losses: losses[name][since:], first_step=0))
        assert len(asked) == settled


@pytest.mark.parametrize(("before", "other_data"), [(3.1e-5, False), (0.2, True)])
def test_a_loss_of_next_to_nothing_at_a_checkpoint_may_be_rounding(tmp_path, monkeypatch, before, other_data):
    """float32 rounds it as it does the logits that it is a difference of."""
    plan = resolve(parse_command_line(["--model=alexnet", "--preset=tiny", "--mesh=4", "--devices=cpu",
                                       "--machine=h100", f"--output_dir={tmp_path / 'run'}"]))
    monkeypatch.setattr(judge, "settle", lambda *_: Settled({}, 3e-5, 3))
    monkeypatch.setattr(judge, "losses_before", lambda plan: [before])
    losses = {"search": [3.05e-5], "stock_data_parallel": [3e-5]}
    arms = [SimpleNamespace(name=name, differing_replicas=lambda: None) for name in losses]
    found = Judge(plan, {"search": None}, arms, SimpleNamespace(batches=lambda step: iter(())))
    said = found.check(SimpleNamespace(losses=lambda name, since: losses[name][since:], first_step=0))
    assert (said is not None) == other_data
    assert (found.note is None) == other_data


@pytest.mark.parametrize(("before", "other_data"), [([2.0, 1.9004], False), ([2.0, 2.5], True)])
def test_what_the_run_before_lost_later_on_is_rounding_only_where_float64_says_so(tmp_path, monkeypatch, before,
                                                                                 other_data):
    """Of a wrong gradient, or of data that is other from the second batch on, the first loss tells nothing."""
    plan = resolve(parse_command_line(["--model=alexnet", "--preset=tiny", "--mesh=4", "--devices=cpu",
                                       "--machine=h100", f"--output_dir={tmp_path / 'run'}"]))
    monkeypatch.setattr(judge, "settle", lambda *_: Settled({}, 2.0, 3, (2.0, 1.9, 1.8)))
    monkeypatch.setattr(judge, "losses_before", lambda plan: before)
    arms = [SimpleNamespace(name="search", differing_replicas=lambda: None)]
    found = Judge(plan, {"search": None}, arms, SimpleNamespace(batches=lambda step: iter(())))
    losses = {"search": [2.0, 1.9]}
    assert found.check(SimpleNamespace(losses=lambda name, since: losses[name][since:], first_step=0)) is None
    assert found.note.startswith("losses differ at step 1: the run before")
    assert ("rounding, no error" in found.note) is not other_data
    assert ("by step 1 the run before had other data, or its strategy was wrong" in found.note) is other_data
