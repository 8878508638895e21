"""Whole runs: find a strategy, train every arm, write everything, resume, and every exit code."""

import collections
import dataclasses
import html
import json
import os
import shutil
import signal

import pytest
from cluster_runs import metrics
from planting import Plant, planted

from pase_mtf.compat import tf
from pase_mtf.errors import OutOfMemoryError, UsageError
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.launch.arms.arm import Arm
from pase_mtf.launch.checkpoints import checkpoint, keeping
from pase_mtf.launch.files import RunFiles
from pase_mtf.launch.summary import ArmRow
from pase_mtf.machine.machine import Machine
from pase_mtf.strategy.strategy import Strategy

ALL = ["search", "stock_data_parallel", "data_parallel", "expert"]


def _agree(found, wanted, arm):
    """Whether losses are the same: of stock Mesh-TF the first, as it reads a variable before or after the update, as it
    happens (docs/lowering.md): on a busy machine a later one was 3 % apart."""
    if arm.startswith("stock"):
        assert list(found) == list(wanted)
        found, wanted = ({min(losses): losses[min(losses)]} for losses in (found, wanted))
    return found == pytest.approx(wanted, rel=1e-4)


def _timeline(folder, kind):
    events = json.loads((folder / f"timeline-{kind}.json").read_text())["traceEvents"]
    return [event for event in events if event["ph"] == "X"]


def test_a_whole_run(launch):
    code, folder, out, err = launch("--compare=data_parallel,expert,search,random:1")
    assert (code, err) == (0, "")
    assert set(os.listdir(folder)) == {".running.lock", "config.json", "graph.json", "strategy.json", "layout.txt",
                                       "metrics.jsonl",
                                       "summary.json", "report.html", "events", "checkpoint",
                                       "timeline-predicted.json", "timeline-measured.json"}
    summary = json.loads((folder / "summary.json").read_text())
    assert list(summary["arms"]) == [*ALL, "random_0"]
    trained = [arm for arm, row in summary["arms"].items() if not row["same_as"]]
    for arm, row in summary["arms"].items():
        assert set(row) == set(ArmRow.__annotations__)
        assert row["measured_ms"] > 0
        assert row["measured_steps"] == 4
        assert row["measured_bytes"] > 0
        assert row["examples_per_second"] == pytest.approx(8e3 / row["measured_ms"])
        assert row["speedup_over_stock"] == pytest.approx(
            summary["arms"]["stock_data_parallel"]["measured_ms"] / row["measured_ms"])
        if arm != "stock_data_parallel":
            assert row["predicted_ms"] > 0
            assert row["predicted_bytes"] > 0
        losses = metrics(folder, row["same_as"] or arm)
        assert list(losses) == [0, 1, 2, 3, 4]
        assert losses[4] == row["final_loss"]
        assert _agree(losses, metrics(folder), arm)
    assert {"seconds", "optimal", "gap"} <= set(summary["search"])
    judged = summary["search"].get("simulated_rank", 2) > 1  # no place: data parallelism is as good, and simpler
    assert summary["search"]["optimal"] is not judged

    graph = ComputationGraph.load(folder / "graph.json")
    strategy = Strategy.load(folder / "strategy.json", graph)
    assert strategy.devices == 2
    config = json.loads((folder / "config.json").read_text())
    assert config["options"]["batch"] == 8
    assert sorted(os.listdir(folder / "events")) == sorted(trained)

    for word in ("TensorFlow", "a100", "data sheets", "alexnet", "parameters", "synthetic", "layers",
                 "steps: simulated" if judged else "optimal (proven)", "predicted step", "examples/s",
                 "measured memory", str(folder)):
        assert word in out
    steps = [line for line in out.splitlines() if line.startswith("step ")]
    assert len(steps) == 5 * len(trained)
    report = (folder / "report.html").read_text()
    assert strategy.table() in html.unescape(report)
    other = "predicted for 2 devices of a100, measured on 2 virtual CPU devices"
    assert f"note: {other}" in out
    assert other in report
    assert "predicted within" not in report
    assert "the chosen one filled.</p>" in report.replace("\n", " ")  # nothing of what was measured is drawn there
    assert {event["name"].rpartition(" ")[0] for event in _timeline(folder, "measured")} <= {
        event["name"].rpartition(" ")[0] for event in _timeline(folder, "predicted")} == {
        layer.name for layer in graph.layers}
    assert {event["pid"] for event in _timeline(folder, "measured")} == {0, 1}


