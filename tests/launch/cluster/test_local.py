"""Whole runs over processes of this computer: `--cluster=local:N`, as a user starts them."""

import json
import os
import signal
import time

import pytest
from cluster_runs import Run, free_hosts, metrics, no_network, processes

from pase_mtf.launch.__main__ import main
from pase_mtf.launch.checkpoints.checkpoint import find_checkpoint
from pase_mtf.launch.cluster.network import own_network

_ONE_CLIENT = pytest.param("--clients=one", marks=pytest.mark.slow)  # which test_single_client.py has without processes


@pytest.fixture(scope="module", autouse=True)
def _network():
    """Where the system gives none, a line says so in every run (docs/cluster.md), and nothing keeps others out."""
    with own_network() as network:
        if network is None:
            assert no_network(), "the system gives one, and none was made"
            pytest.skip("this system gives no network namespaces")


@pytest.mark.parametrize("clients", ["--clients=ranks", _ONE_CLIENT])
def test_two_processes_train_as_one_does(preset, finished, tmp_path, clients):
    run = Run(preset, tmp_path / "run", "--strategy=data_parallel", "--compare=random:1", clients)
    code, out, err = run.end()
    assert (code, err) == (0, "")
    _assert_alone(run, 2)
    assert "2 virtual CPU devices in 2 processes on" in out
    assert "measured ms" in out
    assert metrics(tmp_path / "run", "data_parallel") == pytest.approx(metrics(finished), rel=1e-5)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [row["measured_bytes"] > 0 for row in summary["arms"].values()] == [True] * 2
    assert find_checkpoint(str(tmp_path / "run")).step == 3


def _assert_alone(run, servers):
    """So many servers listened, in one network with nothing in it but the loopback interface."""
    assert len(run.held) >= servers
    assert len(run.networks) == 1
    assert not any(one.reached_from_outside for one in run.held)


@pytest.mark.slow
def test_four_processes(preset, finished, tmp_path):
    run = Run(preset, tmp_path / "run", "--mesh=4", "--cluster=local:4", "--strategy=data_parallel", "--clients=ranks")
    code, out, err = run.end()
    assert (code, err) == (0, "")
    assert "4 virtual CPU devices in 4 processes on" in out
    assert metrics(tmp_path / "run", "data_parallel") == pytest.approx(metrics(finished), rel=1e-5)
    _assert_alone(run, 4)


@pytest.mark.slow
@pytest.mark.parametrize("clients", ["one", "ranks"])
def test_sigterm_ends_all(preset, tmp_path, clients):
    run = Run(preset, tmp_path / "run", "--steps=100000", f"--clients={clients}")
    run.reach(3)
    run.process.terminate()
    code, out, err = run.end()
    assert (code, err) == (143, "")
    assert "measured ms" in out
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "interrupted"
    assert find_checkpoint(str(tmp_path / "run")).step == 1 + max(metrics(tmp_path / "run"))


