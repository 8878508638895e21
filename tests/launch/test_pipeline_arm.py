"""Runs with a pipeline among their arms: its losses, its numbers, and why there may be none."""

import dataclasses
import json
import re
import types

import pytest
from micro_models import SIZES

from pase_mtf.launch import execution
from pase_mtf.launch.__main__ import main
from pase_mtf.launch.arms.recipe import microbatch_of
from pase_mtf.launch.command_line import parse_command_line
from pase_mtf.launch.options import Options
from pase_mtf.launch.plan import resolve
from pase_mtf.launch.possible import counts_of_microbatches
from pase_mtf.launch.strategies import pipelining
from pase_mtf.launch.strategies.finding import Found
from pase_mtf.launch.strategies.pipelining import find_pipelines
from pase_mtf.launch.summary import read_summary
from pase_mtf.machine.machine import Machine
from pase_mtf.models import microbatches
from pase_mtf.pipeline.find import NoPipelineError
from pase_mtf.pipeline.pipeline import Pipeline

_NOTHING_FITS = (
    r": no pipeline of two or more stages on 2 devices within 1000 B each; every one needs at least [\d.]+ [KM]iB; "
    r"take a larger --memory_limit than 1kB, a smaller --batch or --preset, or more devices$")


def _losses(folder, arm):
    entries = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [entry["loss"] for entry in entries if entry["arm"] == arm]


def _preset(tmp_path, model, **changes):
    path = tmp_path / f"{model}.json"
    path.write_text(json.dumps({**SIZES[model], "preset": "tiny", **changes}))
    return f"--model={model}", f"--preset={path}"


@pytest.mark.slow
def test_it_trains_beside_the_others(launch):
    code, folder, out, err = launch("--compare=pipeline,data_parallel", "--steps=3")
    assert code == 0, err
    summary = read_summary(folder / "summary.json")
    row, search = summary["arms"]["pipeline"], summary["arms"]["search"]
    pipeline = Pipeline.load(folder / "pipeline.json")
    assert (row["stages"], row["microbatches"]) == (len(pipeline.stages), pipeline.microbatches) == (2, 2)
    assert row["pipeline_gap"] == pipeline.search["gap"]
    assert row["predicted_ms"] == row["simulated_ms"] == pytest.approx(1e3 * pipeline.seconds)
    assert row["predicted_bytes"] == pipeline.memory_bytes
    assert row["measured_ms"] > 0
    assert search["stages"] is None
    assert summary["disagreement"] is None
    assert _losses(folder, "pipeline") == pytest.approx(_losses(folder, "search"), rel=1e-4)
    assert pipeline.table() in out
    assert pipeline.statement in (folder / "report.html").read_text()


def test_the_report_shows_what_its_devices_do(launch):
    """Predicted and traced: every microbatch forward and backward on the devices of either stage."""
    code, folder, _, err = launch("--strategy=pipeline", "--compare=none", "--steps=2")
    assert code == 0, err
    pipeline = Pipeline.load(folder / "pipeline.json")
    report = (folder / "report.html").read_text()
    assert "The simulated step, device by device" in report
    assert "The traced step, device by device" in report
    stages = {device: number for number, stage in enumerate(pipeline.stages)
              for device in range(stage.offset, stage.offset + stage.devices)}
    for kind in ("predicted", "measured"):
        events = [event for event in json.loads((folder / f"timeline-{kind}.json").read_text())["traceEvents"]
                  if event["ph"] == "X" and event["cat"] == "kernels"]
        done = {(stages[event["pid"]], event["name"]) for event in events}
        for stage in range(len(pipeline.stages)):
            assert {name for of_stage, name in done if of_stage == stage} >= {
                *(f"microbatch {number + 1} {phase}" for number in range(pipeline.microbatches)
                  for phase in ("forward", "backward"))}, kind
        assert "update update" in {name for _, name in done}