@pytest.mark.slow
def test_a_transformer_on_text_files(launch, tmp_path, cache_dir):
    """Another model, on files of the user's: the loss falls."""
    sizes, sides = tmp_path / "transformer.json", [tmp_path / "source.txt", tmp_path / "target.txt"]
    sizes.write_text(json.dumps({"preset": "tiny", "layers": 1, "d_model": 16, "heads": 2, "d_k": 8, "d_ff": 32,
                                 "length": 8, "vocab": 300, "batch": 16, "optimizer": "adam", "learning_rate": 0.01}))
    for path, word in zip(sides, ("cat", "Katze"), strict=True):
        path.write_text("".join(f"{word} {number}\n" for number in range(40)))
    code, folder, out, err = launch("--model=transformer", f"--preset={sizes}", "--compare=expert", "--steps=20",
                                    f"--data={sides[0]},{sides[1]}")
    assert (code, err) == (0, "")
    assert f"40 sentence pairs from {sides[0]}" in out
    losses = metrics(folder)
    assert losses[20] < 0.9 * losses[0]
    assert {"strategy.json", "summary.json", "report.html", "checkpoint"} <= set(os.listdir(folder))
    same = json.loads((folder / "summary.json").read_text())["arms"]["expert"]["same_as"]
    assert losses == pytest.approx(metrics(folder, same or "expert"), rel=1e-2)


@pytest.mark.parametrize("optimizer", ["sgd", *(pytest.param(name, marks=pytest.mark.slow)
                                                for name in ("adam", "adafactor"))])
def test_resuming_continues_the_same_curve(launch, tmp_path, optimizer):
    flags = (f"--optimizer={optimizer}", "--strategy=expert", "--compare=stock_data_parallel")
    assert launch(*flags, "--steps=7", output="whole")[0] == 0
    assert launch(*flags, "--steps=3", output="first")[0] == 0
    code, folder, out, _ = launch(f"--resume={tmp_path / 'first'}", "--steps=3", output="second")
    assert code == 0
    assert "at step 4" in out
    whole = metrics(tmp_path / "whole", "expert")
    assert list(whole) == list(range(8))
    halves = {**metrics(tmp_path / "first", "expert"), **metrics(folder, "expert")}
    assert halves == pytest.approx(whole, rel=1e-6)
    # Stock Mesh-TF starts from the same checkpoint, with its variables stacked its own way.
    assert _agree(metrics(folder, "stock_data_parallel"), metrics(folder, "expert"), "stock_data_parallel")
    assert len(set(whole.values())) == 8


@pytest.mark.slow
def test_resuming_on_another_mesh(launch, finished, tmp_path):
    assert launch("--compare=none", "--steps=5", output="whole")[0] == 0
    code, folder, _, _ = launch(f"--resume={finished}", "--steps=2", "--mesh=4", "--strategy=data_parallel",
                                output="second")
    assert code == 0
    halves = {**metrics(finished), **metrics(folder, "data_parallel")}
    assert halves == pytest.approx(metrics(tmp_path / "whole"), rel=1e-4)


def test_resuming_with_other_numbers_is_refused(launch, finished):
    for flag in ("--batch=16", "--seed=3", "--optimizer=adam", "--learning_rate=1"):
        code, folder, _, err = launch(f"--resume={finished}", flag)
        assert code == 2
        assert flag.split("=")[0] in err
        assert "leave the flag out" in err
        assert not folder.exists()


def test_a_strategy_file(launch, tmp_path):
    assert launch("--search_only", "--strategy=expert", output="found")[0] == 0
    path = tmp_path / "found" / "strategy.json"
    code, folder, _, _ = launch(f"--strategy={path}", "--compare=none", "--search_only")
    assert code == 0
    assert Strategy.load(folder / "strategy.json").configurations == Strategy.load(path).configurations
    summary = json.loads((folder / "summary.json").read_text())
    assert list(summary["arms"]) == ["strategy"]


def test_a_mesh_shape_is_the_experts(launch):
    code, folder, _, _ = launch("--mesh=rows:2;cols:2", "--search_only", "--strategy=expert", "--compare=none")
    assert code == 0
    assert Strategy.load(folder / "strategy.json").devices == 4