@pytest.mark.slow
def test_an_error_of_rank_0_ends_all(preset, tmp_path):
    code, _, err = Run(preset, tmp_path / "run", "--batch=7", "--strategy=expert").end()
    assert code == 3
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_nothing_outlives_a_launcher_that_is_killed(preset, tmp_path):
    run = Run(preset, tmp_path / "run", "--steps=100000")
    run.reach(3)
    os.kill(run.pid(1), signal.SIGSTOP)
    run.process.kill()
    deadline = time.monotonic() + 15
    while processes(str(tmp_path / "run")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert run.end()[0] == -signal.SIGKILL


@pytest.fixture(scope="module")
def undisturbed(preset, tmp_path_factory):
    """The losses of 150 steps in one process."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert main(["--model=alexnet", f"--preset={preset}", "--mesh=2", "--devices=cpu", "--machine=a100", "--steps=149",
                 "--warmup=1", "--compare=none", "--strategy=data_parallel", f"--output_dir={folder}"]) == 0
    losses = metrics(folder, "data_parallel")
    assert list(losses) == list(range(150))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(("clients", "rank", "number"), [
    ("ranks", 1, signal.SIGKILL), ("ranks", 0, signal.SIGKILL), ("one", 0, signal.SIGKILL), ("one", 1, signal.SIGSTOP)])
def test_a_lost_process_costs_no_step(preset, undisturbed, tmp_path, clients, rank, number):
    """Started again from the last checkpoint, in the same folder; the curve is that of a run that was left alone."""
    run = Run(preset, tmp_path / "run", "--strategy=data_parallel", "--steps=149", "--checkpoint_every=20",
               "--max_restarts=1", f"--clients={clients}")
    run.reach(50)
    os.kill(run.pid(rank), number)
    start = time.monotonic()
    line = run.process.stderr.readline()
    while line and "starting again" not in line:  # TensorFlow may say of rank 0 that its connection was reset
        line = run.process.stderr.readline()
    assert time.monotonic() - start < 60  # 5 where it is stopped, on an idle machine
    assert f"rank {rank} was {'killed by SIGKILL' if number == signal.SIGKILL else 'stopped'}" in line
    assert "starting again from the checkpoint" in line
    code, _, err = run.end()
    assert (code, err) == (0, "")
    assert metrics(tmp_path / "run", "data_parallel") == pytest.approx(undisturbed, rel=1e-4)


@pytest.mark.slow
def test_a_checkpoint_of_ranks_goes_on_anywhere(preset, undisturbed, tmp_path):
    """On other devices and under another strategy in one process, and from there on ranks again: one loss curve."""
    code, _, err = Run(preset, tmp_path / "ranks", "--strategy=data_parallel", "--steps=39", "--clients=ranks").end()
    assert (code, err) == (0, "")
    files = os.listdir(tmp_path / "ranks" / "checkpoint" / "step-40")
    assert sorted(files) == ["checkpoint.json", "model.data-00000-of-00002", "model.data-00001-of-00002", "model.index"]
    assert main([f"--resume={tmp_path / 'ranks'}", f"--output_dir={tmp_path / 'alone'}", "--mesh=4",
                 "--strategy=expert", "--steps=29", "--warmup=1"]) == 0
    code, _, err = Run(preset, tmp_path / "again", f"--resume={tmp_path / 'alone'}", "--mesh=2", "--clients=ranks",
                        "--strategy=data_parallel", "--steps=19").end()
    assert (code, err) == (0, "")
    losses = {**metrics(tmp_path / "ranks", "data_parallel"), **metrics(tmp_path / "alone", "expert"),
              **metrics(tmp_path / "again", "data_parallel")}
    assert losses == pytest.approx({step: undisturbed[step] for step in range(90)}, rel=1e-4)


@pytest.mark.slow
def test_when_no_restart_is_left(preset, tmp_path):
    run = Run(preset, tmp_path / "run", "--steps=100000", "--checkpoint_every=10")
    run.reach(30)
    os.kill(run.pid(1), signal.SIGKILL)
    code, _, err = run.end()
    assert code == 7
    # TensorFlow may say of rank 0, before, that its connection was reset.
    assert err.splitlines()[-1] == ("error: rank 1 was killed by SIGKILL; all processes were ended; --max_restarts=3 "
                                    "starts again from the last checkpoint")
    assert find_checkpoint(str(tmp_path / "run")).step >= 10


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_ended_before_its_first_step_it_leaves_no_folder(preset, tmp_path, rank):
    """So that the same command can be given again; rank 0 can take nothing away when it is killed."""
    run = Run(preset, tmp_path / "run", "--clients=ranks")
    while not (tmp_path / "run" / "metrics.jsonl").exists():
        assert run.process.poll() is None
        time.sleep(0.02)
    os.kill(run.pid(rank), signal.SIGKILL)
    assert run.end()[0] == 7
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_fault_before_the_first_checkpoint(preset, tmp_path):
    run = Run(preset, tmp_path / "run", "--steps=299", "--max_restarts=2")
    run.reach(5)
    os.kill(run.pid(0), signal.SIGKILL)
    code, _, err = run.end()
    assert code == 0
    assert "starting again from the first step (restart 1 of 2)" in err
    assert list(metrics(tmp_path / "run")) == list(range(300))


@pytest.mark.slow
def test_two_launchers_with_tf_config(preset, undisturbed, tmp_path, monkeypatch):
    """As operators of Kubernetes start them; the worker of the second is lost once."""
    tasks, runs = free_hosts(2), []
    for rank in range(2):
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": tasks},
                                                    "task": {"type": "worker", "index": rank}}))
        runs.append(Run(preset, tmp_path / f"rank{rank}", "--strategy=data_parallel", "--steps=149",
                         "--checkpoint_every=20", "--max_restarts=1", "--cluster=tf_config"))
    runs[0].reach(50)
    os.kill(runs[1].pid(1), signal.SIGKILL)
    (code, _, err), (other_code, other_out, other_err) = runs[0].end(), runs[1].end()
    assert (code, other_code) == (0, 0)
    lost = f"rank 1 ({tasks[1]}) was killed by SIGKILL; starting again"
    assert lost in err
    assert f"[rank 1] {lost}" in other_err
    assert other_out == f"[rank 1] serves 1 devices at {tasks[1]}\n" * 2
    assert not (tmp_path / "rank1").exists()
    assert metrics(tmp_path / "rank0", "data_parallel") == pytest.approx(undisturbed, rel=1e-4)


@pytest.mark.slow
def test_a_host_that_is_lost(preset, tmp_path):
    """Its launcher is stopped, as if its network were cut: both sides end, in time."""
    tasks = ",".join(free_hosts(2))
    runs = [Run(preset, tmp_path / f"rank{rank}", "--steps=100000", f"--cluster={tasks}", f"--task={rank}")
            for rank in range(2)]
    runs[0].reach(5)
    start = time.monotonic()
    runs[1].process.send_signal(signal.SIGSTOP)
    code, _, err = runs[0].end()
    assert time.monotonic() - start < 90  # 15, and what the end takes, on an idle machine
    assert code == 7
    assert f"error: rank 1 ({tasks.split(',')[1]}) said nothing for 10 s; all processes were ended" in err
    runs[1].process.send_signal(signal.SIGCONT)
    code, _, err = runs[1].end()
    assert code == 7
    assert "[rank 1] error: " in err