@pytest.mark.slow
def test_it_trains_in_the_order_that_is_asked_for(launch):
    """And goes on in it, though without a pipeline there is none to search."""
    code, folder, _, err = launch("--compare=pipeline", "--schedule=gpipe", "--steps=2")
    assert code == 0, err
    pipeline = Pipeline.load(folder / "pipeline.json")
    assert pipeline.schedule == "gpipe"
    assert all(stage.in_flight == pipeline.microbatches for stage in pipeline.stages)
    assert _losses(folder, "pipeline") == pytest.approx(_losses(folder, "search"), rel=1e-4)
    code, again, _, err = launch(f"--resume={folder}", "--search_only", output="again")
    assert code == 0, err
    assert Pipeline.load(again / "pipeline.json").schedule == "gpipe"
    code, _, _, err = launch(f"--resume={folder}", "--search_only", "--compare=none", output="alone")
    assert code == 0, err


@pytest.mark.parametrize(("flags", "reason"), [
    (["--compare=pipeline", "--schedule=2f2b"], "--schedule=2f2b: unknown; did you mean '1f1b'? (known: 1f1b, gpipe)"),
    (["--compare=none", "--schedule=gpipe"], "--schedule=gpipe: is for a pipeline that is searched; name pipeline in "
                                             "--strategy or --compare")])
