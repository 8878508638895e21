"""python -m pase_mtf.search."""

import dataclasses
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

from pase_mtf.errors import FormatError, UsageError
from pase_mtf.search import __main__ as solve_command
from pase_mtf.search.__main__ import main
from pase_mtf.search.bar import ProgressBar
from pase_mtf.search.network import CostNetwork, NetworkEdge
from pase_mtf.search.registry import Solution

INSTANCES = pathlib.Path(__file__).parents[1] / "data" / "instances"


def test_whole_process_without_tensorflow(tmp_path):
    script = ("import atexit, runpy, sys; "
              "atexit.register(lambda: 'tensorflow' in sys.modules and print('TensorFlow was loaded')); "
              "runpy.run_module('pase_mtf.search', run_name='__main__', alter_sys=True)")
    run = subprocess.run([sys.executable, "-c", script, INSTANCES / "alexnet_8.npz", "--check",
                          f"--output={tmp_path / 'solution.json'}"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "97098296512.0" in run.stdout
    assert "certificate  verified" in run.stdout
    assert "TensorFlow" not in run.stdout
    data = json.loads((tmp_path / "solution.json").read_text())
    assert data["cost"] == 97098296512
    assert data["optimal"] is True
    assert len(data["assignment"]) == 14


def test_makes_no_certificate_that_nobody_checks(monkeypatch):
    asked = []
    monkeypatch.setattr(solve_command, "solve", lambda network, *given, plain=solve_command.solve, **options: (
        asked.append(options.get("certificate")), plain(network, *given, **options))[1])
    for more in ([], ["--check"], ["--method=pase"]):
        assert main([str(INSTANCES / "alexnet_8.npz"), *more]) == 0
    assert asked == [False, True, None]


@pytest.mark.parametrize(("arguments", "expected"), [
    (["--method=mcmc", "--seed=3", "--proposals=5000"], "not proven"),
    (["--method=k_best", "--k=3"], "strategy 3"),
    (["--method=pase"], "largest dependent set"),
])
def test_methods(arguments, expected, capsys):
    assert main([str(INSTANCES / "rnnlm_8.npz"), *arguments]) == 0
    assert expected in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "message"), [
    ([], "no network named"),
    (["missing.npz"], "check the path"),
    ([__file__], "truncated or foreign"),
    ([str(INSTANCES / "rnnlm_8.npz"), "--method=exakt"], "did you mean 'exact'"),
    ([str(INSTANCES / "rnnlm_8.npz"), "--seed=1"], "no option 'seed'"),
    ([str(INSTANCES / "rnnlm_8.npz"), "--time_limit=-1"], "positive"),
    ([str(INSTANCES / "rnnlm_8.npz"), "--method=pase", "--time_limit=1e-6"], "'pase' has no option 'time_limit'"),
    ([str(INSTANCES / "rnnlm_8.npz"), "--method=pase", "--gap=0.5"], "'pase' has no option 'gap'"),
    ([str(INSTANCES / "rnnlm_8.npz"), "--method=mcmc", "--gap=0.1"], "'mcmc' has no option 'gap'"),
    ([str(INSTANCES / "rnnlm_8.npz"), "--method=k_best", "--gap=0.5"], "'k_best' has no option 'gap'"),
    ([str(INSTANCES / "rnnlm_8.npz"), "--method=k_best", "--k=0"], "at least one"),
    ([str(INSTANCES / "rnnlm_8.npz"), "--method=mcmc", "--proposals=10", "--check"],
     "--check: only --method=exact"),
    ([str(INSTANCES / "rnnlm_8.npz"), "--memory=1GB"], "unrecognized arguments: --memory=1GB; --help lists the flags"),
    ([str(INSTANCES / "rnnlm_8.npz"), "--k=few"], "argument --k: invalid int value: 'few'; --help lists the flags"),
    ([str(INSTANCES / "rnnlm_8.npz"), "--output=/no/such/folder/s.json"], "there is no folder /no/such/folder"),
])
def test_errors_are_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    streams = capsys.readouterr()
    assert message in streams.err
    assert streams.err.count("\n") == 1
    assert "Traceback" not in streams.err


