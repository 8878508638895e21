"""--cluster and --task: what they mean, and what is refused before anything is loaded."""

import dataclasses
import itertools
import json
import shutil
from types import SimpleNamespace

import pytest

from pase_mtf.calibration.cache import fingerprint_of_kernels
from pase_mtf.errors import UsageError
from pase_mtf.interrupts import Interrupts
from pase_mtf.launch.__main__ import run
from pase_mtf.launch.checkpoints.checkpoint import find_checkpoint
from pase_mtf.launch.cluster import launcher
from pase_mtf.launch.cluster.flag import ClusterFlag, parse_cluster
from pase_mtf.launch.cluster.membership import Membership
from pase_mtf.launch.cluster.slurm import first_port
from pase_mtf.launch.command_line import parse_command_line
from pase_mtf.launch.plan import resolve
from pase_mtf.machine.kernel_table import save_tables
from pase_mtf.machine.kernel_times import KernelTimes, Timing
from pase_mtf.machine.kernels import Block, Kernel
from pase_mtf.machine.machine import Machine


def _config(cluster, kind="worker", index=0):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


@pytest.mark.parametrize(("text", "task", "environment", "expected"), [
    ("local:4", None, {}, ClusterFlag("local", 4)),
    ("slurm", None, {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}, ClusterFlag("slurm", 4, (), 3)),
    ("a.b:1,[::1]:2", 1, {}, ClusterFlag("hosts", 2, ("a.b:1", "[::1]:2"), 1)),
    ("tf_config", None, _config({"worker": ["a:1", "b:2"]}, index=1), ClusterFlag("tf_config", 2, ("a:1", "b:2"), 1)),
    *(("tf_config", None, _config({"worker": ["a:1", "b:2"]}, index=index),
       ClusterFlag("tf_config", 2, ("a:1", "b:2"), 1)) for index in ("1", " 1", "01\n", 1.0)),
    # The chief is rank 0, wherever it stands.
    ("tf_config", None, _config({"worker": ["a:1", "b:2"], "chief": ["c:3"]}),
     ClusterFlag("tf_config", 3, ("c:3", "a:1", "b:2"), 1)),
    ("tf_config", None, _config({"worker": ["a:1"], "chief": ["c:3"]}, "chief"),
     ClusterFlag("tf_config", 2, ("c:3", "a:1"), 0)),
])
def test_what_is_understood(text, task, environment, expected):
    assert parse_cluster(text, task, environment) == expected


@pytest.mark.parametrize(("text", "task", "environment", "says"), [
    ("local:0", None, {}, "say how many processes"),
    ("local:x", None, {}, "say how many processes"),
    ("local", None, {}, "say how many processes"),
    ("local:99999999999", None, {}, "say how many processes"),
    ("local:2", 1, {}, "--task=1: only for a --cluster that lists its hosts"),
    ("kubernetes", None, {}, "--cluster=kubernetes: unknown"),
    ("a:1,b:2", None, {}, "--task is missing.*up to --task=1"),
    ("a:1,b:2", 2, {}, "--task=2: --cluster lists 2 processes"),
    ("a:1,a:1", 0, {}, "a:1 stands there twice"),
    ("a:1,b:0", 0, {}, "'b:0' is no host:port"),
    ("a:1,b:70000", 0, {}, "'b:70000' is no host:port"),
    ("a:1,b c:7", 0, {}, "'b c:7' is no host:port"),
    ("a:1,", 0, {}, "'' is no host:port"),
    ("a:1,b..example.com:2", 0, {}, "'b..example.com:2' is no host:port"),
    (f"a:1,{'b' * 64}:2", 0, {}, "is no host:port"),
    ("slurm", None, {}, "SLURM_STEP_NUM_TASKS is not set; start the command by srun"),
    ("slurm", None, {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "2"}, "task 2 of 2"),
    ("tf_config", None, {}, "TF_CONFIG is not set"),
    ("tf_config", None, {"TF_CONFIG": "{"}, "is not what TensorFlow writes"),
    ("tf_config", None, {"TF_CONFIG": "[]"}, "is not what TensorFlow writes"),
    ("tf_config", None, _config({"worker": ["a:1"], "ps": ["p:1"]}), "has tasks of type 'ps'"),
    ("tf_config", None, _config({"worker": ["a:1"], "evaluator": ["e:1"]}, "evaluator"), "not among those"),
    ("tf_config", None, _config({"worker": ["a:1"]}, index=1), "task 1 of type 'worker'"),
    *(("tf_config", None, _config({"worker": ["a:1", "b:2"]}, index=index), f"index is {says}.*give cluster, and task")
      for index, says in ((0.9, "0.9"), (True, "True"), (-1, "-1"), ("x", "'x'"), (None, "None"),
                           ("1.0", "'1.0'"), (" ", "' '"), (-1.0, "-1.0"))),
    ("tf_config", None, {"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1e999}}'},
     "index is inf"),
])
def test_what_is_refused(text, task, environment, says):
    with pytest.raises(UsageError, match=says) as caught:
        parse_cluster(text, task, environment)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("flags", "says"), [
    (("--mesh=3", "--cluster=local:2"), "3 devices do not split over the 2 processes of --cluster=local:2; "
                                        "take --mesh=4"),
    (("--mesh=2", "--cluster=local:4"), "take --mesh=4"),
    (("--mesh=2", "--cluster=local:2", "--devices=/device:CPU:0,/device:CPU:1"), "give auto, cpu or gpu"),
    (("--mesh=2", "--cluster=local:2", "--prices=measured"), "kernels are measured in one process"),
    (("--task=1",), "--task=1: is for a run over processes"),
    (("--clients=ranks",), "--clients=ranks: is for a run over processes"),
    (("--cluster=local:2", "--mesh=2", "--clients=rank"), "--clients=rank: unknown; did you mean 'ranks'"),
    (("--max_restarts=1",), "--max_restarts=1: is for a run over processes"),
    (("--cluster=local:2", "--max_restarts=-1"), "--max_restarts=-1: must be at least 0"),
])
def test_flags_that_do_not_go_together(flags, says):
    with pytest.raises(UsageError, match=says):
        parse_command_line(["--model=alexnet", *flags])


