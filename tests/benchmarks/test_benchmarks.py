import json
import os
import runpy
import subprocess

import pytest
from markdown_cells import row_of, rows

from benchmarks import accuracy, launching, speedup
from benchmarks.accuracy import agreement, points, together
from benchmarks.commands import check_results
from benchmarks.launching import losses_agree_to, replace_block, run_launcher
from benchmarks.speedup import document, planned
from benchmarks.speedup_rows import ARMS, Row, Rows, compact_table, full_table
from pase_mtf.calibration.cache import fingerprint_of_kernels, kernels_path
from pase_mtf.machine.kernel_file import append_times
from pase_mtf.machine.kernel_table import load_tables
from pase_mtf.machine.kernels import TINY, Timing

_HOST = "Chip (2 cores)"


def _row(measured, predicted, same_as=None, **more):
    return {"measured_ms": measured, "measured_ms_spread": 1.4, "predicted_ms": predicted, "same_as": same_as,
            "measured_steps": 30, **more}


@pytest.fixture
def summary():
    return {"model": "alexnet", "preset": "tiny", "batch": 64, "devices": 8, "search": {"seconds": 0.123},
            "losses_agree_to": 2.6e-6,
            "facts": {"devices": "8 virtual CPU devices on Chip (2 cores)", "versions": "TensorFlow 9",
                      "machine": "local: kernels measured on Chip"},
            "arms": {"search": _row(100, 90, speedup_over_stock=5.0, speedup_over_data_parallel=3.5),
                     "stock_data_parallel": _row(500, None), "data_parallel": _row(350, 360),
                     "expert": _row(100, 90, same_as="search")}}


def test_what_the_launcher_left_out_is_told(summary):
    """Its cell was a dash that nobody explained, and --arms= measured the row anew every time."""
    row = Row({**summary, "left_out": {"auto_mtf": "needs ortools"}}, "pictures")
    assert "alexnet on 8 devices without auto_mtf: needs ortools." in document([row], full_table([row]))
    assert row.holds(["search", "auto_mtf"])


def test_tables(summary):
    row = Row({**summary, "wall_seconds": 61.7}, "pictures", "abc1234", {"auto_mtf": "no answer"})
    text = document([row], compact_table([row]))
    assert row_of(text, "alexnet (tiny, batch 64)")[1:] == [
        "8", "500 ± 1 ms", "350 ± 1 ms", "100 ± 1 ms (same)", "100 ± 1 ms", "5.00×", "3.50×", "4.00×", "0.12 s"]
    for word in ("median of 30 steps", "Chip (2 cores)", "TensorFlow 9", "alexnet: pictures", "commit abc1234",
                 "the losses of all arms agree", "alexnet on 8 devices without auto_mtf: no answer",
                 "The longest of these 1 runs of the launcher, alexnet on 8 devices, took 62 s in all"):
        assert word in text
    assert row_of(full_table([row]), "alexnet")[1:] == [
        "64", "8", "500 ± 1", "-", "350 ± 1", "100 ± 1 (same)", "-", "-", "-", "100 ± 1", "5.00×", "3.50×", "4.00×",
        "1.00× (expert)", "yes, to 3e-06", "0.12 s", "Chip (2 cores)", "abc1234"]


def test_rows_of_prices_that_are_no_more_are_told(summary):
    earlier = Row({**summary, "facts": {**summary["facts"], "machine": "local: measured here on Chip"},
                   "model": "rnnlm"}, "words")
    rows = [earlier, Row(summary, "pictures")]
    assert ("1 of these 2 rows were searched and predicted by a model that was fitted to the machine, and that is no "
            "more; by measured kernels: alexnet on 8.") in document(rows, compact_table(rows))
    assert "fitted" not in document(rows[1:], compact_table(rows[1:]))


def test_a_plain_model_under_mirrored_strategy_is_a_rival(summary):
    """Where it can be had, and is asked for."""
    row = Row(summary, "pictures", mirrored=[310.0, 290.0, 300.0])
    assert row.over_best_rival() == (1.0, "expert")
    assert row.speedup("mirrored") == 3
    assert row_of(full_table([row]), "alexnet")[4] == "300 ± 5"
    assert row.holds(["search", "mirrored"])
    assert not Row(summary, "pictures").holds(["search", "mirrored"])
    assert Row({**summary, "model": "rnnlm"}, "pictures").holds(["search", "mirrored"])