def test_a_file_that_is_no_solution_is_told_before_the_search(tmp_path, capsys, monkeypatch):
    network, notes, folder = tmp_path / "network.npz", tmp_path / "notes.json", tmp_path / "folder"
    shutil.copy(INSTANCES / "rnnlm_8.npz", network)
    notes.write_text('{"precious": true}')
    folder.mkdir()
    before = network.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(solve_command, "solve", lambda *given, **named: pytest.fail("searched"))
        for output, says in ((network, "is read for the search, and would be lost"), (folder, "is a folder"),
                             (notes, "exists; choose another name: only solutions are replaced"), ("", "is empty")):
            assert main([str(network), f"--output={output}"]) == 2
            streams = capsys.readouterr()
            assert says in streams.err
            assert streams.err.count("\n") == 1
    assert (network.read_bytes(), notes.read_text()) == (before, '{"precious": true}')
    for _ in range(2):  # a solution is replaced
        assert main([str(network), f"--output={tmp_path / 'solution.json'}"]) == 0


def test_what_was_found_is_there_though_it_cannot_be_checked(tmp_path, capsys, monkeypatch):
    """Nor written: an hour of search is not thrown away."""
    arguments = [str(INSTANCES / "rnnlm_8.npz"), "--check", f"--output={tmp_path / 'solution.json'}"]
    find = solve_command.solve
    monkeypatch.setattr(solve_command, "solve", lambda *given, **named: dataclasses.replace(
        find(*given, **named), optimal=False))
    assert main(arguments) == 2
    streams = capsys.readouterr()
    assert "cost  " in streams.out
    assert "nothing to verify" in streams.err
    assert json.loads((tmp_path / "solution.json").read_text())["optimal"] is False

    def write(path, data):
        raise UsageError(f"cannot write {path}: No space left on device; free space or choose another place")
    monkeypatch.setattr(solve_command, "write_atomically", write)
    assert main(arguments) == 2
    streams = capsys.readouterr()
    assert "cost  " in streams.out
    assert "cannot write" in streams.err


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_what_was_found_is_kept_though_nobody_reads_it(tmp_path, unbuffered):
    """The file is written first: an hour of search is not lost with the terminal."""
    with open("/dev/full", "w") as full:
        run = subprocess.run([sys.executable, "-m", "pase_mtf.search", INSTANCES / "rnnlm_8.npz",
                              f"--output={tmp_path / 'solution.json'}"], stdout=full, stderr=subprocess.PIPE, text=True,
                             env={**os.environ, "PYTHONUNBUFFERED": unbuffered}, check=False)
    assert (run.returncode, run.stderr) == (
        2, "error: disk full (while writing); free space or choose another place\n")
    assert json.loads((tmp_path / "solution.json").read_text())["optimal"] is True