def test_options_are_a_command_line_again():
    options = parse_command_line(["--model=alexnet", "--cluster=local:2", "--nocheckpoint", "--learning_rate=1e-3",
                                  "--mesh=rows:2;cols:2", "--max_restarts=2"])
    assert parse_command_line(options.to_arguments()) == options


def test_what_a_process_is_started_with_is_a_command_line_too(preset, tmp_path):
    """Of resolved options: also where a file tells kernel times, which are measured prices that nobody measures."""
    path = tmp_path / "kernels.json"
    product = Kernel("Einsum", (Block("float32", (2, 3)), Block("float32", (3, 5))), (Block("float32", (2, 5)),),
                     (("equation", "ab,bc->ac"),))
    save_tables(path, [KernelTimes(fingerprint_of_kernels(2), {product: Timing(2e-5)})])
    options = resolve(parse_command_line(["--model=alexnet", f"--preset={preset}", "--mesh=2", "--cluster=local:2",
                                          f"--machine={path}"])).options
    assert options.prices == "measured"
    assert parse_command_line(options.to_arguments()).prices == "measured"


def test_a_search_alone_is_that_of_the_first_process(launch, capsys):
    code, folder, out, err = launch("--search_only", "--cluster=127.0.0.1:2222,127.0.0.1:2223", "--task=1")
    assert (code, err) == (0, "")
    assert out == "process 1 has nothing to do: process 0 searches\n"
    assert not folder.exists()


def test_a_search_alone_starts_no_process(launch, monkeypatch):
    """And it says what its numbers are not."""
    monkeypatch.setattr("pase_mtf.calibration.load.load_machine", lambda *_, **__: Machine.load("a100"))
    monkeypatch.setattr("pase_mtf.launch.__main__.launch", None)
    code, folder, out, _ = launch("--machine=local", "--search_only", "--cluster=local:2", "--compare=none")
    assert code == 0
    assert "2 virtual CPU devices in 2 processes on" in out
    assert "measured in one process: what moves between processes takes longer than predicted, and more memory" in out
    assert (folder / "strategy.json").exists()


def test_a_search_alone_in_a_job_of_slurms_is_for_its_nodes(monkeypatch):
    """What was measured between these is kept by their names."""
    nodes = ("cpu09:19616", "cpu10:19616")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setattr("pase_mtf.launch.plan.slurm_tasks", lambda processes: (nodes, 0))
    plan = resolve(parse_command_line(["--model=alexnet", "--mesh=2", "--devices=cpu", "--machine=h100",
                                       "--cluster=slurm", "--search_only"]))
    assert plan.devices.tasks == nodes


def test_a_search_alone_starts_processes_where_they_are_to_be_measured(launch, monkeypatch):
    started = []
    monkeypatch.setattr("pase_mtf.launch.__main__.launch",
                        lambda resolve, member, interrupts: started.append(resolve()) or 0)
    code, *_ = launch("--machine=local", "--search_only", "--recalibrate", "--cluster=local:2", "--compare=none")
    assert code == 0
    plan, = started
    assert plan.options.search_only
    assert len(plan.devices.tasks) == 2


def test_launchers_compare_the_flags_of_their_commands(launch, monkeypatch):
    """As they were given: rank 0 alone takes the others from the run that it goes on with."""
    joined = []
    monkeypatch.setattr("pase_mtf.launch.__main__.join_run", lambda member, *_: joined.append(member.flags) or 0)
    assert launch("--cluster=127.0.0.1:2222,127.0.0.1:2223", "--task=1", "--resume=auto", "--model=alexnet", "--mesh=2",
                  "--batch=24")[0] == 0
    flags, = joined
    assert (flags["batch"], flags["max_restarts"], flags["preset"], "task" in flags) == (24, 0, None, False)


