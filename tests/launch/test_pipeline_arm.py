"""Runs with a pipeline among their arms: its losses, its numbers, and why there may be none."""

import json

import pytest
from micro_models import SIZES

from pase_mtf.launch.options import Options
from pase_mtf.launch.plan import resolve
from pase_mtf.launch.strategies.pipelining import find_pipelines
from pase_mtf.launch.summary import read_summary
from pase_mtf.machine.machine import Machine
from pase_mtf.models import microbatches
from pase_mtf.pipeline.pipeline import Pipeline


def _losses(folder, arm):
    entries = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [entry["loss"] for entry in entries if entry["arm"] == arm]


def _preset(tmp_path, model, **changes):
    path = tmp_path / f"{model}.json"
    path.write_text(json.dumps({**SIZES[model], "preset": "tiny", **changes}))
    return f"--model={model}", f"--preset={path}"


def test_it_trains_beside_the_others(launch):
    code, folder, out, err = launch("--compare=pipeline,data_parallel", "--steps=3")
    assert code == 0, err
    summary = read_summary(folder / "summary.json")
    row, search = summary["arms"]["pipeline"], summary["arms"]["search"]
    pipeline = Pipeline.load(folder / "pipeline.json")
    assert (row["stages"], row["microbatches"]) == (len(pipeline.stages), pipeline.microbatches) == (2, 2)
    assert row["predicted_ms"] == row["simulated_ms"] == pytest.approx(1e3 * pipeline.seconds)
    assert row["predicted_bytes"] == pipeline.memory_bytes
    assert row["measured_ms"] > 0
    assert search["stages"] is None
    assert summary["disagreement"] is None
    assert _losses(folder, "pipeline") == pytest.approx(_losses(folder, "search"), rel=1e-4)
    assert pipeline.table() in out
    assert pipeline.statement in (folder / "report.html").read_text()


@pytest.mark.slow
def test_a_transformer_in_as_many_microbatches_as_all_arms(launch, tmp_path):
    code, folder, _, err = launch(*_preset(tmp_path, "transformer", dropout=0.1), "--compare=pipeline", "--mesh=4",
                                  "--microbatches=4", "--optimizer=adam", "--steps=2")
    assert code == 0, err
    row = read_summary(folder / "summary.json")["arms"]["pipeline"]
    assert row["microbatches"] == 4
    assert _losses(folder, "pipeline") == pytest.approx(_losses(folder, "search"), rel=1e-4)


def test_a_run_without_one_goes_on_beside_one(launch, finished):
    code, folder, _, err = launch(f"--resume={finished}", "--compare=pipeline", "--steps=2")
    assert code == 0, err
    assert _losses(folder, "pipeline") == pytest.approx(_losses(folder, "search"), rel=1e-4)


def test_a_wrong_one_is_caught(launch, monkeypatch):
    """Its second microbatch is the first once more."""
    right = microbatches._one_imported
    monkeypatch.setattr(microbatches, "_one_imported", lambda *rest: right(*rest[:-1], 0))
    code, folder, _, err = launch("--compare=pipeline", "--steps=2")
    assert code == 6
    assert "in float64 pipeline computes something else than one device does" in err
    assert read_summary(folder / "summary.json")["status"] == "losses disagree"


@pytest.mark.parametrize(("flags", "reason"), [
    (["--mesh=1"], "stages need two devices; take a larger --mesh than 1"),
    (["--sharded_updates"], "its updates are not sharded; leave out --sharded_updates"),
    (["--batch=7"], "--batch=7 does not split into microbatches"),
    ("resnet101", "resnet101 normalises over the batch, so that microbatches are another model"),
    ("transformer", "give --microbatches, so that all arms draw the same")])
def test_it_is_left_out_where_it_cannot_be(launch, tmp_path, flags, reason):
    if isinstance(flags, str):
        flags = _preset(tmp_path, flags, dropout=0.1)
    code, folder, out, err = launch("--compare=pipeline", "--search_only", *flags)
    assert code == 0, err
    summary = read_summary(folder / "summary.json")
    assert reason in summary["left_out"]["pipeline"]
    assert "pipeline" not in summary["arms"]
    assert f"pipeline is left out: {summary['left_out']['pipeline']}" in out


def test_it_keeps_to_the_memory(preset):
    plan = resolve(Options(model="alexnet", preset=preset, mesh="2", devices="cpu", machine="a100",
                           compare="pipeline", memory_limit="1kB"))
    found, left_out = find_pipelines(plan, plan.options.arms, Machine.load("a100"), None, 0.0)
    assert found == {}
    assert "no pipeline of two or more stages on 2 devices within 1000 bytes each" in left_out["pipeline"]


def test_it_is_trained_kept_and_resumed(launch):
    """By itself, then beside the others, from what it kept."""
    code, folder, out, err = launch("--strategy=pipeline", "--compare=none", "--steps=2")
    assert code == 0, err
    pipeline = Pipeline.load(folder / "pipeline.json")
    assert list(read_summary(folder / "summary.json")["arms"]) == ["pipeline"]
    assert not (folder / "strategy.json").exists()
    assert out.count(pipeline.table()) == (folder / "report.html").read_text().count(pipeline.statement) == 1
    layout = (folder / "layout.txt").read_text()
    assert all(f"{name}: mesh_shape = " in layout for name in pipeline.layer_names)
    assert "# stage 2: devices 1 to 1" in layout
    code, again, _, err = launch(f"--resume={folder}", "--compare=data_parallel", "--steps=2", output="again")
    assert code == 0, err
    summary = read_summary(again / "summary.json")
    assert next(iter(summary["arms"])) == "pipeline"
    assert summary["first_step"] == 3
    assert summary["note"] is None
    assert _losses(again, "pipeline") == pytest.approx(_losses(again, "data_parallel"), rel=1e-4)


def test_a_trained_one_that_is_wrong_is_caught(launch, monkeypatch):
    right = microbatches._one_imported
    monkeypatch.setattr(microbatches, "_one_imported", lambda *rest: right(*rest[:-1], 0))
    code, _, _, err = launch("--strategy=pipeline", "--compare=search", "--steps=2")
    assert code == 6
    assert "in float64 pipeline computes something else than one device does" in err


@pytest.mark.parametrize(("flags", "reason"), [
    (["--mesh=1"], "stages need two devices; take a larger --mesh than 1"),
    (["--sharded_updates"], "its updates are not sharded; leave out --sharded_updates"),
    (["--batch=7"], "--batch=7 does not split into microbatches; take one that has small divisors"),
    (["--recompute=all"], "it computes no block again; leave out --recompute=all"),
    (["--microbatches=auto"], "it is searched for its number of microbatches; leave out --microbatches=auto, or give a "
                              "number")])
def test_what_a_trained_one_cannot_be_combined_with_is_told(launch, flags, reason):
    code, folder, _, err = launch("--strategy=pipeline", *flags)
    assert code == 2
    assert err.splitlines()[-1] == f"error: --strategy=pipeline: {reason}"
    assert not folder.exists()


def test_a_trained_one_within_too_little_memory(launch):
    code, folder, _, err = launch("--strategy=pipeline", "--compare=none", "--memory_limit=1kB")
    assert code == 3
    assert "no pipeline of two or more stages on 2 devices within 1000 bytes each" in err.splitlines()[-1]
    assert not folder.exists()
