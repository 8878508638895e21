"""What a run takes from the one that it continues, where the files of that lie elsewhere by now."""

import json
import os
import shutil
from types import SimpleNamespace

import numpy as np
import PIL.Image
import pytest
from cluster_runs import metrics

from pase_mtf.errors import FormatError, UsageError
from pase_mtf.launch.__main__ import main
from pase_mtf.launch.checkpoints.checkpoint import find_checkpoint
from pase_mtf.launch.command_line import parse_command_line
from pase_mtf.launch.data import open_data
from pase_mtf.launch.judging.judge import data_note
from pase_mtf.launch.plan import resolve


def _left(folder, preset, data=None):
    """Writes the options of a run with that data; returns the flag that resumes it."""
    config = json.loads(resolve(parse_command_line(
        ["--model=alexnet", f"--preset={preset}", "--devices=cpu", "--machine=h100"])).config_json())
    config["options"]["data"] = data
    (folder / "config.json").write_text(json.dumps(config))
    return f"--resume={folder}"


def test_data_may_lie_elsewhere(tmp_path, preset):
    resume = _left(tmp_path, preset, "there")
    assert parse_command_line([resume]).data == "there"
    assert parse_command_line([resume, "--data=./there"]).data == "./there"


def test_synthetic_data_lies_nowhere(tmp_path, preset):
    with pytest.raises(UsageError, match=r"--data=there: the run in .* was trained with synthetic data; leave the"):
        parse_command_line([_left(tmp_path, preset), "--data=there"])


def test_a_preset_may_lie_elsewhere_and_has_the_same_sizes(tmp_path, preset):
    resume, moved = _left(tmp_path, preset), tmp_path / "moved.json"
    shutil.copy(preset, moved)
    assert parse_command_line([resume, f"--preset={moved}"]).preset == str(moved)
    moved.write_text(json.dumps({**json.loads(moved.read_text()), "dropout": 0.5}))
    for other in (moved, "small"):
        with pytest.raises(UsageError, match=f"--preset={other}: the run in .* was trained with {preset}; leave"):
            parse_command_line([resume, f"--preset={other}"])


def test_a_preset_that_was_edited_since(tmp_path, preset):
    mine = tmp_path / "mine.json"
    shutil.copy(preset, mine)
    resume = _left(tmp_path, mine)
    mine.write_text(json.dumps({**json.loads(mine.read_text()), "dropout": 0.5}))
    for flags in ([resume], [resume, f"--preset={mine}"]):
        with pytest.raises(UsageError, match=r"mine\.json: has other sizes than the run in"):
            parse_command_line(flags)


def test_where_they_lie_for_other_ranks_is_all_the_same(tmp_path, preset):
    """They take both from rank 0."""
    mine = [_left(tmp_path, preset, "there"), "--mesh=2", "--cluster=a:1,b:1", "--data=mine", "--preset=mine.json"]
    assert parse_command_line([*mine, "--task=1"]).data == "mine"
    with pytest.raises(UsageError, match=r"cannot read mine\.json"):
        parse_command_line([*mine, "--task=0"])
    with pytest.raises(UsageError, match="--seed=3: the run in"):
        parse_command_line([*mine, "--task=1", "--seed=3"])


def test_a_preset_that_is_not_there_any_more(tmp_path, finished, preset):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    config = json.loads((run / "config.json").read_text())
    config["options"]["preset"] = "gone.json"
    (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=r"--preset=gone.json: no such file; it was that of the run that is resumed; "
                                         "give --preset=where it is now"):
        resolve(parse_command_line([f"--resume={run}"]))
    assert resolve(parse_command_line([f"--resume={run}", f"--preset={preset}"])).first_step == 3


def _pictures(folder, seed):
    folder.mkdir()
    rng = np.random.default_rng(seed)
    for number in range(24):
        PIL.Image.fromarray(rng.integers(256, size=(12, 12), dtype=np.uint8)).save(folder / f"{number}.png")
    (folder / "labels.txt").write_text("".join(f"{number}.png {rng.integers(10)}\n" for number in range(24)))


@pytest.mark.slow
def test_moved_data_is_told_from_other_data_by_its_losses(launch, tmp_path):
    first, moved, others = (tmp_path / name for name in ("first", "moved", "others"))
    _pictures(first, 0)
    _pictures(others, 1)
    code, run, _, err = launch(f"--data={first}", "--compare=none", "--steps=2")
    assert code == 0, err
    first.rename(moved)
    for flags, says in (([], "; it was that of the run that is resumed; give --data=where it is now\n"),
                        ([f"--data={tmp_path / 'nowhere'}"], "nowhere'; check the path\n")):
        code, again, _, err = launch(f"--resume={run}", *flags, output="again")
        assert (code, again.exists(), err.count("\n")) == (2, False, 1)
        assert err.endswith(says)
    flags = (f"--resume={run}", "--compare=none", "--steps=1")
    code, _, out, err = launch(*flags, f"--data={moved}", output="again")
    assert code == 0, err
    assert (f"note: --data={moved}: the run before had --data={first}; the loss at the checkpoint, which has to be the "
            "same, is compared\n") in out
    code, _, _, err = launch(*flags, f"--data={others}", output="other")
    assert code == 6
    assert "the data is not what the run before had" in err


@pytest.mark.slow
def test_other_data_leave_no_checkpoint_behind(launch, tmp_path):
    first, others = tmp_path / "first", tmp_path / "others"
    _pictures(first, 0)
    _pictures(others, 1)
    code, run, _, err = launch(f"--data={first}", "--compare=none", "--steps=2")
    assert code == 0, err
    flags = (f"--resume={run}", "--compare=none", "--steps=1", "--checkpoint_every=1")  # in the same folder
    assert launch(*flags, f"--data={others}")[0] == 6
    assert find_checkpoint(str(run)).step == 3
    assert launch(*flags, f"--data={first}")[0] == 0


