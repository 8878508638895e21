"""The page on time to a trained model: curves as they were measured, projections, pictures."""

import json
import types

import pytest
from markdown_cells import rows

from benchmarks import epochs, epochs_document, epochs_plot
from pase_mtf.epochs.step_times import StepTimes
from pase_mtf.errors import FormatError

_SETTINGS = {"data": "made up", "sizes": {"preset": "micro.json", "optimizer": "sgd"}, "examples": 64, "held_out": 16,
             "target": 1.0, "rate": 0.1, "rate_batch": 8, "rule": "sqrt", "warmup": 0.5, "cap": 9.0, "piece": 8}


@pytest.fixture
def results():
    """As of a benchmark whose workers cost each other nothing, and whose epochs double with every batch."""
    seconds = [[workers, ways, 0.1 / (1.0 if ways == 1 else 0.75 * ways)] for workers, ways in epochs_document.MIXES]
    runs = [[batch, seed, 2.0 * batch / 16 + 0.5 * seed, 1] for batch in (16, 32, 64) for seed in (0, 1, 2)]
    facts = {"machine": "Chip", "versions": "Python", "commit": "abc"}
    curve = {"settings": _SETTINGS, "runs": runs, "facts": facts}
    return {"facts": facts, "curves": dict.fromkeys(epochs_document.CURVES, curve),
            "steps": [{"model": "gnmt", "machine": "h100", "worker_batch": 8, "fits": True, "seconds": seconds}]}


def test_the_page_has_curves_and_projections(results):
    text = epochs_document.document(results)
    table = rows(text)
    assert ["16", "2.50", "2.00 to 3.00", "1.00", "1.000", "3 of 3"] in table
    assert ["64", "8.50", "8.00 to 9.00", "3.40", "0.850", "3 of 3"] in table
    # The curve's batch 16 becomes that of 1 worker (8 examples), or of 8: on so few devices nothing is known then.
    projection = epochs_document.projection_of(results, results["steps"][0], 1)
    assert projection.curve.batches == (8, 16, 32)
    first, second = projection.points[:2]
    assert first.data_parallel.epochs.median == 2.5
    assert second.gain.value == pytest.approx(1.5 * 4.5 / 2.5 / 2)
    beyond = epochs_document.projection_of(results, results["steps"][0], 8)
    assert beyond.points[0].best is None
    assert f"ahead from {projection.hybrid_from} devices on" in text
    assert f"and from {beyond.hybrid_from} where it is that of eight" in text


def test_curves_keep_where_they_were_measured(tmp_path):
    paths = {name: tmp_path / f"{name}.csv" for name in ("alexnet", "transformer")}
    for path in paths.values():
        path.write_text(f"# {json.dumps(_SETTINGS)}\nbatch,seed,epochs,reached\n16,0,2.0,1\n")
    first = epochs_document.curves_of(paths, {}, {"commit": "first"})
    assert [curve["facts"]["commit"] for curve in first.values()] == ["first", "first"]
    with paths["transformer"].open("a") as file:
        file.write("32,0,3.0,1\n")
    second = epochs_document.curves_of(paths, json.loads(json.dumps(first)), {"commit": "second"})
    assert [curve["facts"]["commit"] for curve in second.values()] == ["first", "second"]


def test_the_page_tells_which_curves_are_of_an_earlier_order(results):
    title = epochs_document.CURVES["alexnet"]
    for version, told in ((1, True), (2, False)):
        settings = {**_SETTINGS, "version": version}
        curves = {**results["curves"], "alexnet": {**results["curves"]["alexnet"], "settings": settings}}
        text = epochs_document.document({**results, "curves": curves})
        assert (f"Measured with an earlier order of examples: {title}. " in text) == told
        assert ("a spread of zero, or a small one, may be due to that" in text) == told


def test_curves_of_an_earlier_order_are_projected_and_not_added_to(results, tmp_path, monkeypatch, capsys):
    for number, name in enumerate(epochs_document.CURVES):
        (tmp_path / f"epochs-{name}.csv").write_text(
            f"# {json.dumps({**_SETTINGS, 'version': 2 if number else 1})}\nbatch,seed,epochs,reached\n16,0,2.0,1\n"
            "32,0,3.0,1\n64,0,5.0,1\n", encoding="utf-8")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    old, *others = epochs_document.CURVES
    asked = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(epochs, "ROOT", tmp_path)  # where the command goes, and puts its texts
    monkeypatch.setattr(epochs, "epochs_command", lambda flags: asked.append(flags[1]) or 0)
    monkeypatch.setattr(epochs, "prepare_data", lambda model, folder: ([], "made up"))
    monkeypatch.setattr(epochs, "_project", lambda found, names: found.update(steps=results["steps"]))
    assert epochs.main([f"--output={tmp_path}"]) == 0
    assert asked == [f"--model={name}" for name in others]
    line, = capsys.readouterr().err.splitlines()
    assert f"epochs-{old}.csv: measured with examples in an earlier order" in line
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert "earlier order of examples: AlexNet" in (tmp_path / "epochs.md").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "epochs.json").read_text(encoding="utf-8"))["steps"] == results["steps"]
    # A curve that is none is told in a line.
    (tmp_path / f"epochs-{old}.csv").write_text("batch,epochs\n16,2.0\n", encoding="utf-8")
    assert epochs.main([f"--output={tmp_path}"]) == 2
    assert "its first line tells no settings" in capsys.readouterr().err


