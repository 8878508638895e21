"""The arm of Mesh-TF's own layout optimiser."""

import importlib.util
import os
import signal
import subprocess
import sys
import time

import pytest
from cluster_runs import is_running
from small_graphs import perceptron

from pase_mtf import models
from pase_mtf.errors import InfeasibleError
from pase_mtf.launch.options import Options
from pase_mtf.launch.plan import resolve
from pase_mtf.launch.strategies import auto_mtf, finding
from pase_mtf.machine.machine import Machine
from pase_mtf.strategy.experts import configurations_of_layout


def test_mesh():
    assert auto_mtf.auto_mtf_mesh(8, ()) == (("rows", 2), ("columns", 4))
    assert auto_mtf.auto_mtf_mesh(2, ()) == (("all", 2),)
    assert auto_mtf.auto_mtf_mesh(9, ()) == (("all", 9),)
    assert auto_mtf.auto_mtf_mesh(8, (("a", 4), ("b", 2))) == (("a", 4), ("b", 2))


def test_its_rules_become_a_strategy(monkeypatch):
    rules = {"batch": "rows", "width1": "columns"}
    asked = []
    monkeypatch.setattr(finding, "auto_mtf_layout", lambda *arguments: asked.append(arguments) or rules)
    plan = resolve(Options(model="alexnet", devices="cpu", machine="h100", compare="auto_mtf"))
    graph, mesh = perceptron(), (("rows", 2), ("columns", 4))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())  # as if ortools were there
    found = finding.find_strategies(plan, graph, Machine.load("h100")).strategies
    assert asked == [("alexnet", plan.config, plan.options.batch, plan.options.optimizer, mesh)]
    assert found["auto_mtf"].configurations == configurations_of_layout(graph, mesh, rules)


def test_without_ortools(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    plan = resolve(Options(model="alexnet", devices="cpu", machine="h100", compare="auto_mtf"))
    found = finding.find_strategies(plan, perceptron(), Machine.load("h100"))
    assert list(found.strategies) == ["search"]
    # As setup.py has it.
    assert found.left_out["auto_mtf"] == "mesh_tensorflow.auto_mtf needs ortools; pip install 'ortools>=9.12,<10'"


def test_it_does_not_outlive_a_command_that_is_killed(tmp_path):
    """Nor does a file; it would go on for minutes: here, with its import of TensorFlow."""
    told, temporary = tmp_path / "pid", tmp_path / "tmp"
    temporary.mkdir()
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        "def stay(event, details):\n"
        "    if event == 'import' and str(details[0]).startswith('tensorflow'):\n"
        f"        with open({str(told)!r} + '.new', 'w') as file:\n"
        "            file.write(str(os.getpid()))\n"
        f"        os.replace(file.name, {str(told)!r})\n"
        "        time.sleep(1000)\n"
        "sys.addaudithook(stay)\n")
    command = ("from pase_mtf import models; from pase_mtf.launch.strategies import auto_mtf\n"
               "auto_mtf.auto_mtf_layout('alexnet', models.load_config('alexnet', 'tiny'), 16, 'sgd', (('all', 2),))")
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen([sys.executable, "-c", command],
                               env={**os.environ, "PYTHONPATH": paths, "TMPDIR": str(temporary)})
    try:
        while not told.exists():
            assert process.poll() is None
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    pid = int(told.read_text())
    assert pid != process.pid
    deadline = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    if outlives := is_running(pid):
        os.kill(pid, signal.SIGKILL)
    assert not outlives
    assert os.listdir(temporary) == []


@pytest.mark.skipif(importlib.util.find_spec("ortools") is None, reason="ortools is not installed")
def test_asks_mesh_tensorflow():
    config = models.load_config("alexnet", "tiny")
    rules = auto_mtf.auto_mtf_layout("alexnet", config, 16, "sgd", (("rows", 2), ("columns", 4)))
    assert rules
    assert set(rules.values()) <= {"rows", "columns"}
    with pytest.raises(InfeasibleError, match="no answer after 0 s"):
        auto_mtf.auto_mtf_layout("alexnet", config, 16, "sgd", (("rows", 2),), limit=0.01)


@pytest.mark.skipif(importlib.util.find_spec("ortools") is None, reason="ortools is not installed")
def test_outputs_that_mesh_tensorflow_gives_one_name():
    # The cell of an LSTM is one operation with two outputs; auto_mtf ended with a KeyError.
    rules = auto_mtf.auto_mtf_layout("rnnlm", models.load_config("rnnlm", "tiny"), 16, "sgd",
                                     (("rows", 2), ("columns", 4)))
    assert rules
    assert set(rules.values()) <= {"rows", "columns"}


def test_it_is_asked_for_the_layout_of_a_microbatch(monkeypatch):
    """Of the whole batch it would split by axes that those of the run do not divide by."""
    asked = []
    monkeypatch.setattr(finding, "auto_mtf_layout", lambda *arguments: asked.append(arguments) or {})
    plan = resolve(Options(model="alexnet", devices="cpu", machine="h100", batch=64, microbatches="32",
                           compare="auto_mtf"))
    finding._auto_mtf(plan, perceptron())
    assert [batch for _, _, batch, *_ in asked] == [2]
