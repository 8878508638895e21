"""Job steps of Slurm's by their variables, through TensorFlow's resolver."""

import json
import shlex
import subprocess
import sys
import time

import pytest
import slurm
from cluster_runs import metrics

from pase_mtf.errors import UsageError
from pase_mtf.launch.checkpoints.checkpoint import find_checkpoint
from pase_mtf.launch.cluster.slurm import slurm_tasks

pytestmark = pytest.mark.slow  # the resolver is asked in a process of its own, which loads TensorFlow

_STEP = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "cpu[09-10]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
         "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1",
         "SLURMD_NODENAME": "cpu10"}


def test_two_nodes(monkeypatch):
    for name, value in _STEP.items():
        monkeypatch.setenv(name, value)
    assert slurm_tasks(4) == (("cpu09:19616", "cpu09:19617", "cpu10:19616", "cpu10:19617"), 3)


def test_the_first_task_of_slurm_is_rank_0(monkeypatch):
    """By their letters cpu10 is before cpu9."""
    mine = {"SLURM_STEP_NODELIST": "cpu[9-10]", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURMD_NODENAME": "cpu9"}
    for name, value in {**_STEP, **mine}.items():
        monkeypatch.setenv(name, value)
    assert slurm_tasks(4) == (("cpu9:19616", "cpu9:19617", "cpu10:19616", "cpu10:19617"), 0)


def test_what_is_refused(monkeypatch):
    for name, value in _STEP.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_JOB_ID", "x")
    with pytest.raises(UsageError, match="start the command by srun"):
        slurm_tasks(4)
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.delenv("SLURM_STEP_NODELIST")
    with pytest.raises(UsageError, match=r"TensorFlow's resolver says: .*SLURM_STEP_NODELIST"):
        slurm_tasks(4)


@pytest.fixture(scope="module")
def cluster():
    """The environment in which there is a Slurm of one node."""
    if reason := slurm.missing():
        pytest.skip(reason)
    with slurm.slurm() as environment:
        yield environment


def _command(preset, folder, *flags):
    return [sys.executable, "-m", "pase_mtf.launch", "--model=alexnet", f"--preset={preset}", "--devices=cpu",
            "--machine=a100", "--warmup=1", "--compare=none", "--strategy=data_parallel", "--cluster=slurm",
            "--clients=ranks", f"--output_dir={folder}", *flags]


def test_two_tasks_train_as_one_process_does(cluster, preset, finished, tmp_path):
    done = subprocess.run(["srun", "--ntasks=2", *_command(preset, tmp_path / "run", "--mesh=2", "--steps=2")],
                          env=cluster, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split(" listen ")[0] for line in done.stderr.splitlines()] == ["note: TensorFlow's servers"]
    assert "[rank 1] trains on 1 devices at " in done.stdout
    assert metrics(tmp_path / "run", "data_parallel") == pytest.approx(metrics(finished), rel=1e-5)


def test_four_tasks_that_are_cancelled(cluster, preset, tmp_path):
    """The step is done to its end, and what there is is written; of no task anything is left."""
    folder, script = tmp_path / "run", tmp_path / "job"
    script.write_text("#!/bin/sh\nexec srun " + shlex.join(_command(preset, folder, "--mesh=4", "--steps=100000")))
    job = subprocess.run(["sbatch", "--parsable", "--ntasks=4", f"--output={tmp_path / 'job.out'}", script],
                         env=cluster, capture_output=True, text=True, check=True).stdout.strip()
    lines = folder / "metrics.jsonl"
    _wait_for(lambda: lines.exists() and lines.read_bytes().count(b"\n") > 3, tmp_path / "job.out")
    subprocess.run(["scancel", job], env=cluster, check=True)
    _wait_for(lambda: not subprocess.run(["squeue", "--noheader", f"--jobs={job}", "--states=RUNNING,COMPLETING"],
                                         env=cluster, capture_output=True, check=False).stdout, tmp_path / "job.out")
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
    assert find_checkpoint(str(folder)).step == 1 + max(metrics(folder, "data_parallel"))
    left = subprocess.run(["pgrep", "--full", str(folder)], capture_output=True, check=False)
    assert left.stdout == b""


def _wait_for(done, log):
    end = time.monotonic() + 600
    while not done():
        assert time.monotonic() < end, log.read_text() if log.exists() else "it did not start"
        time.sleep(0.2)
