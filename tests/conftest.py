"""What holds for every test: a quiet TensorFlow, a cache of its own, and hypothesis that repeats itself."""

import gc
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before the first import of TensorFlow or matplotlib, here and in every process that a test starts.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["MPLBACKEND"] = "Agg"
# pytest-xdist's workers inherit the folder that the first process made, and leave it to that one to remove.
_IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if not _IS_WORKER:
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="pase_mtf-tests-")
    os.environ["MPLCONFIGDIR"] = os.path.join(os.environ["XDG_CACHE_HOME"], "matplotlib")

# No deadline: the first example of a test may compile or trace. HYPOTHESIS_PROFILE=explore looks for new examples.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None, print_blob=True,
                          suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
settings.register_profile("explore", parent=settings.get_profile("repeatable"), derandomize=False, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


_COLLECTOR = gc.get_threshold()
_UNTIL = "PASE_MTF_SLOW_TESTS_UNTIL"
"""Seconds since the epoch after which no slow test begins; it is left out, and counted. One machine is four times as
slow as another."""
_LEFT_OUT = "no time is left for slow tests"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where time may run out, files of slow tests are mixed: else the last rooms in the alphabet would be left out."""
    if _UNTIL in os.environ:
        items.sort(key=lambda item: hashlib.sha256(item.nodeid.partition("::")[0].encode()).digest()
                   if item.get_closest_marker("slow") else b"")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leaves a slow test out once its time is over."""
    if (until := os.environ.get(_UNTIL)) and item.get_closest_marker("slow") and time.time() > float(until):
        pytest.skip(_LEFT_OUT)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says how many slow tests were left out."""
    skipped: Sequence[pytest.TestReport] = terminalreporter.getreports("skipped")
    if count := sum(_LEFT_OUT in str(report.longrepr) for report in skipped):
        terminalreporter.write_line(f"{count} slow tests were left out: {_LEFT_OUT} ({_UNTIL}); "
                                    "make test-all runs all of them")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Removes the cache of this run."""
    gc.unfreeze()
    if "quick_nodes" in sys.modules:
        sys.modules["quick_nodes"].install(False)
    gc.set_threshold(*_COLLECTOR)
    if not _IS_WORKER:
        shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Modules and what they define stay: the garbage collector need not look at them again and again."""
    if "tensorflow" in sys.modules:
        import quick_nodes
        quick_nodes.install(True)
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty user cache for one test (and for the processes it starts); else all tests of a run share one."""
    path = tmp_path / "cache"
    path.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    return path


@pytest.fixture(scope="session")
def repository() -> Path:
    """The folder that holds setup.py."""
    return Path(__file__).absolute().parents[1]


@pytest.fixture
def timed_kernels(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The kernels that were timed, by a clock that tells what it is asked to."""
    from pase_mtf.machine.kernels import Timing
    asked: list[object] = []

    class Timer:
        disturbed = 0

        def __init__(self, devices, kind, expected=None, tiny=None, best=None):
            self.failed = {}

        def time(self, kernels, seconds=float("inf"), progress=None):
            for begin in range(0, len(kernels), 24):
                batch = kernels[begin:begin + 24]
                if seconds <= 0.0:
                    return
                asked.extend(batch)
                yield {kernel: Timing(1e-6 + 1e-11 * kernel.flops + 1e-10 * kernel.nbytes) for kernel in batch}
                progress(len(batch))

    monkeypatch.setattr("pase_mtf.calibration.kernels.KernelTimer", Timer)
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    return asked
