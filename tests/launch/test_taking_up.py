"""--resume=auto: one command for the first start of a run and for every other."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
from cluster_runs import metrics

from pase_mtf.errors import FormatError, MismatchError, UsageError
from pase_mtf.launch.__main__ import main
from pase_mtf.launch.arms.arm import Arm
from pase_mtf.launch.checkpoints import keeping
from pase_mtf.launch.checkpoints.checkpoint import find_checkpoint
from pase_mtf.launch.cluster.launcher import options_after
from pase_mtf.launch.command_line import parse_command_line
from pase_mtf.launch.data import open_data
from pase_mtf.launch.files import RunFiles
from pase_mtf.launch.judging.judge import Judge
from pase_mtf.launch.plan import resolve
from pase_mtf.launch.resumption import contradiction
from pase_mtf.launch.summary import read_summary


def _command(preset, folder, *flags):
    return ["--model=alexnet", f"--preset={preset}", "--mesh=2", "--devices=cpu", "--machine=a100", "--steps=6",
            "--warmup=1", "--log_every=1", "--compare=none", f"--output_dir={folder}", "--resume=auto", *flags]


class _CrashError(Exception):
    """What nobody expects."""


@pytest.fixture
def crashing(monkeypatch):
    """Runs a command in this process that breaks off before the step of this number."""
    step = Arm.step

    def run(command, at):
        done = []

        def broken(self, batch, trace=False):
            done.append(1)
            if len(done) > at:
                raise _CrashError
            return step(self, batch, trace)
        with monkeypatch.context() as patch:
            patch.setattr(Arm, "step", broken)
            with pytest.raises(_CrashError):
                main(command)
    return run


def test_the_same_command_begins_goes_on_and_is_done(preset, crashing, tmp_path, capsys):
    assert main(_command(preset, tmp_path / "whole")) == 0
    folder = tmp_path / "run"
    command = _command(preset, folder, "--checkpoint_every=2")
    crashing(command, 1)  # before its first checkpoint
    assert list(metrics(folder)) == [0]
    (folder / "mine.txt").write_text("stays")
    crashing(command, 5)
    assert (list(metrics(folder)), find_checkpoint(str(folder)).step) == ([0, 1, 2, 3, 4], 4)
    # Elsewhere, too.
    assert main([f"--resume={folder}", f"--output_dir={tmp_path / 'elsewhere'}", "--steps=2"]) == 0
    whole = metrics(tmp_path / "whole")
    assert metrics(tmp_path / "elsewhere") == pytest.approx({step: whole[step] for step in (4, 5, 6)}, rel=1e-6)
    assert main(command) == 0
    assert f"{folder} at step 4" in capsys.readouterr().out
    assert metrics(folder) == pytest.approx(whole, rel=1e-6)
    assert json.loads((folder / "summary.json").read_text())["status"] == "done"
    assert (folder / "mine.txt").read_text() == "stays"
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert main(command) == 0
    assert capsys.readouterr().out == f"the run in {folder} has done its 7 steps; more --steps go on with it\n"
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_one_step_that_is_left_is_the_last(preset, crashing, tmp_path):
    """It is a warm-up, and no time is measured."""
    folder = tmp_path / "run"
    command = _command(preset, folder, "--checkpoint_every=2")
    crashing(command, 6)
    assert find_checkpoint(str(folder)).step == 6
    assert main(command) == 0
    assert list(metrics(folder)) == list(range(7))
    summary = read_summary(folder / "summary.json")
    assert (summary["status"], summary["steps_done"]) == ("done", 7)
    assert summary["arms"]["search"]["measured_steps"] == 0
    options = json.loads((folder / "config.json").read_text())["options"]
    assert (options["warmup"], options["steps"]) == (1, 6)  # whoever resumes it begins with what was asked for


@pytest.mark.parametrize("steps", [1, 5])
def test_what_a_kill_left_half_written_is_removed(preset, crashing, tmp_path, steps):
    """Of a file, and of a checkpoint: its first, or a later one."""
    folder = tmp_path / "run"
    command = _command(preset, folder, "--checkpoint_every=2")
    crashing(command, steps)
    summary = _left_by_a_kill(folder / "summary.json")
    (folder / "checkpoint" / ".partial-abc").mkdir(parents=True)
    (folder / ".partial").write_text("mine")
    assert main(command) == 0
    assert not summary.exists()
    assert sorted(path.name for path in folder.rglob(".*")) == [".partial", ".running.lock"]


def _left_by_a_kill(path):
    """What `write_atomically` leaves of a file when it is killed."""
    code = ("import os, signal, sys; from pase_mtf import files\n"
            "os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)\n"
            "files.write_atomically(sys.argv[1], 'whole')\n")
    before = {*path.parent.iterdir()}
    assert subprocess.run([sys.executable, "-c", code, str(path)]).returncode == -signal.SIGKILL
    left, = {*path.parent.iterdir()} - before
    return left


def test_a_run_that_fails_before_its_first_step_leaves_nothing(preset, crashing, tmp_path):
    crashing(_command(preset, tmp_path / "run"), 0)
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    crashing(_command(preset, tmp_path / "run"), 0)
    assert (tmp_path / "run").exists()  # which was there


def test_what_it_cannot_go_on_with(preset, finished, tmp_path, capsys, monkeypatch):
    def refused(*command):
        code = main([*command])
        out, err = capsys.readouterr()
        assert (code, out, err.count("\n")) == (2, "", 1)
        return err

    command = [flag for flag in _command(preset, "") if not flag.startswith("--output_dir")]
    assert "--resume=auto: in which folder? Give --output_dir" in refused(*command)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").write_text("")
    assert "holds 'thesis.tex', and no run to go on with" in refused(*command, f"--output_dir={tmp_path / 'foreign'}")
    assert "is never overwritten" in refused(*command, f"--output_dir={preset}")
    for name in ("lr[0.1]", "a\\b"):
        assert "take" in refused(*command, f"--output_dir={tmp_path / name}")
    for name in ("made[1]", "locked"):  # by whoever starts the job
        (tmp_path / name).mkdir()
    assert "for a pattern" in refused(*command, f"--output_dir={tmp_path / 'made[1]'}")
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        assert "cannot be written to; name" in refused(*command, f"--output_dir={tmp_path / 'locked'}")
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", lambda path: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
        assert "cannot be read (Permission denied)" in refused(*command, f"--output_dir={tmp_path / 'foreign'}")
    shutil.copytree(finished, tmp_path / "lr[0.1]")
    assert "rename the folder" in refused(*command[:-1], f"--resume={tmp_path / 'lr[0.1]'}")
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    assert "--seed=3: the run in" in refused(*command, f"--output_dir={run}", "--seed=3")
    for data in run.glob("checkpoint/step-*/model.data*"):
        data.write_bytes(data.read_bytes()[:-1])
    held = sorted(run.rglob("*"))
    assert "there is no whole checkpoint" in refused(*command, f"--output_dir={run}")
    assert sorted(run.rglob("*")) == held


def test_done_is_what_has_come_as_far_as_asked(preset, crashing, tmp_path, capsys):
    """A kill after the last checkpoint and before the summary leaves that of the run before."""
    folder = tmp_path / "run"
    assert main(_command(preset, folder)) == 0
    longer = _command(preset, folder, "--checkpoint_every=3", "--steps=14", "--compare=stock_data_parallel")
    crashing(longer, 14)  # all of the first arm, whose last checkpoint is written; the other has two steps left
    assert find_checkpoint(str(folder)).step == 15
    assert json.loads((folder / "summary.json").read_text())["steps_done"] == 7
    capsys.readouterr()
    assert main(longer) == 0
    assert "has done its" not in capsys.readouterr().out
    assert json.loads((folder / "summary.json").read_text())["steps_done"] >= 15
    assert main(longer) == 0
    assert "has done its" in capsys.readouterr().out


@pytest.mark.parametrize("kept", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_a_run_whose_last_checkpoint_could_not_be_written_is_not_done(preset, tmp_path, capsys, monkeypatch, kept):
    """Its disk was full: the same command trains anew what is lost, from the last checkpoint, or all of it."""
    folder, save = tmp_path / "run", keeping.save_checkpoint
    command = _command(preset, folder, "--checkpoint_every=4")

    def full(place, how, *, step, **more):
        if step != kept:
            raise UsageError(f"cannot write {place}: No space left on device; free space or choose another place")
        save(place, how, step=step, **more)
    with monkeypatch.context() as patch:
        patch.setattr(keeping, "save_checkpoint", full)
        for _ in range(2):
            assert main(command) == 2
            out, err = capsys.readouterr()
            assert "has done its" not in out
            assert "No space left on device" in err.splitlines()[-1]
    assert main(command) == 0
    assert "has done its" not in capsys.readouterr().out
    assert list(metrics(folder)) == list(range(7))
    assert find_checkpoint(str(folder)).step == 7


def test_a_run_that_has_ended_without_a_checkpoint_is_not_begun_again(preset, finished, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    shutil.rmtree(run / "checkpoint")
    command = [flag for flag in _command(preset, run) if not flag.startswith(("--steps", "--warmup"))]
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert main([*command, "--steps=2", "--warmup=1"]) == 0
    assert capsys.readouterr().out == f"the run in {run} has done its 3 steps\n"
    # Less than was done is done, too; the number is that of what was.
    assert main([*command, "--steps=1", "--warmup=1"]) == 0
    assert capsys.readouterr().out == f"the run in {run} has done its 3 steps\n"
    for others in (["--steps=20"], ["--steps=2", "--warmup=1", "--seed=3"], ["--steps=2", "--warmup=1", "--batch=4"]):
        assert main([*command, *others]) == 2
        assert "holds a run that has ended, and no checkpoint" in capsys.readouterr().err
    summary = json.loads((run / "summary.json").read_text())
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    (run / "summary.json").write_text(json.dumps({**summary, "status": "interrupted"}))  # nothing to go on with
    assert main([*command, "--steps=2", "--warmup=1"]) == 0
    assert "has done" not in capsys.readouterr().out


@pytest.mark.parametrize("left_by", ["--nocheckpoint", "--search_only"])
def test_another_training_is_not_begun_in_the_place_of_one_without_a_checkpoint(preset, crashing, tmp_path, capsys,
                                                                                left_by):
    """Of its metrics, its strategy and its summary nothing would be left; what is not said counts, too."""
    folder = tmp_path / "run"
    command = [*_command(preset, folder), "--seed=3", left_by]
    if left_by == "--search_only":
        assert main(command) == 0
    else:
        crashing(command, 2)
    capsys.readouterr()
    held = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for others, told in (([], "--seed=3"), (["--seed=0"], "--seed=3"), (["--seed=3", "--batch=4"], "--batch=8"),
                         (["--seed=3", f"--data={tmp_path}"], "no --data")):
        assert main([*_command(preset, folder), *others]) == 2
        assert capsys.readouterr() == ("", f"error: --output_dir={folder}: holds a run with {told}, and no checkpoint "
                                           "to go on with; name another, or remove it\n")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == held
    assert resolve(parse_command_line([*_command(preset, folder), "--seed=3"])).first_step == 0


def test_files_that_lie_elsewhere_are_no_other_training(preset, crashing, tmp_path):
    """A job that is submitted again has its data and its preset in another $TMPDIR; killed before its first checkpoint,
    it begins anew."""
    folder, moved = tmp_path / "run", tmp_path / "moved.json"
    shutil.copy(preset, moved)
    crashing(_command(preset, folder), 2)
    plan = resolve(parse_command_line(_command(moved, folder)))
    assert (plan.first_step, plan.options.preset) == (0, str(moved))
    config = json.loads((folder / "config.json").read_text())
    for now, before, told in (("b", "a", None), (None, "a", "--data=a"), ("b", None, "no --data")):
        config["options"]["data"] = before
        assert contradiction(dataclasses.replace(plan.options, data=now), config) == told
    moved.write_text(moved.read_text().replace("32", "48"))
    with pytest.raises(UsageError, match="holds a run with --preset"):
        resolve(parse_command_line(_command(moved, folder)))


def test_a_run_that_left_nothing_leaves_the_folder_to_others(preset, crashing, tmp_path):
    """Who mends a flag that no strategy was found with has no other folder to name."""
    folder = tmp_path / "run"
    folder.mkdir()
    crashing([*_command(preset, folder), "--seed=3"], 0)
    assert (folder / "config.json").exists()
    assert resolve(parse_command_line(_command(preset, folder))).options.seed == 0


@pytest.mark.parametrize("kept", [True, False])
def test_the_steps_of_a_run_of_an_earlier_version_are_those_that_it_was_to_do(preset, finished, tmp_path, capsys, kept):
    """Those before it too, with checkpoints and without."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    if not kept:
        shutil.rmtree(run / "checkpoint")
    more = "; more --steps go on with it" if kept else ""
    summary = json.loads((run / "summary.json").read_text())
    del summary["steps_done"]
    command = [*_command(preset, run), "--steps=1"]
    for told, said in (({"steps_done": 9}, 9), ({}, 3), ({"first_step": 4}, 7)):
        (run / "summary.json").write_text(json.dumps({**summary, **told}))
        assert main(command) == 0
        assert capsys.readouterr().out == f"the run in {run} has done its {said} steps{more}\n"
    if not kept:
        for told in ({"steps_done": "9"}, {"first_step": "0"}):  # of somebody else
            (run / "summary.json").write_text(json.dumps({**summary, **told}))
            assert main(command) == 2
            assert "holds a run that has ended, and no checkpoint" in capsys.readouterr().err


