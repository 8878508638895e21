"""A single client over two and four processes computes what one process does: every model, random strategies."""

import dataclasses
import itertools
import json

import pytest
from micro_models import SIZES

from pase_mtf import models
from pase_mtf.launch.arms.arm import build_arms
from pase_mtf.launch.arms.program import export_with_program
from pase_mtf.launch.cluster.launcher import local_addresses
from pase_mtf.launch.cluster.server import start_server
from pase_mtf.launch.command_line import parse_command_line
from pase_mtf.launch.data import open_data
from pase_mtf.launch.plan import resolve
from pase_mtf.launch.strategies.finding import random_configurations
from pase_mtf.machine.machine import Machine
from pase_mtf.runtime import Devices
from pase_mtf.strategy.strategy import evaluate_strategy

DEVICES = 4
STEPS = 20
_QUICK = ("alexnet", "biglstm", "rnnlm")
"""Models that are built so soon that they are tried over two processes and over four, under a strategy each."""
_CASES = [*((model, over, over + 1) for model in _QUICK for over in (1, 2)), ("transformer", 2, 3),
          *((model, number % 2 + 1, 2) for number, model in enumerate(sorted(set(SIZES) - set(_QUICK)))),
          ("densenet121", 2, 3), ("gnmt", 1, 3), ("inception_v3", 2, 3), ("resnet101", 1, 3)]
"""A model, which of the clusters, and the number of the random strategy: every model over two processes and four."""


@pytest.fixture(scope="module")
def clusters():
    """Devices over one process, two, and four: servers of this one, which live as long as it does."""
    over = [Devices.over_tasks(DEVICES, "cpu", local_addresses(tasks)) for tasks in (2, 4)]
    servers = [start_server(devices, rank) for devices in over for rank in range(len(devices.tasks))]
    yield [Devices.first(DEVICES, "cpu"), *over]
    assert len(servers) == 6


@pytest.mark.slow
@pytest.mark.parametrize(("model", "over", "drawn"), _CASES)
def test_losses_of_every_model(clusters, tmp_path, model, over, drawn):
    """In float64, where the order of a sum is nothing: 20 steps to ten digits."""
    sizes = tmp_path / f"{model}.json"
    sizes.write_text(json.dumps({"preset": "tiny", **SIZES[model]}))
    plan = resolve(parse_command_line([
        f"--model={model}", f"--preset={sizes}", f"--mesh={DEVICES}", "--devices=cpu", "--machine=h100",
        "--compare=none", f"--output_dir={tmp_path / 'run'}"]))
    plan = dataclasses.replace(plan, config=dataclasses.replace(plan.config, dtype="float64"))
    graph, _ = export_with_program(plan)
    batches = list(itertools.islice(open_data(None, models.get(model), plan.config, plan.options.batch, 0).batches(),
                                    STEPS))
    strategy = evaluate_strategy(graph, random_configurations(graph, DEVICES, drawn, 0), DEVICES, Machine.load("h100"))
    losses = []
    for devices in (clusters[0], clusters[over]):
        arm, = build_arms(dataclasses.replace(plan, devices=devices), graph, {"random": strategy}, ["random"])
        losses.append([arm.step(batch)[0] for batch in batches])
        assert arm.differing_replicas() is None
        arm.close()
    assert len(set(losses[0])) == STEPS
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)