def test_losses_that_differ_are_told(summary):
    row = Row({**summary, "disagreement": "losses disagree at step 3"}, "pictures")
    text = document([row], full_table([row]))
    assert "**no**, to 3e-06" in row_of(text, "alexnet")
    assert "alexnet on 8 devices: losses disagree at step 3." in text
    assert "losses of all arms agree" not in text
    assert not row.holds(["search"])


def test_rows_stay_until_they_are_measured_anew(summary, tmp_path):
    def row(devices, batch, data):
        return Row({**summary, "devices": devices, "batch": batch}, data)

    rows = Rows(str(tmp_path / "new" / "rows.json"))
    for devices, batch in ((16, 64), (8, 32), (8, 64)):
        rows.add(row(devices, batch, "old"))
    rows = Rows(rows.path)
    rows.add(row(8, 64, "new"))
    assert [(*found.key[1:3], found.data) for found in Rows(rows.path)] == [
        (8, 32, "old"), (8, 64, "new"), (16, 64, "old")]
    assert rows.get("alexnet", 8, 64, _HOST).holds(["search", "expert"])
    assert not rows.get("alexnet", 8, 64, _HOST).holds(["search", "mcmc"])
    assert rows.get("alexnet", 4, 64, _HOST) is None
    assert rows.get("alexnet", 8, 64, "another") is None
    other = row(8, 64, "of another machine")
    other.summary["facts"] = {**summary["facts"], "devices": "8 virtual CPU devices on another"}
    rows.add(other)
    assert rows.get("alexnet", 8, 64, _HOST).data == "new"
    assert [found.data for found in speedup._of_one_processor(list(Rows(rows.path)))] == ["old", "new", "old"]


def test_the_plan_begins_with_one_mesh_of_all_models():
    assert planned(["rnnlm", "alexnet"], [8, 4], [None]) == [
        ("rnnlm", 8, 16), ("alexnet", 8, 64), ("rnnlm", 4, 16), ("alexnet", 4, 64)]
    assert planned(["alexnet"], [8], [16, 32]) == [("alexnet", 8, 16), ("alexnet", 8, 32)]


def test_what_is_measured_already_is_not_measured_again(summary, tmp_path, monkeypatch, capsys):
    runs, plot = [], speedup.plot

    def plot_once(rows, path):
        if not os.path.exists(path):
            plot(rows, path)

    def run(flags, allowed):
        runs.append(flags)
        if "--mesh=4" in flags and "auto_mtf" in flags[7]:
            raise RuntimeError("launcher exited with 3: error: arm auto_mtf: no answer; leave it out")
        arms = {name: summary["arms"]["search"] for name in ("stock_data_parallel", *ARMS)}
        if "--mesh=4" in flags:
            del arms["auto_mtf"]
        facts = {**summary["facts"], "data": "pictures"}
        return {**summary, "devices": int(flags[2].partition("=")[2]), "facts": facts, "arms": arms,
                "wall_seconds": 1.0}

    mirrored = []
    monkeypatch.setattr(speedup, "run_launcher", run)
    monkeypatch.setattr(speedup, "_mirrored", lambda *row: mirrored.append(row) or [210.0, 190.0])
    monkeypatch.setattr(speedup, "plot", plot_once)
    monkeypatch.setattr(speedup, "describe_host", lambda: _HOST)
    arguments = ["--models=alexnet", "--meshes=8,4", f"--output={tmp_path}", "--readme="]
    assert speedup.main(arguments) == 0
    assert [flags[2] for flags in runs] == ["--mesh=8", "--mesh=4", "--mesh=4"]
    rows = Rows(str(tmp_path / "speedup.json"))
    assert rows.get("alexnet", 4, 64, _HOST).left_out == {"auto_mtf": "no answer; leave it out"}
    # Before the others and after them.
    assert mirrored == [("alexnet", devices, 64, 15, 2) for devices in (8, 8, 4, 4)]
    assert rows.get("alexnet", 8, 64, _HOST).milliseconds("mirrored") == 200
    assert (tmp_path / "speedup.svg").exists()
    assert speedup.main(arguments) == 0
    assert len(runs) == 3
    assert speedup.main([*arguments, "--arms=search,expert"]) == 0
    assert len(runs) == 3
    assert speedup.main([*arguments, "--again"]) == 0
    assert len(runs) == 6
    assert speedup.main([*arguments, "--again", "--arms=expert"]) == 0
    assert speedup.main([*arguments, "--arms=expert"]) == 0
    assert len(runs) == 8
    assert speedup.main(["--models=nonsense"]) == 2
    assert "unknown model 'nonsense'" in capsys.readouterr().err
    assert speedup.main(["--meshes=8,x"]) == 2
    assert "--meshes=8,x: give whole numbers" in capsys.readouterr().err