def test_the_local_machine_is_measured_for_the_devices_of_the_run(launch, monkeypatch):
    asked = []
    monkeypatch.setattr("pase_mtf.calibration.load.load_machine",
                        lambda *arguments, again, over: asked.append((*arguments, again, over)) or Machine.load("a100"))
    code, _, out, _ = launch("--machine=local", "--prices=roofline", "--search_only")
    assert (code, asked) == (0, [(None, 2, "cpu", False, None)])
    assert "NOT the devices of this run" not in out
    assert "NOT the devices of this run" in launch("--search_only", output="other")[2]


def test_no_feasible_strategy(launch):
    code, folder, _, err = launch("--batch=7", "--mesh=4", "--strategy=expert", "--compare=none")
    assert code == 3
    assert "batch=7" in err
    assert err.count("\n") == 1
    assert not folder.exists()


@pytest.mark.parametrize("mesh", ["3", pytest.param("a:2;b:3", marks=pytest.mark.slow)])
def test_devices_that_do_not_divide_the_batch(launch, mesh):
    code, folder, out, err = launch(f"--mesh={mesh}", "--compare=data_parallel,expert,search", "--steps=3")
    assert (code, err) == (0, "")
    devices, used = {"3": (3, 2), "a:2;b:3": (6, 4)}[mesh]
    assert f"does not split over {devices} devices: over {used} of them, {devices - used} idle" in out
    summary = json.loads((folder / "summary.json").read_text())
    assert f"has no strategy for {devices} devices: over {used} of them, {devices - used} idle" in out
    for arm in (f"stock_data_parallel_{used}", f"data_parallel_{used}", f"expert_{used}"):
        row = summary["arms"][arm]  # where data parallelism is as good the search takes it
        assert _agree(metrics(folder, row["same_as"] or arm), metrics(folder), arm)
        assert row["measured_ms"] > 0
    assert summary["arms"]["search"]["speedup_over_stock"] > 0
    assert summary["left_out"] == {}
    assert f"of {devices} devices do useful work" in out
    assert 1 <= summary["search"]["useful_devices"] < devices


def test_predicted_out_of_memory(launch, tmp_path):
    path = tmp_path / "small.json"
    dataclasses.replace(Machine.load("a100"), name="small", memory_bytes=1000.0).save(path)
    code, _, _, err = launch(f"--machine={path}")
    assert code == 3
    assert "memory limit of 1000 bytes per device" in err
    assert err.count("\n") == 1
    code, _, _, err = launch(f"--machine={path}", "--strategy=data_parallel")
    assert code == 4
    assert "arm data_parallel: needs" in err
    assert err.count("\n") == 1
    code, _, _, err = launch(f"--machine={path}", "--memory_limit=1GB")
    assert code == 4
    assert "machine small" in err


def test_out_of_memory_of_the_host(launch, monkeypatch):
    monkeypatch.setattr("pase_mtf.launch.arms.memory.available_bytes", lambda: 1000)
    code, _, _, err = launch()
    assert code == 4
    assert "are free" in err


@pytest.mark.slow
def test_out_of_memory_while_training():
    """TensorFlow's own refusal, of a tensor beyond any address space."""
    arm = Arm.__new__(Arm)
    with tf.Graph().as_default():
        size = tf.placeholder(tf.int64, [])
        huge = tf.reduce_sum(tf.fill([size], 1.0))
        arm.name, arm._session, arm._board = "search", tf.Session(), None
    with pytest.raises(OutOfMemoryError, match=r"arm search: out of memory.*OOM when allocating") as caught:
        arm._run(huge, {size: 2**46})
    assert "\n" not in str(caught.value)


def test_a_strategy_of_another_graph(launch, finished):
    code, folder, _, err = launch(f"--strategy={finished / 'strategy.json'}", "--batch=16")
    assert code == 5
    assert "strategy.json" in err
    assert err.count("\n") == 1
    assert not folder.exists()


def test_a_file_of_another_graph_to_compare_with_waits_for_no_search(launch, finished, monkeypatch):
    monkeypatch.setattr("pase_mtf.launch.execution.find_strategies", lambda *_, **__: pytest.fail("searched"))
    code, folder, _, err = launch(f"--compare={finished / 'strategy.json'}", "--batch=16")
    assert code == 5
    assert "strategy.json" in err
    assert err.count("\n") == 1
    assert not folder.exists()