def test_a_summary_is_the_last_file_of_a_run(preset, tmp_path, monkeypatch):
    """It says that the run has come to its end: killed before it, the run goes on."""
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("pase_mtf.launch.files.report_html", lambda **_: (_ for _ in ()).throw(_CrashError))
        with pytest.raises(_CrashError):
            main(_command(preset, folder))
    assert not (folder / "summary.json").exists()
    assert main(_command(preset, folder)) == 0
    assert (folder / "report.html").exists()
    assert json.loads((folder / "summary.json").read_text())["status"] == "done"
    assert list(metrics(folder)) == list(range(8))  # a summary is of a step at least


def test_what_does_not_go_on_in_a_folder_leaves_it_as_it_is(finished, crashing, tmp_path, monkeypatch):
    """Whatever the attempt asked for, the next one continues the run as that was: its options, the steps after its
    checkpoint, and a later one that could not be read just then."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    shutil.copytree(run / "checkpoint" / "step-3", run / "checkpoint" / "step-5")  # which says that it is of step 3
    _add_metric(run, 3, find_checkpoint(str(finished)).next_loss)

    def held():
        return [(run / name).read_text() for name in ("config.json", "metrics.jsonl")] + sorted(
            os.listdir(run / "checkpoint"))
    before = held()

    def refuses(*_, **__):
        raise MismatchError("of another graph")
    with monkeypatch.context() as patch:
        patch.setattr("pase_mtf.launch.execution.find_strategies", refuses)
        assert main([f"--resume={run}", f"--output_dir={run}", "--microbatches=2", "--steps=3"]) == 5
    assert main([f"--resume={run}", f"--output_dir={run}", "--memory_limit=1B"]) in (3, 4)
    with monkeypatch.context() as patch:
        patch.setattr("pase_mtf.launch.execution.build_arms", lambda *_: signal.raise_signal(signal.SIGTERM))
        assert main([f"--resume={run}", f"--output_dir={run}", "--steps=3"]) == 143
    crashing([f"--resume={run}", f"--output_dir={run}", "--microbatches=2", "--steps=3"], 0)  # in its first step
    assert held() == before
    assert main([f"--resume={run}", f"--output_dir={run}", "--steps=2"]) == 0
    assert json.loads((run / "config.json").read_text())["options"]["microbatches"] == "1"
    assert list(metrics(run)) == list(range(6))
    assert sorted(os.listdir(run / "checkpoint")) == ["step-3", "step-6"]


def _add_metric(run, step, loss):
    """As a run leaves it that goes on after its last checkpoint, and is killed."""
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "arm": "search", "loss": loss, "ms": 1.0, "timed": True}) + "\n")


def test_going_on_in_a_folder_compares_with_the_steps_that_it_does_anew(preset, finished, tmp_path, capsys,
                                                                        monkeypatch):
    """As going on elsewhere does: with all of them, not only with the one whose loss the checkpoint tells."""
    judges = []
    monkeypatch.setattr("pase_mtf.launch.execution.Judge", lambda *given: judges.append(Judge(*given)) or judges[-1])
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    told = find_checkpoint(str(run)).next_loss
    _add_metric(run, 3, told)
    _add_metric(run, 4, 2.0 * told)
    assert main([f"--resume={run}", f"--output_dir={run}", "--steps=2"]) == 0
    assert [judge._before for judge in judges] == [[told, 2.0 * told]]
    assert "note: losses differ at step 4: the run before" in capsys.readouterr().out


def test_what_looks_wrong_is_settled_from_where_the_run_began(finished, tmp_path, capsys):
    """However many checkpoints it has written since in the same folder."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    told = find_checkpoint(str(run)).next_loss
    _add_metric(run, 3, told)
    _add_metric(run, 4, 2.0 * told)
    assert main([f"--resume={run}", f"--output_dir={run}", "--steps=3", "--checkpoint_every=1"]) == 0
    assert "note: losses differ at step 4: the run before" in capsys.readouterr().out
    assert sorted(os.listdir(run / "checkpoint")) == ["step-6", "step-7"]