def test_how_far_losses_are_apart():
    records = [{"step": 0, "arm": "a", "loss": 2.0}, {"step": 0, "arm": "b", "loss": 2.002},
               {"step": 1, "arm": "a", "loss": 1.0}]
    assert losses_agree_to(records) == pytest.approx(1e-3, rel=1e-2)
    assert losses_agree_to(records[2:]) is None
    assert losses_agree_to([*records, {"step": 1, "arm": "b", "loss": float("nan")}]) is None


def test_models_of_one_kind_get_the_same_data(tmp_path, monkeypatch):
    monkeypatch.setattr(launching, "collect", lambda language: [("one", "eins")] * 1000)
    images = {tuple(launching.prepare_data(name, str(tmp_path))[0]) for name in
              ("alexnet", "inception_v3", "resnet101", "densenet121")}
    assert len(images) == 1
    assert launching.prepare_data("gnmt", str(tmp_path))[0] == [
        f"--data={tmp_path}/text.en.txt,{tmp_path}/text.de.txt"]
    for name in ("rnnlm", "biglstm"):
        flags, data = launching.prepare_data(name, str(tmp_path))
        assert flags == [f"--data={tmp_path}/text.de.txt"]
        assert data == "messages of programs, German (1,000)"


def test_agreement():
    error, correlation = agreement([1.1, 2.0, 2.4], [1.0, 2.0, 3.0])
    assert error == pytest.approx(0.1)
    assert correlation == pytest.approx(1)
    assert agreement([3, 2, 1], [1, 2, 3])[1] == pytest.approx(-1)


def test_points_leave_out_what_was_not_measured_on_its_own(summary):
    assert points(summary) == {"search": (90, 100), "data_parallel": (360, 350)}


def test_replicas_that_wait_for_each_other_for_ever_are_left_out(summary, monkeypatch):
    def wait(*row):
        raise subprocess.TimeoutExpired("distribute", 900.0)

    monkeypatch.setattr(speedup, "_mirrored", wait)
    monkeypatch.setattr(speedup, "prepare_data", lambda name, folder: ([], "synthetic"))
    monkeypatch.setattr(speedup, "run_launcher", lambda flags, allowed: {
        **summary, "facts": {**summary["facts"], "data": "synthetic"}})
    row = speedup.measure("alexnet", 8, 64, ["search", "mirrored"], 15, 2, "folder")
    assert row.mirrored is None
    assert row.left_out == {"mirrored": "its replicas wait for each other, after 900 s still"}
    assert row.holds(["search"])


def test_replicas_that_wait_for_each_other_afterwards_are_not_left_out(summary, monkeypatch):
    """The row has the steps of before; it said of the same arm that it was left out."""
    runs = [[310.0, 290.0]]

    def mirrored(*row):
        if runs:
            return runs.pop()
        raise subprocess.TimeoutExpired("distribute", 900.0)

    monkeypatch.setattr(speedup, "_mirrored", mirrored)
    monkeypatch.setattr(speedup, "prepare_data", lambda name, folder: ([], "synthetic"))
    monkeypatch.setattr(speedup, "run_launcher", lambda flags, allowed: {
        **summary, "facts": {**summary["facts"], "data": "synthetic"}})
    row = speedup.measure("alexnet", 8, 64, ["search", "mirrored"], 15, 2, "folder")
    assert (row.mirrored, row.left_out) == ([310.0, 290.0], {})


@pytest.mark.parametrize("module", [accuracy, speedup])
def test_results_that_cannot_be_kept_are_told_before_anything_is_measured(tmp_path, monkeypatch, capsys, module):
    monkeypatch.setattr(module, "run_launcher", None)
    (tmp_path / "file").write_text("")
    assert module.main(["--models=rnnlm", f"--output={tmp_path / 'file' / 'folder'}"]) == 2
    line, = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --output={tmp_path / 'file' / 'folder'}: cannot write ")
    assert line.endswith("choose another folder")


