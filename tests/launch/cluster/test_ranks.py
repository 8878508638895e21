"""--clients=ranks: every process trains with a graph of its own, in step with the others, to the losses of one."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
from micro_models import SIZES

from pase_mtf import models
from pase_mtf.compat import tf
from pase_mtf.errors import ClusterError
from pase_mtf.launch.arms.arm import build_arms, rows_of
from pase_mtf.launch.arms.program import export_with_program
from pase_mtf.launch.arms.recipe import microbatch_of
from pase_mtf.launch.cluster.follower import tell_run
from pase_mtf.launch.cluster.launcher import local_addresses
from pase_mtf.launch.cluster.membership import Membership
from pase_mtf.launch.cluster.process import end_all, start_worker
from pase_mtf.launch.cluster.server import check_servers, join
from pase_mtf.launch.command_line import parse_command_line
from pase_mtf.launch.data import open_data
from pase_mtf.launch.plan import resolve
from pase_mtf.launch.strategies.finding import random_configurations
from pase_mtf.lowering import collectives
from pase_mtf.machine.machine import Machine
from pase_mtf.pipeline.find import find_pipeline
from pase_mtf.runtime import Devices
from pase_mtf.strategy.strategy import evaluate_strategy

DEVICES = 4
STEPS = 20
_CASES = [*itertools.product(("alexnet", "biglstm", "rnnlm"), (2, 3), [(2, 4)]), ("transformer", 2, (4,)),
          ("transformer", 3, (2,)),
          *itertools.product(("densenet121", "gnmt", "inception_v3", "resnet101"), (2,), [(2, 4)])]
"""A model, the number of the random strategy, and over how many processes: of some the graphs take so long to build
that one strategy has to do."""
_ROUNDING = 3e-4
"""How far a variable may differ after all steps, as a fraction of how far it went in them. An optimizer that scales
gradients (Adam) also scales what float32 rounds off where a gradient is next to nothing: elements of a table are 1.3e-6
off on some processors, where in float64 they agree to eleven digits. A gradient that is wrong, or of another mask,
changes the way by its hundredth and more."""


class _Ranks:
    """Rank 0 of a cluster in this process; the others are processes, as the launcher starts them."""

    def __init__(self, tasks):
        addresses = local_addresses(tasks)
        self.devices = Devices.over_tasks(DEVICES, "cpu", addresses, rank=0)
        self._others = [start_worker(Membership(addresses, rank, DEVICES, "cpu", "ranks"))
                        for rank in range(1, tasks)]
        check_servers(addresses[1:], within=300.0)  # on a busy machine TensorFlow takes its time to load
        self._joined = join(self.devices)
        self.board = self._joined.board
        self.keys = itertools.count(1)  # a process has one run; this one has several, which count by themselves

    def close(self):
        self._joined.close()
        end_all(self._others)
        assert [other.exit_code for other in self._others] == [0] * len(self._others)


@pytest.fixture(scope="module")
def clusters():
    found = [_Ranks(2), _Ranks(4)]
    yield found
    for ranks in found:
        ranks.close()


@pytest.mark.slow
@pytest.mark.parametrize(("model", "drawn", "over"), _CASES)
def test_losses_of_every_model(clusters, tmp_path, monkeypatch, model, drawn, over):
    """In the model's own float32: sums as small as these are made in the order of the devices, wherever they are. And
    masks of dropout are those of the step, on every rank."""
    sizes = tmp_path / f"{model}.json"
    dropout = {"dropout": 0.2} if model in ("alexnet", "transformer", "densenet121", "gnmt") else {}
    recompute = "all" if model in ("transformer", "rnnlm") else "none"
    sizes.write_text(json.dumps({"preset": "tiny", **SIZES[model], **dropout}))
    plan = resolve(parse_command_line([
        f"--model={model}", f"--preset={sizes}", f"--mesh={DEVICES}", "--devices=cpu", "--machine=h100",
        "--compare=none", f"--recompute={recompute}", f"--output_dir={tmp_path / 'run'}"]))
    graph, _ = export_with_program(plan)
    data = open_data(None, models.get(model), plan.config, plan.options.batch, 0)
    batches = list(itertools.islice(data.batches(), STEPS))
    strategy = evaluate_strategy(graph, random_configurations(graph, DEVICES, drawn, 0), DEVICES, Machine.load("h100"))

    def losses(devices, board=None):
        of_run = dataclasses.replace(plan, devices=devices)
        if board:
            tell_run(board, of_run, data)
        arm, = build_arms(of_run, graph, {"random": strategy}, ["random"], board)
        arm.step(batches[0])
        arm.restart()  # as if it had not
        first = dict(arm.values())
        found = [arm.step(batch, trace=step == 0)[0] for step, batch in enumerate(batches)]
        assert arm.differing_replicas() is None
        assert {one.device for one in arm.timeline.slices} == set(range(DEVICES))
        values, nodes = dict(arm.values()), arm.nodes
        way = {name: float(np.abs(value - first[name]).max()) for name, value in values.items()}
        within = {name: max(1e-6, _ROUNDING * far) for name, far in way.items()}
        prefix = tmp_path / f"saved{len(list(tmp_path.glob('saved*')))}" / "model"
        prefix.parent.mkdir()
        arm.save(str(prefix))
        arm.close()
        written = tf.train.load_checkpoint(str(prefix))
        assert set(written.get_variable_to_shape_map()) == {*values, "global_step"}
        assert written.get_tensor("global_step") == STEPS
        for name, value in values.items():  # of a part that several devices hold each rank may write its own copy
            np.testing.assert_allclose(written.get_tensor(name), value, rtol=1e-5 if board else 0.0,
                                       atol=within[name] if board else 0.0, err_msg=name)
        if board:
            assert 1 < len(list(prefix.parent.glob("model.data-*"))) <= len(devices.tasks)
        return found, values, within, nodes

    expected, values, within, nodes = losses(Devices.first(DEVICES, "cpu"))
    assert len(set(expected)) == STEPS
    for ranks in (ranks for ranks in clusters if len(ranks.devices.tasks) in over):
        monkeypatch.setattr(collectives, "_KEYS", ranks.keys)
        found, theirs, _, own_nodes = losses(ranks.devices, ranks.board)
        assert found == pytest.approx(expected, rel=1e-6)
        for name, value in values.items():
            assert theirs[name] == pytest.approx(value, rel=1e-5, abs=within[name]), name
        assert own_nodes < nodes


@pytest.mark.slow
@pytest.mark.parametrize(("model", "schedule", "stages"), [("transformer", "gpipe", 4), ("gnmt", "1f1b", 2)])
def test_losses_of_pipelines(clusters, tmp_path, monkeypatch, model, schedule, stages):
    """Processes with devices of several stages (4 of 2), and stages on devices of several processes (2 stages of 4)."""
    sizes = tmp_path / f"{model}.json"
    sizes.write_text(json.dumps({"preset": "tiny", **SIZES[model]}))
    plan = resolve(parse_command_line([
        f"--model={model}", f"--preset={sizes}", f"--mesh={DEVICES}", "--devices=cpu", "--machine=h100",
        "--compare=none", f"--output_dir={tmp_path / 'run'}"]))
    graph, _ = export_with_program(plan)
    data = open_data(None, models.get(model), plan.config, plan.options.batch, 0)
    found_pipeline = find_pipeline({4: microbatch_of(plan, 4)[1]}, DEVICES, Machine.load("h100"), stages=stages,
                                   schedule=schedule)

    def trained(devices, board=None):
        of_run = dataclasses.replace(plan, devices=devices)
        if board:
            tell_run(board, of_run, data)
        arm, = build_arms(of_run, graph, {"pipeline": found_pipeline}, ["pipeline"], board)
        read = dataclasses.replace(data, rows=rows_of([arm]))
        assert (read.rows is None) == (board is None)  # the others read their own rows, too
        found = [arm.step(batch)[0] for batch in itertools.islice(read.batches(), 4)]
        assert arm.differing_replicas() is None
        values = dict(arm.values())
        arm.close()
        return found, values

    expected, values = trained(Devices.first(DEVICES, "cpu"))
    ranks = clusters[0 if stages == DEVICES else 1]
    monkeypatch.setattr(collectives, "_KEYS", ranks.keys)
    found, theirs = trained(ranks.devices, ranks.board)
    assert found == pytest.approx(expected, rel=1e-6)
    for name, value in values.items():
        assert theirs[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_a_rank_that_is_left_before_all_agree_says_so_in_a_line(tmp_path, monkeypatch):
    """Rank 0 was ended while programs were lowered, and its server with it."""
    def left(*_):
        raise tf.errors.UnavailableError(None, None, "Socket closed")
    monkeypatch.setattr("pase_mtf.lowering.ranks.Agreement.check", left)
    monkeypatch.setattr("pase_mtf.launch.cluster.lost._LAUNCHER_TELLS_WITHIN", 0.0)
    plan = resolve(parse_command_line(["--model=alexnet", "--mesh=2", "--devices=cpu", "--machine=h100", "--batch=4",
                                       "--compare=none", f"--output_dir={tmp_path / 'run'}"]))
    graph, _ = export_with_program(plan)
    drawn = evaluate_strategy(graph, random_configurations(graph, 2, 0, 0), 2, Machine.load("h100"))
    devices = Devices.over_tasks(2, "cpu", local_addresses(1), rank=0)
    joined = join(devices)
    try:
        with pytest.raises(ClusterError, match="arm drawn: a process was lost"):
            build_arms(dataclasses.replace(plan, devices=devices), graph, {"drawn": drawn}, ["drawn"], joined.board)
    finally:
        joined.close()