@pytest.mark.parametrize("job", [0, 1, 1000, 7654321])
def test_slurm_steps_that_are_likely_to_meet_have_other_ports(job):
    """Every one of these has 64: for 63 tasks of a node, and the launchers."""
    firsts = sorted(first_port(job + later, step) for later in range(13) for step in range(13))
    assert all(other - one >= 64 for one, other in itertools.pairwise(firsts))
    assert 12000 <= firsts[0] < firsts[-1] + 64 <= 32768  # where the system's own begin


def _taking_up(preset, folder):
    return ["--model=alexnet", f"--preset={preset}", "--mesh=2", "--devices=cpu", "--machine=a100", "--steps=6",
            "--warmup=1", "--compare=none", "--cluster=local:2", f"--output_dir={folder}", "--resume=auto"]


def test_a_checkpoint_that_came_since_makes_a_run_no_longer(preset, finished, tmp_path, monkeypatch):
    """The run before ended between the look of the launcher and that of rank 0."""
    folder, started = tmp_path / "run", []
    shutil.copytree(finished, folder)
    plan = resolve(parse_command_line(_taking_up(preset, folder)))
    assert plan.first_step == 3
    monkeypatch.setattr(launcher, "TaskProcess", lambda rank, words, *_, **__: started.append(words) or SimpleNamespace(
        exit_code=0))
    monkeypatch.setattr(launcher, "start_worker", lambda *_: None)
    monkeypatch.setattr(launcher, "watch", lambda *_: launcher.Outcome(0))
    monkeypatch.setattr(launcher, "end_all", lambda tasks: None)
    assert launcher._with_restarts(plan, Membership((), 0, 2, "cpu"), [], Interrupts(), None) == 0
    later = dataclasses.replace(find_checkpoint(str(folder)), step=5)
    monkeypatch.setattr("pase_mtf.launch.plan.find_checkpoint", lambda _: later)
    words, = started
    theirs = resolve(parse_command_line(words[3:]))
    assert theirs.first_step + theirs.options.warmup + theirs.options.steps == 7


def test_rank_0_takes_no_flag_from_the_run_before_that_its_launcher_did_not(preset, finished, tmp_path, monkeypatch):
    folder, started = tmp_path / "run", []
    shutil.copytree(finished, folder)
    config = json.loads((folder / "config.json").read_text())
    config["options"]["checkpoint_every"] = 1000
    (folder / "config.json").write_text(json.dumps(config))
    plan = resolve(parse_command_line(_taking_up(preset, folder)))
    assert (plan.options.resume, plan.options.checkpoint_every) == (str(folder), None)
    for name, value in Membership(("127.0.0.1:1", "127.0.0.1:2"), 0, 2, "cpu").environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("pase_mtf.launch.execution.execute", lambda plan, interrupts: started.append(plan) or 0)
    assert run(plan.options.to_arguments(), Interrupts()) == 0
    assert started[0].options.checkpoint_every is None


def test_what_a_process_with_gpus_is_started_with_is_a_command_line_too(preset, tmp_path, monkeypatch):
    """Where a file tells kernel times: nothing is measured on the GPUs."""
    monkeypatch.setattr("pase_mtf.runtime.gpu_names", lambda: ["A100"] * 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    path = tmp_path / "kernels.json"
    product = Kernel("Einsum", (Block("float32", (2, 3)), Block("float32", (3, 5))), (Block("float32", (2, 5)),),
                     (("equation", "ab,bc->ac"),))
    save_tables(path, [KernelTimes(fingerprint_of_kernels(2), {product: Timing(2e-5)})])
    plan = resolve(parse_command_line(["--model=alexnet", f"--preset={preset}", "--mesh=2", "--cluster=local:2",
                                       f"--machine={path}"]))
    assert (plan.devices.kind, plan.options.prices) == ("gpu", "measured")
    for name, value in Membership(("127.0.0.1:1", "127.0.0.1:2"), 0, 2, "gpu").environment.items():
        monkeypatch.setenv(name, value)
    theirs = resolve(parse_command_line(plan.options.to_arguments(), complete=True))
    assert (theirs.devices.kind, theirs.options.prices) == ("gpu", "measured")


def test_a_file_of_kernel_times_need_be_on_the_first_host_alone(tmp_path):
    flags = ["--model=alexnet", "--mesh=2", "--cluster=a:1,b:1", f"--machine={tmp_path / 'mine.json'}",
             "--prices=measured"]
    assert parse_command_line([*flags, "--task=1"]).prices == "measured"
    with pytest.raises(UsageError, match="--prices is for the machine at hand"):
        parse_command_line([*flags, "--task=0"])