def test_without_checkpoints_after_a_run_that_had_many(preset, tmp_path):
    first = tmp_path / "first"
    command = [flag for flag in _command(preset, first, "--checkpoint_every=2") if flag != "--resume=auto"]
    assert main(command) == 0
    assert main([f"--resume={first}", "--nocheckpoint", "--steps=2", f"--output_dir={tmp_path / 'second'}"]) == 0
    assert not (tmp_path / "second" / "checkpoint").exists()


def test_a_search_alone_may_be_done_again_and_trained_from(preset, tmp_path):
    folder = tmp_path / "run"
    for more in (["--search_only"], ["--search_only"], []):
        assert main([*_command(preset, folder), *more]) == 0
    assert json.loads((folder / "summary.json").read_text())["status"] == "done"


def test_a_search_alone_takes_no_folder_of_a_training(preset, finished, tmp_path, capsys):
    """Whose summary it would replace by one without a measurement: neither after checkpoints, nor after steps alone."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    for _ in range(2):
        held = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
        for command in ([f"--resume={run}", f"--output_dir={run}"], _command(preset, run)):
            assert main([*command, "--search_only"]) == 2
            assert capsys.readouterr() == (
                "", f"error: --search_only: {run} holds a training; give another --output_dir\n")
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == held
        shutil.rmtree(run / "checkpoint", ignore_errors=True)


@pytest.mark.parametrize(("name", "value"), [("mesh", 8), ("batch", "64"), ("learning_rate", "0.1"), ("compare", None)])
def test_options_that_were_edited_by_hand(finished, tmp_path, capsys, name, value):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    data = json.loads((run / "config.json").read_text())
    data["options"][name] = value
    (run / "config.json").write_text(json.dumps(data))
    assert main([f"--resume={run}"]) == 2
    err = capsys.readouterr().err
    assert f"config.json: {name} is {value!r}"[:30] in err
    assert "it was changed or is foreign" in err
    assert err.count("\n") == 1


def test_no_checkpoint_is_lost_to_a_restart(preset, finished, tmp_path, monkeypatch):
    """Where none is whole, or the folder cannot be read just now, the run ends, and all stays as it is."""
    run = tmp_path / "run"
    plan = resolve(parse_command_line([flag for flag in _command(preset, run, "--cluster=local:2")
                                       if flag != "--resume=auto"]))
    shutil.copytree(finished, run)
    held = sorted(run.rglob("*"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", lambda path: (_ for _ in ()).throw(OSError(116, "Stale file handle")))
        with pytest.raises(FormatError, match=r"cannot be read \(Stale file handle\)"):
            options_after(plan)
    assert sorted(run.rglob("*")) == held
    for data in run.glob("checkpoint/step-*/model.data*"):
        data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(FormatError, match="there is no whole checkpoint"):
        options_after(plan)
    assert sorted(run.rglob("*")) == held
    shutil.rmtree(run / "checkpoint")
    (run / "summary.json").unlink()
    assert options_after(plan) == plan.options  # it begins anew
    assert run.exists()  # until all are there


def test_a_restart_leaves_the_folder_of_another_run_alone(preset, tmp_path):
    """The same command was started twice, and the second lost a process before it saw that the folder is taken."""
    run = tmp_path / "run"
    plan = resolve(parse_command_line([flag for flag in _command(preset, run, "--cluster=local:2")
                                       if flag != "--resume=auto"]))
    with RunFiles(str(run)) as files:
        files.write("config.json", "theirs")
        options_after(plan)
        assert (run / "config.json").read_text() == "theirs"
        files.keep()


def test_the_launcher_of_a_cluster_takes_it_up(preset, finished, tmp_path):
    """After a fault: from the last checkpoint, and from the first step where there is none."""
    run = tmp_path / "run"
    plan = resolve(parse_command_line(_command(preset, run, "--cluster=local:2")))
    assert (plan.options.in_place, plan.first_step, plan.options.resume) == (True, 0, "auto")
    run.mkdir()
    assert options_after(plan) == plan.options
    shutil.copytree(finished, run, dirs_exist_ok=True)
    left = options_after(plan)
    assert (left.resume, left.warmup, left.steps) == (str(run), 1, 3)
    again = resolve(parse_command_line(_command(preset, run, "--cluster=local:2")))
    assert (again.options, again.first_step) == (left, 3)
    assert options_after(again) == left


@pytest.mark.parametrize(("left_out", "did"), [("none", "written step-3"), ("checkpoint", "ended")])
def test_what_another_run_has_kept_since_is_not_removed(preset, finished, tmp_path, capsys, monkeypatch, left_out, did):
    """It was asked to end, and wrote its checkpoint, or none, while this one, started at once, was still loading."""
    folder = tmp_path / "run"

    def late(*given):
        shutil.copytree(finished, folder, ignore=shutil.ignore_patterns(left_out))
        return open_data(*given)
    monkeypatch.setattr("pase_mtf.launch.execution.open_data", late)
    assert main(_command(preset, folder)) == 2
    assert f"another run has {did} there since this one was started" in capsys.readouterr().err
    assert (folder / "checkpoint").exists() == (left_out == "none")
    assert list(metrics(folder)) == [0, 1, 2]


@pytest.mark.slow
def test_killed_and_started_again(preset, tmp_path):
    """kill -9, and the same command again."""
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "pase_mtf.launch",
               *_command(preset, folder, "--checkpoint_every=5", "--steps=80")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for line in process.stdout:
        if line.startswith("step ") and int(line.split()[1]) >= 7:
            break
    process.kill()
    process.communicate()
    seen = metrics(folder)
    assert 7 <= max(seen) < 80
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    found = metrics(folder)
    assert list(found) == list(range(81))
    assert {step: found[step] for step in seen} == pytest.approx(seen, rel=1e-6)
    assert not any(name.startswith(".partial") for name in os.listdir(folder / "checkpoint"))
