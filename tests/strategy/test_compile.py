"""python -m pase_mtf.strategy.compile: after it, a first search compiles nothing."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]

# Prints, per kernel, the types it was compiled for or loaded with, and how often it was compiled.
KERNELS = """
import importlib, json, pkgutil, pase_mtf.cost, pase_mtf.search, pase_mtf.simulator

def kernels():
    found = {}
    for package in (pase_mtf.cost, pase_mtf.search, pase_mtf.simulator):
        for entry in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            if not entry.name.endswith("__main__"):
                for name, value in vars(importlib.import_module(entry.name)).items():
                    if hasattr(value, "py_func") and value.__module__ == entry.name:
                        found[entry.name + "." + name] = (sorted(map(str, value.signatures)),
                                                          sum(value.stats.cache_misses.values()))
    return found
"""

# Searches of all kinds, of other graphs and machines than those that are compiled with.
SEARCHES = """
import dataclasses, itertools, sys
sys.path.insert(0, "tests")
import numpy as np
from small_graphs import perceptron
from pase_mtf import Machine, find_strategy, solve
from pase_mtf.cost.build import build_network
from pase_mtf.search import check_certificate
from pase_mtf.simulator.mcmc import search_simulated
from pase_mtf.search.network import CostNetwork, NetworkEdge

graph = perceptron((64, 128, 32, 64, 16), batch=48)
for machine, devices in itertools.product(("1080ti", "h100"), (2, 8, 12)):
    for shared in (False, True):
        linked = dataclasses.replace(Machine.load(machine), shared_cores=shared)
        found = find_strategy(graph, devices=devices, machine=linked)
        find_strategy(graph, devices=devices, machine=linked, simulate=4)
        find_strategy(graph, devices=devices, machine=linked, memory_limit=0.9 * found.memory_bytes + 1e5)
for method in ("pase", "mcmc", "k_best", "data_parallel", "expert"):
    find_strategy(graph, devices=8, machine="h100", method=method)
search_simulated(build_network(graph, Machine.load("h100"), 8), [0] * len(graph.layers), proposals=20)
network = CostNetwork.load("tests/data/instances/transformer_4.npz")
check_certificate(network, solve(network))
network = CostNetwork(network.vectors, network.edges)  # whose arrays cannot be written to
check_certificate(network, solve(network))
every, costs = np.arange(800), np.random.default_rng(0).random((800, 800))
solve(CostNetwork([costs[0]] * 3, [NetworkEdge(i, j, costs, every, every) for i, j in ((0, 1), (1, 2), (0, 2))]))
"""


def run(script, **environment):
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT,
                           env={**os.environ, **environment})
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_all_types_of_all_kernels():
    """What searches call is what was called before, kernel by kernel and type by type (a kernel that only kernels call
    has none of its own where those are loaded)."""
    out = run(KERNELS + """
from pase_mtf.strategy.warm import compile_kernels
compile_kernels()
before = kernels()
""" + SEARCHES + """
print(json.dumps([before, kernels()]))
""")
    before, after = json.loads(out)
    assert sum(bool(types) for types, _ in before.values()) > 10
    assert {name: types for name, (types, _) in after.items()} == {name: types for name, (types, _) in before.items()}


@pytest.mark.slow
def test_nothing_is_compiled_after_it():
    """One process compiles and keeps it (or finds that done), the next finds everything there."""
    done = subprocess.run([sys.executable, "-m", "pase_mtf.strategy.compile"], capture_output=True, text=True,
                          check=False, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    found = json.loads(run(KERNELS + SEARCHES + "print(json.dumps(kernels()))"))
    assert sum(bool(types) for types, _ in found.values()) > 10
    assert {name: misses for name, (_, misses) in found.items() if misses} == {}


def test_what_compiles_beside_ends_with_it(tmp_path):
    """However it ends; there is nothing yet, so that either would compile for long."""
    def running():
        found = []
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if str(tmp_path).encode() in (process / "environ").read_bytes():
                    found.append(int(process.name))
        return found

    def wait_for(number):
        end = time.monotonic() + 60.0
        while len(running()) != number:
            assert time.monotonic() < end, running()
            time.sleep(0.05)

    with subprocess.Popen([sys.executable, "-m", "pase_mtf.strategy.compile"], cwd=ROOT,
                          env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}) as started:
        wait_for(2)
        started.kill()
    wait_for(0)


# Beyond an array compiled code crashes, later, or reads garbage; the Python that it was raises IndexError.
CHECKED = """
import interpreted
import numpy as np
from pase_mtf.search.pass_state import active_domains
try:
    active_domains(np.array([0, 4]), np.ones(3, bool), np.zeros(2, np.int64))
except IndexError:
    print("checked")
"""
# What takes next to nothing without compiled code either.
SMALL = (*(f"tests/search/test_exact.py::{test}" for test in ("test_known_optima", "test_against_brute_force")),
         *(f"tests/search/test_depth_first.py::{test}" for test in ("test_against_brute_force", "test_limits")),
         *(f"tests/search/test_pulls.py::{test}" for test in (
             "test_sharing_changes_nothing[1-0.03125-True-2]", "test_the_optimum_of_what_repeats[0-float]",
             "test_kinds", "test_grain")),
         *(f"tests/search/test_remainders.py::test_the_least_sum_is_that_of_all_and_takes_what_the_prover_counts[{seed}]"
           for seed in range(5)),
         "tests/search/test_certificate.py::test_small_tables_and_repeated_pairs_are_read_like_any_other[0]",
         "tests/search/test_budget.py::test_a_pass_that_nobody_looks_at_stops_in_the_middle",
         "tests/search/test_steps.py::test_against_brute_force", "tests/search/test_left_over.py",
         "tests/search/test_memory.py", "tests/cost/test_resharding.py")


@pytest.mark.slow
def test_every_index_is_within_bounds():
    environment = {"NUMBA_DISABLE_JIT": "1", "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))}
    assert run(CHECKED, **environment) == "checked\n"
    done = subprocess.run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "interpreted",
                           "-m", "not slow", "-k", "not 1000", *SMALL], capture_output=True, text=True,
                          check=False, cwd=ROOT, env={**os.environ, **environment})
    assert done.returncode == 0, done.stdout