def test_an_order_of_none_is_refused(launch, flags, reason):
    code, folder, _, err = launch(*flags)
    assert code == 2
    assert err == f"error: {reason}\n"
    assert not folder.exists()


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


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "reason"), [
    (["--mesh=1"], "stages need two devices; take a larger --mesh than 1"),
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
    # What flags alone rule out is not announced in the header.
    assert re.search("^arms +(.*)$", out, re.MULTILINE)[1] == "search"


def test_it_keeps_to_the_memory(preset, monkeypatch):
    plan = resolve(Options(model="alexnet", preset=preset, mesh="2", devices="cpu", machine="a100",
                           compare="pipeline", memory_limit="1kB"))
    found, left_out = find_pipelines(plan, plan.options.arms, Machine.load("a100"), None, 0.0)
    assert found == {}
    assert re.search(_NOTHING_FITS, left_out["pipeline"])

    def none_as_yet(*given, **named):
        raise NoPipelineError("too much", "split", proven=True, limited=True, splits=True)
    with monkeypatch.context() as patched:
        patched.setattr(pipelining, "find_pipeline", none_as_yet)
        _, left_out = find_pipelines(plan, plan.options.arms, Machine.load("a100"), None, 0.0)
    assert "than 1kB, more --microbatches than 4, a smaller" in left_out["pipeline"]
    plan = plan.in_microbatches(8)  # of one example each
    _, left_out = find_pipelines(plan, plan.options.arms, Machine.load("a100"), None, 0.0)
    assert "take a larger --memory_limit than 1kB, a smaller --batch or --preset, or more" in left_out["pipeline"]


@pytest.mark.parametrize(("strategy", "shares"), [("search", [20.0, 20.0, 19.0]), ("pipeline", [40.0, 10.0, 9.0])])
def test_pipelines_share_the_seconds_for_measuring(preset, tmp_path, monkeypatch, strategy, shares):
    """Each may take of what is left; what is trained two thirds. Building a program counts, and what is not used."""
    given, now, machine = [], [100.0], Machine.load("a100")
    options = Options(model="alexnet", preset=preset, mesh="2", devices="cpu", machine="a100", compare="pipeline")
    plan = resolve(options)
    pipeline, = find_pipelines(plan, plan.options.arms, machine, None, 0.0)[0].values()
    paths = [str(tmp_path / name) for name in ("one.json", "other.json")]
    for path in paths:
        pipeline.save(path)
    plan = resolve(dataclasses.replace(options, strategy=strategy, compare=",".join(["pipeline", *paths])))

    def measured(*_, seconds, **__):
        given.append(seconds)
        now[0] += seconds
        return pipeline

    def built(*arguments):
        now[0] += len(given) == 2  # the last begins later
        return microbatch_of(*arguments)

    monkeypatch.setattr("pase_mtf.launch.strategies.finding.time.monotonic", lambda: now[0])
    for name, stand_in in (("find_measured_pipeline", measured), ("evaluate_pipeline", measured),
                           ("microbatch_of", built)):
        monkeypatch.setattr(f"pase_mtf.launch.strategies.pipelining.{name}", stand_in)
    found, left_out = find_pipelines(plan, plan.options.arms, machine, types.SimpleNamespace(meter=None), 60.0)
    assert (len(found), left_out) == (3, {})
    assert given == pytest.approx(shares)


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


@pytest.mark.slow
def test_a_trained_one_that_is_wrong_is_caught(launch, monkeypatch):
    right = microbatches._one_imported
    monkeypatch.setattr(microbatches, "_one_imported", lambda *rest: right(*rest[:-1], 0))
    code, _, _, err = launch("--strategy=pipeline", "--compare=search", "--steps=2")
    assert code == 6
    assert "in float64 pipeline computes something else than one device does" in err


@pytest.mark.parametrize(("flags", "reason"), [
    (["--mesh=1"], "stages need two devices; take a larger --mesh than 1"),
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
    assert re.search(_NOTHING_FITS, err.splitlines()[-1])
    assert not folder.exists()


@pytest.fixture(scope="module")
def kept(preset, tmp_path_factory):
    """The file of a pipeline that a run trained."""
    folder = tmp_path_factory.mktemp("kept") / "run"
    assert main(["--model=alexnet", f"--preset={preset}", "--mesh=2", "--devices=cpu", "--machine=a100", "--steps=2",
                 "--warmup=1", f"--output_dir={folder}", "--strategy=pipeline", "--compare=none"]) == 0
    return folder / "pipeline.json"


@pytest.mark.slow
def test_one_of_a_file_is_trained_kept_and_resumed(launch, kept):
    before = Pipeline.load(kept)
    code, folder, out, err = launch(f"--strategy={kept}", "--compare=data_parallel", "--machine=h100", "--steps=2")
    assert code == 0, err
    found = Pipeline.load(folder / "pipeline.json")
    assert (found.configurations, found.microbatches) == (before.configurations, before.microbatches)
    assert found.laid() == before.laid()
    assert (found.machine_name, before.machine_name) == ("h100", "a100")
    assert found.seconds < before.seconds
    assert "given, not searched" in out
    assert _losses(folder, "file_pipeline") == pytest.approx(_losses(folder, "data_parallel"), rel=1e-4)
    code, again, _, err = launch(f"--resume={folder}", "--steps=2", output="again")
    assert code == 0, err
    assert read_summary(again / "summary.json")["first_step"] == 3
    assert Pipeline.load(again / "pipeline.json").laid() == before.laid()


def test_one_of_a_file_is_compared_with(launch, kept, tmp_path):
    """And what a run searches is kept beside one that it was given."""
    code, folder, _, err = launch(f"--strategy={kept}", "--compare=pipeline", "--search_only", output="given")
    assert code == 0, err
    assert list(read_summary(folder / "summary.json")["arms"]) == ["file_pipeline", "pipeline"]
    mine = tmp_path / "summary.json"  # no name of a file is one of the run's
    mine.write_text(kept.read_text())
    code, folder, _, err = launch(f"--strategy={mine}", "--compare=pipeline", "--search_only")
    assert code == 0, err
    assert list(read_summary(folder / "summary.json")["arms"]) == ["summary", "pipeline"]
    given, searched = (Pipeline.load(folder / name) for name in ("pipeline.json", "searched_pipeline.json"))
    assert given.search["pairs"] == 0 < searched.search["pairs"]
    code, folder, _, err = launch(f"--compare={mine}", "--search_only", output="beside")
    assert code == 0, err
    assert list(read_summary(folder / "summary.json")["arms"]) == ["search", "summary"]
    assert not (folder / "pipeline.json").exists()


def test_one_of_a_file_has_its_own_number_of_microbatches(launch):
    """Also one that no search tries."""
    flags = ("--batch=7", "--compare=none", "--search_only")
    code, folder, _, err = launch("--strategy=pipeline", "--microbatches=7", *flags)
    assert code == 0, err
    code, again, _, err = launch(f"--strategy={folder}/pipeline.json", *flags, output="again")
    assert code == 0, err
    assert Pipeline.load(again / "pipeline.json").microbatches == 7


@pytest.mark.parametrize(("flags", "code", "message"), [
    (["--mesh=4"], 5, "a pipeline for 2 devices, --mesh=4 has 4; use --mesh=2, or search anew"),
    (["--batch=16"], 5, "take the flags of that run, or search anew"),
    (["--batch=7", "--compare=none"], 5, "a pipeline of 2 microbatches, --batch=7 does not split so"),
    (["--microbatches=4"], 5, "a pipeline of 2 microbatches, this run has 4; take --microbatches=2, or"),
    (["--memory_limit=1kB"], 4, "per device, 1000 B are allowed; take --strategy=pipeline"),
    (["--sharded_updates"], 5, "take the flags of that run, or search anew")])
def test_one_of_a_file_that_does_not_fit_is_told(launch, kept, flags, code, message):
    found, folder, _, err = launch(f"--strategy={kept}", *flags)
    assert message in err.splitlines()[-1]
    assert found == code
    assert not folder.exists()


def test_one_of_another_program_is_refused_before_anything_is_searched(launch, kept, monkeypatch):
    searched = []
    monkeypatch.setattr("pase_mtf.launch.execution.find_strategies", lambda *_, **__: searched.append(1))
    code, folder, _, err = launch(f"--compare={kept}", "--batch=16", "--search_only")
    assert code == 5
    assert "take the flags of that run, or search anew" in err.splitlines()[-1]
    assert not searched
    assert not folder.exists()


def test_the_program_of_a_trained_one_is_built_once_for_looking(launch, kept, monkeypatch):
    built = []
    monkeypatch.setattr("pase_mtf.launch.strategies.pipelining.microbatch_of",
                        lambda *given: built.append(given) or microbatch_of(*given))
    code, _, _, err = launch(f"--strategy={kept}", "--compare=none", "--search_only")
    assert code == 0, err
    assert len(built) == 1


def test_a_damaged_file_is_told(launch, kept, tmp_path):
    path, data = tmp_path / "mine.json", json.loads(kept.read_text())
    layers = len(data["layer_names"])
    wrong = {"stages": [{**data["stages"][0], "stop": layers, "devices": 2}],
             "configurations": [[["nothing", 2]]] * layers, "sent": []}
    for change, message in (({"stages": []}, "not a complete pipeline"), ({"version": 99}, "upgrade pase_mtf"),
                            (wrong, "cannot be split as")):
        path.write_text(json.dumps({**data, **change}))
        code, _, _, err = launch(f"--strategy={path}", "--compare=none", output=f"run{len(message)}")
        assert code != 0
        assert message in err.splitlines()[-1]


@pytest.mark.parametrize(("model", "seconds"), [("densenet121", 60.0), ("rnnlm", 40.0)])
def test_one_that_is_left_out_takes_no_time_from_the_others(monkeypatch, model, seconds):
    plan = resolve(parse_command_line([f"--model={model}", "--preset=tiny", "--mesh=2", "--devices=cpu",
                                       "--compare=pipeline"]))
    asked = []
    monkeypatch.setattr(execution, "find_strategies", lambda *given, known: asked.append(given[-1]) or Found({}, {}))
    monkeypatch.setattr(execution, "find_pipelines", lambda *given: ({}, {}))
    execution._search(types.SimpleNamespace(plan=plan, graph=None, machine=None, prices=None, fitting=None,
                                            arms=plan.options.arms))
    assert asked == [pytest.approx(seconds)]


def test_the_page_says_for_which_microbatches_it_is_searched(repository):
    options = types.SimpleNamespace(batch=15, microbatch_count=1, mesh_flag=types.SimpleNamespace(devices=8))
    assert counts_of_microbatches(options) == [3, 15]
    text = " ".join((repository / "docs" / "pipelines.md").read_text(encoding="utf-8").split())
    assert "each at least twice the one before (2, 4, 8, ... of 64 examples; 3 and 15 of 15)" in text


@pytest.mark.parametrize("more", [-1, 1])
def test_a_file_of_other_layers_than_its_graph_has_is_told(launch, kept, tmp_path, more):
    """Its lists agree with each other, and its hash is that of the graph."""
    path, data = tmp_path / "mine.json", json.loads(kept.read_text())
    for name in ("layer_names", "configurations"):
        data[name] = [*data[name], data[name][-1]] if more > 0 else data[name][:-1]
    data |= {"stages": [{**data["stages"][0], "stop": len(data["layer_names"])}], "sent": []}
    path.write_text(json.dumps(data))
    code, folder, _, err = launch(f"--strategy={path}", "--compare=none", "--search_only")
    assert code == 5
    assert "mine.json: lists other layers than graph" in err.splitlines()[-1]
    assert not folder.exists()