def test_nowhere_to_keep_compiled_code():
    """A package nobody may write to, and no home: slower, but it works."""
    script = """
import numba.core.caching as caching
caching.CacheImpl._locator_classes = []
from numba import njit
from pase_mtf.search.compiled import compiled

try:
    njit(cache=True)(lambda x: x)
except RuntimeError:
    pass
else:
    raise SystemExit("the cache still finds a place")

@compiled
def double(x):
    return 2 * x

assert double(4) == 8
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_memory_in_files_limits_the_search(tmp_path, capsys):
    path, plain = tmp_path / "network.npz", tmp_path / "plain.npz"
    network = CostNetwork([np.array([1.0, 5.0]), np.array([1.0, 5.0])], [])
    network.save(plain)
    network.memory = (np.array([10.0, 2.0]), np.array([20.0, 3.0]))
    network.save(path)
    kept = CostNetwork.load(path).memory
    assert [vector.tolist() for vector in kept] == [[10, 2], [20, 3]]
    assert main([str(path), "--memory_limit=15"]) == 0
    assert "cost         6.0" in capsys.readouterr().out
    assert main([str(path), "--memory_limit=0.000015MB", "--search_memory=1GiB"]) == 0
    assert "cost         6.0" in capsys.readouterr().out
    for flag, value in (("--memory_limit", "device"), ("--memory_limit", "11 apples"), ("--search_memory", "-1")):
        assert main([str(path), f"{flag}={value}"]) == 2
        assert f"{flag}={value}" in capsys.readouterr().err
    assert main([str(path), "--memory_limit=4"]) == 3
    assert "the least any strategy needs is 5" in capsys.readouterr().err
    assert main([str(plain), "--memory_limit=15"]) == 2
    assert "holds no memory" in capsys.readouterr().err
    assert CostNetwork.load(plain).memory is None


@pytest.mark.parametrize("memory", [[1.0], [1.0, 2.0, -3.0, 4.0], [1.0, 2.0, math.nan, 4.0]])
def test_damaged_memory_in_a_file(memory, tmp_path):
    network = CostNetwork([np.zeros(2), np.zeros(2)], [])
    network.memory = (np.ones(2), np.ones(2))
    network.save(tmp_path / "network.npz")
    with np.load(tmp_path / "network.npz") as file:
        arrays = {**file, "memory": np.array(memory)}
    np.savez_compressed(tmp_path / "network.npz", **arrays)
    with pytest.raises(FormatError, match="memory"):
        CostNetwork.load(tmp_path / "network.npz")


def test_a_gap_that_is_left_is_not_told_as_none():
    network = CostNetwork([np.array([1.0])], [])
    for gap, told in ((3e-7, "0.0001%"), (0.0, "0.0000%"), (0.25, "25.0000%")):
        found = Solution((0,), 1.0, 1.0 - gap, gap, not gap, 0.0, {})
        assert f"gap          {told} of the cost" in solve_command._describe(network, "exact", found)


def test_the_bar_tells_no_gap_as_none(capsys):
    with ProgressBar() as bar:
        bar(2.0, 1.00003, 1.0)
    assert "gap 0.01%" in capsys.readouterr().err


def test_a_gap_that_no_percentage_tells(capsys):
    found = Solution((0,), 1e-27, -8e275, 8e302, False, 0.0, {})
    assert "gap          unknown" in solve_command._describe(CostNetwork([[1e-27]], []), "exact", found)
    with ProgressBar() as bar:
        bar(2.0, 1e-300, -1e10)
    assert "bound -1e+10" in capsys.readouterr().err


def test_what_is_left_of_costs_that_cancel_is_proven_as_from_python(tmp_path, capsys):
    CostNetwork([[1e6, 0.0], [0.0, 1e6]], [
        NetworkEdge(0, 1, [[-0.5, 3.0], [-0.25, 1.0]], [0, 1], [0, 1])]).save(tmp_path / "network.npz")
    assert main([str(tmp_path / "network.npz")]) == 0
    shown = capsys.readouterr().out
    assert "cost         -0.25" in shown
    assert "optimal      proven" in shown


@pytest.mark.parametrize("method", ["k_best", "mcmc", "pase", "brute_force"])
def test_a_method_without_a_memory_limit_names_the_flag(method, tmp_path, capsys):
    network = CostNetwork([[1.0, 5.0]], [])
    network.memory = (np.array([10.0, 2.0]),)
    network.save(tmp_path / "network.npz")
    assert main([str(tmp_path / "network.npz"), f"--method={method}", "--memory_limit=5"]) == 2
    assert f"'{method}' has no option 'memory_limit'" in capsys.readouterr().err


def test_what_kept_a_solution_from_being_proven_need_not_be_time():
    found = Solution((0,), 1.0, 0.5, 0.5, False, 0.0, {})
    with pytest.raises(UsageError, match=r"nothing to verify; .*--search_memory, --gap"):
        solve_command._check(CostNetwork([np.array([1.0])], []), found)


def test_a_home_folder_is_found_behind_an_equals_sign(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main([str(INSTANCES / "alexnet_8.npz"), "--output=~/solution.json"]) == 0
    assert json.loads((tmp_path / "solution.json").read_text())["format"] == "pase_mtf.solution"
