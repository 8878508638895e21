"""Runs in which updates are layers of their own: their losses, what they continue, and what is told of mistakes."""

import json

import pytest
from cluster_runs import metrics

from pase_mtf.pipeline.pipeline import Pipeline


def _summary(folder):
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.slow
def test_a_run_with_sharded_updates_is_resumed_on_more_devices(launch):
    """Adam's slots lie in other shards then: checkpoints hold them whole, and losses are those without interruption."""
    adam = ["--optimizer=adam", "--learning_rate=0.002"]
    code, folder, _, err = launch("--sharded_updates", "--strategy=zero", "--compare=search", *adam, "--steps=2")
    assert code == 0, err
    graph = json.loads((folder / "graph.json").read_text())
    assert any(layer["kind"] == "update" for layer in graph["layers"])
    code, again, _, err = launch(f"--resume={folder}", "--compare=none", "--mesh=4", "--steps=2", output="again")
    assert code == 0, err
    assert json.loads((again / "config.json").read_text())["options"]["sharded_updates"]
    code, whole, _, err = launch("--strategy=data_parallel", "--compare=none", *adam, "--steps=5", output="whole")
    assert code == 0, err
    halves = {**metrics(folder, "zero"), **metrics(again, "zero")}
    assert halves == pytest.approx(metrics(whole, "data_parallel"), rel=1e-4)


def test_a_run_without_them_goes_on_with_them(launch, finished):
    code, _, _, err = launch(f"--resume={finished}", "--sharded_updates", "--strategy=zero", "--compare=none",
                               "--steps=1")
    assert code == 0, err


@pytest.mark.parametrize("flag", ["--strategy=zero", "--compare=zero"])
def test_the_arm_needs_the_flag(launch, flag):
    code, folder, _, err = launch(flag)
    assert code == 2
    assert "--sharded_updates" in err.splitlines()[-1]
    assert not folder.exists()


@pytest.mark.slow
def test_a_pipeline_shards_updates_within_its_stages(launch):
    """Beside data parallelism that does so without stages; any strategy goes on from its checkpoint."""
    code, folder, _, err = launch("--sharded_updates", "--strategy=pipeline", "--compare=zero", "--mesh=4",
                                  "--optimizer=adam", "--steps=2")
    assert code == 0, err
    pipeline = Pipeline.load(folder / "pipeline.json")
    updates = [number for number, name in enumerate(pipeline.layer_names) if name.endswith("/update")]
    assert updates
    assert all(pipeline.stage_of(number) == pipeline.stage_of(number - 1) for number in updates)
    code, _, _, err = launch(f"--resume={folder}", "--strategy=search", "--compare=none", "--steps=1", output="again")
    assert code == 0, err