def test_results_that_can_be_kept_stay_as_they_are(tmp_path):
    path = tmp_path / "new" / "rows.json"
    check_results(path, "[]\n")
    assert path.read_text() == "[]\n"
    path.write_text('[1,\r\n2]')
    check_results(path, "[]\n")
    assert path.read_bytes() == b'[1,\r\n2]'


def test_a_row_that_fails_keeps_nothing_else_from_being_measured(monkeypatch):
    """`make benchmark` ended with the first failure."""
    ran = []
    monkeypatch.setattr(speedup, "main", lambda flags: ran.append("speedup") or 2 - len(ran))
    monkeypatch.setattr(accuracy, "main", lambda flags: ran.append("accuracy") or 0)
    monkeypatch.setattr("sys.argv", ["benchmarks"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("benchmarks", run_name="__main__")
    assert ended.value.code == 1
    assert ran == ["speedup", "speedup", "accuracy"]


def test_replace_block(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("before\n<!-- speedup -->\nold\n<!-- /speedup -->\nafter\n")
    replace_block(str(path), "speedup", "new\n")
    assert path.read_text() == "before\n<!-- speedup -->\nnew\n<!-- /speedup -->\nafter\n"
    with pytest.raises(ValueError, match="put these two lines"):
        replace_block(str(path), "other", "new")


def test_a_failed_run_says_why():
    with pytest.raises(RuntimeError, match=r"exited with 2: error: --mesh=0"):
        run_launcher(["--model=alexnet", "--mesh=0"])


def test_steps_are_measured_in_processes_of_their_own(tmp_path, cache_dir, monkeypatch):
    """All by the prices of the first run, which measures kernels."""
    runs = []

    def run(flags, limit, allowed):
        runs.append([flag for flag in flags if flag.startswith(("--machine", "--prices"))])
        if len(runs) == 1:
            append_times(kernels_path(4), {TINY: Timing(1e-6)}, fingerprint_of_kernels(4))
        else:
            assert load_tables(runs[-1][0].removeprefix("--machine="))[0].get(TINY) == Timing(1e-6)
        faster = 0.9 if len(runs) == 1 else 1.0  # what the first run takes the machine for
        arms = {"search": _row([99, 9, 14, 10][len(runs) - 1], 10 * faster), "expert": _row(22, 20 * faster)}
        facts = {"devices": "4 virtual CPU devices on Z80", "versions": "TensorFlow 9", "machine": "local"}
        return {"preset": "tiny", "devices": 4, "facts": facts, "arms": arms, "wall_seconds": 1.0, "search": None,
                "slowness": 1.5 if len(runs) == 1 else None}

    monkeypatch.setattr(accuracy, "run_launcher", run)
    assert accuracy.main(["--models=alexnet", "--mesh=4", "--strategies=2", f"--output={tmp_path}"]) == 0
    assert [[flag.partition("=")[0] for flag in flags] for flags in runs] == [["--prices"], *[["--machine"]] * 3]
    (kept,) = json.loads((tmp_path / "accuracy.json").read_text()).values()
    assert kept["points"] == {"search": [pytest.approx(9.0), 10.0], "expert": [pytest.approx(18.0), 22.0]}
    assert kept["wall_seconds"] == 4.0
    assert kept["slowness"] is None  # of the first run, whose steps do not count
    assert "2, 3 runs" in (text := (tmp_path / "accuracy.md").read_text())
    assert "(1.50)" not in text


def test_strategies_of_one_name_are_one_where_they_are_predicted_alike():
    same, other = {"search": (10.0, 9.0)}, {"search": (12.0, 9.0)}
    assert together([same, other]) == {}
    assert together([same, {"search": (10.0, 11.0)}]) == {"search": (10.0, 10.0)}


def test_models_whose_accuracy_was_measured_are_not_measured_again(tmp_path, monkeypatch, capsys):
    runs, host = [], ["Zilog(R) Z80 (2 cores)"]

    def run(flags, limit, allowed):
        runs.append(flags[0].removeprefix("--model=") + flags[2].removeprefix("--mesh="))
        facts = {"devices": f"8 virtual CPU devices on {host[-1]}", "versions": "TensorFlow 9", "machine": "local"}
        arms = {"search": _row(10, 9), "expert": _row(20, 22), "data_parallel": _row(30, 45),
                "stock_data_parallel": _row(50, None), "random_0": _row(10, 9, same_as="search")}
        return {"preset": "tiny", "devices": int(runs[-1][-1]), "facts": facts, "arms": arms, "wall_seconds": 1.0,
                "search": {"kernels": {"of_strategy": 12, "measured_of_strategy": 11, "seen": 1200, "measured": 34,
                                       "rounds": 5, "seconds": 61.2}} if runs[-1] == "alexnet8" else None,
                "slowness": 0.9 if flags[0] == "--model=alexnet" else None}

    monkeypatch.setattr(accuracy, "run_launcher", run)
    monkeypatch.setattr(accuracy, "describe_host", lambda: host[-1])
    (tmp_path / "accuracy.json").write_text('{"gnmt": {"search": [1, 2]}}')  # as earlier versions wrote it
    arguments = ["--models=resnet101,alexnet", "--strategies=3", "--runs=0", f"--output={tmp_path}"]
    assert accuracy.main(arguments) == 0
    assert runs == ["resnet1018", "alexnet8", "resnet1014", "alexnet4"]
    text = (tmp_path / "accuracy.md").read_text()
    table, measuring = map(rows, text.split("## Search with measuring"))
    assert measuring[1:] == [["alexnet", "8", host[0], "61", "5", "11 of 12", "34 of 1,200"]]
    assert table[1][:9] == ["alexnet (tiny)", "4", "3", "3.0×", "10 %", "19 % (0.90)", "+10 %", "1.00", "0 %"]
    assert [(*row[:2],) for row in table[1:]] == [("alexnet (tiny)", "4"), ("alexnet (tiny)", "8"),
                                                  ("resnet101 (tiny)", "4"), ("resnet101 (tiny)", "8"), ("all", "")]
    assert table[3][5] == "-"  # nobody looked
    assert ("In 0 of 2 runs the error is less by kernels of the steps, and grows from 10 to 19 % at worst "
            "(alexnet on 4, Zilog(R) Z80 (2 cores)).") in text
    kept = json.loads((tmp_path / "accuracy.json").read_text())
    del kept["alexnet-8-zilog-z80-2-cores"]["slowness_of"]  # of an earlier version
    assert "In 0 of 1 runs the error is less by reference kernels, and grows" in (earlier := accuracy.document(kept))
    assert rows(earlier.partition("## Search")[0])[2][5] == "19 % (0.90*)"
    assert table[-1][:5] == ["all", "", "12", "", "10 %"]
    assert text.index("accuracy-alexnet-8-zilog-z80-2-cores.svg") < text.index("accuracy-resnet101-4-zilog")
    assert accuracy.main(arguments) == 0
    assert len(runs) == 4
    assert accuracy.main([*arguments, "--mesh=4", "--again"]) == 0
    assert len(runs) == 6
    host.append("MOS 6502 (1 core)")
    assert accuracy.main(["--models=alexnet", "--mesh=4", "--strategies=3", "--runs=0", f"--output={tmp_path}"]) == 0
    table = rows((tmp_path / "accuracy.md").read_text().partition("## Search")[0])
    assert [(*row[:2], row[9]) for row in table[1:]] == [
        ("alexnet (tiny)", "4", host[1]), ("alexnet (tiny)", "4", host[0]), ("alexnet (tiny)", "8", host[0]),
        ("resnet101 (tiny)", "4", host[0]), ("resnet101 (tiny)", "8", host[0]),
        ("all", "", host[1]), ("all", "", host[0]), ("all", "", "")]
    assert table[-1][2] == "15"
    assert accuracy.main(["--models=nonsense"]) == 2
    assert "unknown model 'nonsense'" in capsys.readouterr().err


@pytest.mark.parametrize(("alike", "kept", "drawn"), [(0, 17, [(6, 8)]), (5, 16, [(6, 8), (8, 10)]),
                                                     (99, 3, [(6, 8), (17, 19), (28, 30)])])
def test_more_strategies_are_drawn_where_some_are_alike(tmp_path, monkeypatch, alike, kept, drawn):
    """Until there are 14 that differ, or three runs did not give them."""
    asked = []

    def run(flags, limit, allowed):
        counts = dict(part.split(":") for part in flags[-1].split(",") if ":" in part)
        asked.append((int(counts["random"]), int(counts["changed"])))
        arms = {name: _row(number, number) for number, name in enumerate(("search", "expert", "data_parallel"), 9)}
        for number in range(sum(asked[-1])):
            arms[f"random_{number}"] = _row(20 + number, 9 + number, same_as="search" if number < alike else None)
        kernels = {"of_strategy": 1, "measured_of_strategy": 1, "seen": 2, "measured": 2, "rounds": 1,
                   "seconds": float(len(asked))}
        facts = dict.fromkeys(("devices", "versions", "machine"), "one on Chip")
        return {"preset": "tiny", "devices": 8, "facts": facts, "arms": arms, "wall_seconds": 1.0,
                "search": {"kernels": kernels}}

    monkeypatch.setattr(accuracy, "run_launcher", run)
    assert accuracy.main(["--models=alexnet", "--mesh=8", "--runs=0", f"--output={tmp_path}"]) == 0
    result, = json.loads((tmp_path / "accuracy.json").read_text()).values()
    assert asked == drawn
    assert len(result["points"]) == kept
    assert result["wall_seconds"] == len(drawn)
    assert result["kernels"]["seconds"] == 1.0  # that of the first run, which knew none


def test_the_picture_tells_processors_apart(summary, tmp_path):
    other = {**summary, "facts": {**summary["facts"], "devices": "8 virtual CPU devices on Other (4 cores)"}}
    speedup.plot([Row(summary, "pictures"), Row(other, "pictures")], str(tmp_path / "both.svg"))
    text = (tmp_path / "both.svg").read_text()
    assert "<!-- 8a -->" in text
    assert "<!-- 8b -->" in text
    assert "b: Other (4 cores)" in text


def test_what_is_left_out_is_told_of_the_processor_that_lacks_it(summary):
    other = {**summary, "facts": {**summary["facts"], "devices": "8 virtual CPU devices on Other (4 cores)"}}
    found = [Row(summary, "pictures"), Row(other, "pictures", left_out={"auto_mtf": "needs ortools"})]
    assert "alexnet on 8 (Other (4 cores)) devices without auto_mtf: needs ortools." in document(
        found, full_table(found))


def test_rows_that_are_kept_elsewhere_leave_the_readme_alone(summary, tmp_path, monkeypatch):
    replaced = []
    monkeypatch.setattr(speedup, "replace_block", lambda *given: replaced.append(given))
    monkeypatch.setattr(speedup, "describe_host", lambda: _HOST)
    Rows(str(tmp_path / "speedup.json")).add(Row(summary, "pictures"))
    assert speedup.main(["--models=alexnet", "--meshes=8", f"--output={tmp_path}"]) == 0
    assert replaced == []


@pytest.mark.parametrize("content", [None, "no marks", "<!-- /speedup -->\n<!-- speedup -->\n"])
def test_a_readme_without_a_place_is_told_before_anything_is_measured(tmp_path, monkeypatch, capsys, content):
    monkeypatch.setattr(speedup, "measure", None)
    path = tmp_path / "OTHER.md"
    if content is not None:
        path.write_text(content)
    assert speedup.main(["--models=alexnet", "--meshes=8", f"--output={tmp_path}", f"--readme={path}"]) == 2
    line, = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --readme={path}: ")


def test_data_parallelism_over_as_many_devices_as_the_batch_splits_over_is_a_rival(summary):
    """Its cells were dashes, the best rival was a slower one, and --arms= measured the row anew every time."""
    arms = summary["arms"]
    for name in ("stock_data_parallel", "data_parallel"):
        arms[f"{name}_4"] = arms.pop(name)
    arms["data_parallel_4"]["measured_ms"] = 80
    row = Row({**summary, "devices": 7}, "pictures")
    assert row.over_best_rival() == (0.8, "data_parallel")
    assert row.predicted() == 4.0
    assert row.holds(["data_parallel", "expert", "search"])
    assert row.measured() == ["data_parallel", "expert", "search"]
    assert row_of(full_table([row]), "alexnet")[3:6] == ["500 ± 1", "-", "80 ± 1"]