def test_a_strategy_for_another_number_of_devices(launch, finished):
    code, _, _, err = launch(f"--strategy={finished / 'strategy.json'}", "--mesh=4")
    assert code == 5
    assert "use --mesh=2" in err


def test_a_wrong_strategy_ends_the_run(launch):
    """An all-reduce is missing: the summed loss is that of one device's examples."""
    with planted(Plant("all-reduce", 0)):
        code, folder, out, err = launch("--strategy=data_parallel", "--compare=stock_data_parallel",
                                        "--checkpoint_every=1")
    assert code == 6
    assert err.startswith("error: losses differ at step 0: stock_data_parallel")
    assert "in float64 data_parallel computes something else than one device does" in err
    assert "settling in float64" in out
    assert json.loads((folder / "summary.json").read_text())["status"] == "losses disagree"
    report = (folder / "report.html").read_text()
    assert "Losses disagree" in report
    assert '<p class="headline">' not in report
    assert not (folder / "checkpoint").exists()


@pytest.mark.parametrize("wrong", [False, True])
def test_what_was_found_is_told_though_it_cannot_be_written(launch, monkeypatch, wrong):
    write = RunFiles.write

    def full(self, name, text):
        if name == "report.html":
            raise UsageError(f"cannot write {name}: No space left on device; free space or choose another place")
        write(self, name, text)
    monkeypatch.setattr(RunFiles, "write", full)
    if wrong:
        with planted(Plant("all-reduce", 0)):
            code, _, out, err = launch("--strategy=data_parallel", "--compare=stock_data_parallel")
    else:
        code, _, out, err = launch("--compare=none", "--steps=1")
    assert (code, "measured ms" in out, "No space left" in err) == (6 if wrong else 2, True, True)
    assert ("in float64 data_parallel computes something else" in err) == wrong


@pytest.mark.slow
def test_rounding_is_no_alarm(launch, monkeypatch):
    """Losses that look wrong and are not: settled in float64, said once, and silent from then on."""
    step, taken = Arm.step, collections.Counter()

    def wandering(self, batch, trace=False):
        loss, seconds = step(self, batch, trace)
        taken[self] += 1
        wanders = self.name == "data_parallel" and self._loss.dtype == tf.float32 and taken[self] > 2
        return loss * (1.5 if wanders else 1.0), seconds
    monkeypatch.setattr(Arm, "step", wandering)
    code, folder, out, err = launch("--strategy=data_parallel", "--compare=random:1", "--steps=12")
    assert (code, err) == (0, "")
    notes = [line for line in out.splitlines() if line.startswith("note: losses differ at step 2: ")]
    assert len(notes) == 1
    assert notes[0].endswith("rounding, no error; in float64 all arms compute what one device does (3 steps)")
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["disagreement"]) == ("done", None)
    assert f"note: {summary['note']}" == notes[0]
    assert (folder / "checkpoint").exists()


def test_resuming_compares_with_the_run_before(launch, finished, tmp_path):
    """On another mesh, with one arm: the loss at the checkpoint is known."""
    with planted(Plant("all-reduce", 0)):
        code, folder, _, err = launch(f"--resume={finished}", "--steps=2", "--mesh=4", "--strategy=data_parallel",
                                      "--compare=none", output="second")
    assert code == 6
    assert "losses differ at step 3: the run before" in err
    assert "in float64 data_parallel computes something else" in err
    assert not (folder / "checkpoint").exists()


@pytest.mark.slow
def test_resuming_with_other_data_is_told_from_a_wrong_strategy(launch, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "first")
    manifest, = (tmp_path / "first" / "checkpoint").glob("*/checkpoint.json")
    contents = json.loads(manifest.read_text())
    contents["next_loss"] *= 1.1
    contents["sha256"] = checkpoint._own_hash(contents)
    manifest.write_text(json.dumps(contents))
    code, _, _, err = launch(f"--resume={tmp_path / 'first'}", "--steps=2", output="second")
    assert code == 6
    assert "every arm of this run is right" in err
    assert "the data is not what the run before had" in err
    # An earlier version, which took the examples in another order, is no reproach.
    del contents["order"]
    contents["sha256"] = checkpoint._own_hash(contents)
    manifest.write_text(json.dumps(contents))
    assert launch(f"--resume={tmp_path / 'first'}", "--steps=2", "--compare=none", output="third")[0] == 0