def test_workers_that_cost_nothing(results):
    results["steps"][0]["seconds"] = [[workers, ways, seconds * workers] for workers, ways, seconds
                                      in results["steps"][0]["seconds"]]
    free = epochs_document.projection_of(results, results["steps"][0], 1, free=True)
    assert {mix.step.seconds for point in free.points for mix in point.mixes if mix.ways == 1} == {0.1}


def test_pictures_are_drawn(results, tmp_path):
    epochs_plot.draw_page(results, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epochs-gnmt.svg", "epochs.svg"]


def test_files_of_the_benchmark(results, tmp_path):
    path = tmp_path / "epochs.json"
    assert epochs.load(path)["steps"] == []
    path.write_text(json.dumps({"format": epochs.FORMAT, "version": epochs.VERSION, **results}))
    assert epochs.load(path)["steps"] == results["steps"]
    path.write_text("{}")
    with pytest.raises(FormatError):
        epochs.load(path)


def test_models_without_a_projection_are_told_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    """Their rows were kept, and no page could be made of the file any more."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(epochs, "_measure", None)
    assert epochs.main(["--models=gnmt,transformer", f"--output={tmp_path}"]) == 2
    line, = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --models=gnmt,transformer: no projection of 'transformer' is known; ")
    assert not list(tmp_path.iterdir())


def test_steps_that_stay_keep_where_they_were_predicted(results, tmp_path, monkeypatch):
    """A run for one model claimed the rows of all."""
    for name in epochs_document.CURVES:
        (tmp_path / f"epochs-{name}.csv").write_text(
            f"# {json.dumps(_SETTINGS)}\nbatch,seed,epochs,reached\n16,0,2.0,1\n32,0,3.0,1\n64,0,5.0,1\n")
    (tmp_path / "epochs.json").write_text(json.dumps({"format": epochs.FORMAT, "version": epochs.VERSION, **results}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(epochs, "ROOT", tmp_path)
    monkeypatch.setattr(epochs, "facts", lambda: {"machine": "Other", "versions": "Python", "commit": "def"})
    monkeypatch.setattr(epochs, "_project", lambda found, names: found["steps"].append(
        {**results["steps"][0], "machine": "a100"}))
    assert epochs.main(["--sections=project", "--models=gnmt", f"--output={tmp_path}"]) == 0
    page = (tmp_path / "epochs.md").read_text(encoding="utf-8")
    assert "Steps predicted on Chip; Python; commit abc / Other; Python, TensorFlow" in page


def test_a_curve_that_is_missing_is_told_before_anything_is_priced(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(epochs, "ROOT", tmp_path)
    monkeypatch.setattr(epochs, "_project", lambda *given: pytest.fail("steps were priced"))
    assert epochs.main(["--sections=project", f"--output={tmp_path}"]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_a_model_that_is_named_twice_is_priced_once(tmp_path, monkeypatch):
    for name in epochs_document.CURVES:
        (tmp_path / f"epochs-{name}.csv").write_text(
            f"# {json.dumps(_SETTINGS)}\nbatch,seed,epochs,reached\n16,0,2.0,1\n32,0,3.0,1\n64,0,5.0,1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(epochs, "ROOT", tmp_path)
    monkeypatch.setattr(epochs, "graph_exporter", lambda name, preset: lambda batch: None)
    monkeypatch.setattr(epochs, "find_strategy", lambda *given, **named: types.SimpleNamespace(memory_bytes=1.0))
    monkeypatch.setattr(epochs, "predict_steps", lambda graph_of, batch, mixes, sheet: StepTimes(
        batch, dict.fromkeys(mixes, 0.1)))
    assert epochs.main(["--sections=project", "--models=gnmt,gnmt", f"--output={tmp_path}"]) == 0
    steps = json.loads((tmp_path / "epochs.json").read_text())["steps"]
    assert [(row["model"], row["machine"]) for row in steps] == [("gnmt", "h100"), ("gnmt", "a100")]