def test_a_run_that_goes_on_is_not_told_to_take_another_batch(launch, finished):
    code, _, _, err = launch(f"--resume={finished}", "--mesh=3", "--strategy=data_parallel")
    assert code == 2
    assert err.endswith("does not split over 3 devices; take --mesh=2, or --strategy=search\n")


def test_where_no_loss_was_kept_nothing_tells_whether_it_is_the_same_data():
    plan = SimpleNamespace(options=SimpleNamespace(data="moved"), checkpoint=object(), earlier={"data": "first"})
    assert data_note(plan, [0.5]).endswith("is compared")
    assert data_note(plan, []) == ("--data=moved: the run before had --data=first; there is no loss at the checkpoint "
                                   "to compare, so that nothing tells whether it is the same")
    plan.earlier["data"] = "moved"
    assert data_note(plan, []) is None


def test_another_training_that_came_since_is_not_replaced(preset, finished, tmp_path, capsys, monkeypatch):
    """It was killed before its first checkpoint, while this one was still loading."""
    folder = tmp_path / "run"

    def late(*given):
        shutil.copytree(finished, folder, ignore=shutil.ignore_patterns("checkpoint", "summary.json"))
        config = json.loads((folder / "config.json").read_text())
        config["options"]["seed"] = 7
        (folder / "config.json").write_text(json.dumps(config))
        return open_data(*given)
    monkeypatch.setattr("pase_mtf.launch.execution.open_data", late)
    assert main(["--model=alexnet", f"--preset={preset}", "--mesh=2", "--devices=cpu", "--machine=a100", "--steps=6",
                 "--warmup=1", "--compare=none", f"--output_dir={folder}", "--resume=auto"]) == 2
    assert "another run has left another training there since this one was started" in capsys.readouterr().err
    assert list(metrics(folder)) == [0, 1, 2]


def test_what_the_judge_asks_of_a_run_before_is_missed_at_once(tmp_path, preset):
    resume = _left(tmp_path, preset)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["options"]["strategy"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match=r"config\.json: lacks 'strategy'; it is truncated"):
        parse_command_line([resume, "--strategy=search"])


def test_steps_that_were_not_to_be_kept_are_done_all_the_same(tmp_path, preset, finished):
    """A run went on from its last checkpoint with --nocheckpoint, and a scheduler starts the same command again."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "first_step": 3, "steps_done": 9}))
    command = ["--model=alexnet", f"--preset={preset}", "--mesh=2", "--devices=cpu", "--machine=a100", "--steps=8",
               "--compare=none", f"--output_dir={run}", "--resume=auto"]
    assert resolve(parse_command_line([*command, "--warmup=1", "--nocheckpoint"])).done == 9
    assert resolve(parse_command_line([*command, "--warmup=2", "--nocheckpoint"])).done == 0  # a step is left
    kept = resolve(parse_command_line([*command, "--warmup=1"]))
    assert (kept.done, kept.first_step) == (0, 3)  # what was to be kept is trained anew


def test_what_a_run_hands_on_nobody_is_told_to_leave_out(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    config = json.loads((run / "config.json").read_text())
    config["options"]["recompute"] = "all"
    (run / "config.json").write_text(json.dumps(config))
    command = [f"--resume={run}", "--strategy=pipeline", "--compare=none"]
    with pytest.raises(UsageError, match="computes no block again; give --recompute=none instead of --recompute=all"):
        resolve(parse_command_line(command))
    assert resolve(parse_command_line([*command, "--recompute=none"])).recomputed == ()


def test_a_preset_that_was_edited_since_is_another_training_without_a_checkpoint_too(tmp_path, finished, preset):
    """Its metrics would be replaced by those of other sizes, or these would pass for done."""
    mine, run = tmp_path / "mine.json", tmp_path / "run"
    shutil.copy(preset, mine)
    shutil.copytree(finished, run, ignore=shutil.ignore_patterns("checkpoint"))
    config = json.loads((run / "config.json").read_text())
    config["options"]["preset"] = config["model_config"]["preset"] = str(mine)
    (run / "config.json").write_text(json.dumps(config))
    command = ["--model=alexnet", f"--preset={mine}", "--mesh=2", "--devices=cpu", "--machine=a100", "--steps=2",
               "--warmup=1", "--compare=none", f"--output_dir={run}", "--resume=auto"]
    assert resolve(parse_command_line(command)).done == 3
    mine.write_text(json.dumps({**json.loads(mine.read_text()), "dropout": 0.5}))
    with pytest.raises(UsageError, match="holds a run that has ended, and no checkpoint to go on with"):
        resolve(parse_command_line(command))
    (run / "summary.json").unlink()  # as of one that was killed
    with pytest.raises(UsageError, match=r"holds a run with other sizes in --preset=.*, and no checkpoint to go on"):
        resolve(parse_command_line(command))


@pytest.mark.parametrize("auto", [False, True])
def test_a_folder_that_cannot_be_written_to_is_told_before_tensorflow_is_loaded(finished, preset, monkeypatch, capsys,
                                                                                 auto):
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    monkeypatch.setattr("pase_mtf.launch.execution.execute", lambda *_: pytest.fail("it was begun"))
    flags = ["--resume=auto", "--model=alexnet", f"--preset={preset}", "--mesh=2", "--devices=cpu", "--machine=a100",
             "--steps=9", "--compare=none"] if auto else [f"--resume={finished}"]
    assert main([*flags, f"--output_dir={finished}"]) == 2
    assert "cannot be written to; name another place" in capsys.readouterr().err