def test_a_loss_that_is_not_finite(launch):
    code, folder, _, err = launch("--learning_rate=1e30", "--compare=stock_data_parallel", "--steps=50")
    assert code == 2
    assert "--learning_rate=1e+30: the loss of search is not finite" in err
    assert json.loads((folder / "summary.json").read_text())["status"] == "diverged"
    assert len(metrics(folder)) < 50
    assert not (folder / "checkpoint").exists()


@pytest.mark.parametrize(("optimizer", "says"), [
    ("sgd", "--learning_rate=0.05: the loss of search is not finite at step 3; take a smaller one"),
    ("adafactor", "the loss of search is not finite at step 3 with the rates of adafactor itself; give a "
                  "--learning_rate, a small one, or another --optimizer")])
def test_a_run_whose_last_update_drives_the_loss_away(launch, monkeypatch, optimizer, says):
    """All its losses are finite, and the one after them is not: there is nothing to keep."""
    monkeypatch.setattr(Arm, "loss", lambda self, batch: float("nan"))
    code, folder, out, err = launch("--compare=none", f"--optimizer={optimizer}", "--steps=2")
    assert (code, err) == (2, f"error: {says}\n")
    assert json.loads((folder / "summary.json").read_text())["status"] == "diverged"
    assert "measured ms" in out
    assert not (folder / "checkpoint").exists()


def test_a_resumed_run_that_diverges_is_to_start_anew(launch, finished, monkeypatch):
    """The rate of a training cannot be changed while it goes on."""
    monkeypatch.setattr(Arm, "loss", lambda self, batch: float("nan"))
    assert "; start anew with a smaller one" in launch(f"--resume={finished}", "--steps=1", output="again")[3]


def test_a_full_disk_ends_no_training(launch, monkeypatch):
    """A checkpoint on the way that cannot be written is a line; the one at the end the error of the run."""
    def full(folder, save, **more):
        raise UsageError(f"cannot write {folder}: No space left on device; free space or choose another place")
    monkeypatch.setattr(keeping, "save_checkpoint", full)
    code, folder, out, err = launch("--compare=none", "--checkpoint_every=2")
    assert code == 2
    assert [line.split(":")[0] for line in err.splitlines()] == ["warning", "warning", "error"]
    assert "no checkpoint at step 2: cannot write" in err
    assert json.loads((folder / "summary.json").read_text())["status"] == "not kept"
    assert "measured ms" in out


def test_a_diverged_training_drives_no_checkpoint_out(launch, finished, tmp_path, monkeypatch):
    """Neither on the way nor at the end: what it began with is what the next try begins with."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    monkeypatch.setattr(Arm, "loss", lambda self, batch: float("nan"))
    code, folder, _, err = launch(f"--resume={run}", "--steps=3", "--checkpoint_every=1")
    assert (code, folder) == (2, run)
    assert "no checkpoint at step 5: the loss of search is not finite there" in err
    assert os.listdir(run / "checkpoint") == ["step-3"]


def test_never_overwrites(launch, finished):
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    code, _, _, err = launch("--search_only", f"--output_dir={finished}")
    assert code == 2
    assert "never overwritten" in err
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before


def test_bad_data(launch):
    code, folder, _, err = launch("--data=/no/such/images")
    assert code == 2
    assert "/no/such/images" in err
    assert err.count("\n") == 1
    assert not folder.exists()


def test_a_truncated_checkpoint(launch, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "first")
    data, = (tmp_path / "first" / "checkpoint").glob("*/model.data-00000-of-00001")
    data.write_bytes(data.read_bytes()[:100])
    code, folder, _, err = launch(f"--resume={tmp_path / 'first'}", output="second")
    assert code == 2
    assert "has 100 bytes" in err
    assert not folder.exists()


def test_an_interrupted_run_whose_checkpoint_is_lost_says_so(launch, monkeypatch):
    def full(folder, save, **more):
        raise UsageError(f"cannot write {folder}: No space left on device; free space or choose another place")
    known = RunFiles.metric

    def metric(self, record):
        known(self, record)
        if record.step == 2:
            signal.raise_signal(signal.SIGTERM)
    monkeypatch.setattr(keeping, "save_checkpoint", full)
    monkeypatch.setattr(RunFiles, "metric", metric)
    code, folder, _, _ = launch("--compare=none")
    assert (code, json.loads((folder / "summary.json").read_text())["status"]) == (2, "not kept")
