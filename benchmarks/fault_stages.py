"""Runs that are struck in the stages that a run has with everything at its default: calibration, the measuring of
kernels, trial steps, the writing of its files. The next run finds what they have kept, and takes their place."""

from __future__ import annotations

import collections
import importlib
import os
import pathlib
import random
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

from benchmarks.fault_rows import Fault, Found, Sizes, half_written, told
from pase_mtf.machine.kernel_file import load_times

__all__ = ["STAGES", "stage_faults"]

STAGES = {
    "the export of the program": ("pase_mtf.launch.execution", "export_with_program"),
    "calibration": ("pase_mtf.calibration.calibrate", "calibrate"),
    "the measuring of kernels": ("pase_mtf.calibration.meter", "KernelMeter.measure"),
    "trial steps": ("pase_mtf.launch.strategies.trying", "try_steps"),
    "the writing of summary and report": ("pase_mtf.launch.execution", "write_outcome"),
}
"""Stage -> the module and the function that are it."""

_LIMIT = 300.0
_SHARE = 4
"""Kills in a stage are fewer by this factor than those in training: a run with everything at its default is longer."""
_MISSES = 4
"""Runs that may end before they are struck, for every one that is: trial steps depend on what was measured."""


def stage_faults(folder: pathlib.Path, tries: int) -> Iterator[Fault]:
    """All of them, to be tried in a folder.

    Args:
      folder: for what they write.
      tries: of kill -9 in training; a part of it in each of these stages.
    """
    lengths: dict[str, float] = {}
    for stage in STAGES:
        for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
            count = max(1, tries // _SHARE) if number == signal.SIGKILL else 1

            def tried(stage: str = stage, number: signal.Signals = number, code: int = code,
                      count: int = count) -> Found:
                found: collections.Counter[str] = collections.Counter()
                missed = 0
                generator = random.Random(f"{stage}{number}")
                while found.total() < count and missed < _MISSES * count:
                    if not lengths.get(stage):
                        lengths[stage] = _Run(folder, stage).length()
                    what = _Run(folder, stage).struck(number, code, generator.uniform(0.0, lengths[stage]))
                    if what is None:
                        missed += 1
                    else:
                        found[what] += 1
                survived = sum(times for what, times in found.items() if what.startswith("exit code"))
                return Found(found.total(), survived, told(found) or "no run came to it")
            name = "kill -9" if number == signal.SIGKILL else number.name
            yield Fault(f"{name} at a random moment of {stage}", tried)


class _Run:
    """A run with everything at its default but for its sizes, and a cache of its own that is empty at first."""

    def __init__(self, folder: pathlib.Path, stage: str):
        self._stage, self._begun, place = stage, False, folder / f"stage-{time.monotonic_ns()}"
        self._output, self._cache, self._said = place / "run", place / "cache", place / "said"
        self._cache.mkdir(parents=True)
        (place / "tmp").mkdir()
        self._flags = [*Sizes(folder).flags, "--mesh=2", "--steps=3", "--warmup=1", "--compare=data_parallel,random:1",
                       f"--output_dir={self._output}", "--resume=auto", "--measure_seconds=10",
                       *(["--prices=roofline"] if stage == "calibration" else [])]
        self._environment = {**os.environ, "XDG_CACHE_HOME": str(self._cache), "TMPDIR": str(place / "tmp"),
                             "TF_CPP_MIN_LOG_LEVEL": "3"}

    def _start(self) -> tuple[subprocess.Popen[str], dict[str, threading.Event]]:
        """A process, and whether the stage has begun and is over there for the first time, or the process has ended."""
        with open(self._said, "wb") as said:
            process = subprocess.Popen([sys.executable, "-m", "benchmarks.fault_stages", self._stage, *self._flags],
                                       stdout=subprocess.PIPE, stderr=said, text=True, env=self._environment,
                                       preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        events = {what: threading.Event() for what in ("begins", "is over")}

        def read() -> None:
            assert process.stdout
            with process.stdout as lines:
                for line in lines:
                    if line.startswith("stage "):
                        self._begun = True
                        events[line.removeprefix(f"stage {self._stage}").strip()].set()
            for event in events.values():
                event.set()
        threading.Thread(target=read, daemon=True).start()
        return process, events

    def length(self) -> float:
        """Seconds of the stage, in a run that is left alone; 0 where it never came to it."""
        process, events = self._start()
        events["begins"].wait(_LIMIT)
        begin = time.monotonic()
        events["is over"].wait(_LIMIT)
        length = time.monotonic() - begin
        process.wait(_LIMIT)
        return length if self._begun else 0.0

    def struck(self, number: signal.Signals, code: int, after: float) -> str | None:
        """What became of it, and of the same command once more; begins with the exit code where that is right. None: it
        has never come to the stage, or had ended before."""
        process, events = self._start()
        events["begins"].wait(_LIMIT)
        events["is over"].wait(after)
        process.send_signal(number)
        try:
            process.wait(_LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return f"still running after {_LIMIT:.0f} s"
        err = self._said.read_text(errors="replace")
        if not self._begun or (number == signal.SIGKILL and process.returncode == 0):
            return None
        # What is measured is written to the end.
        writes = self._stage == "the writing of summary and report"
        if process.returncode not in (code, 0 if writes and number != signal.SIGKILL else code) or "Traceback" in err:
            return f"ended with {process.returncode}: {err.strip()[-300:]}"
        if number != signal.SIGKILL and self._output.exists() != writes:
            return "left a part of its folder" if self._output.exists() else "has lost its files"
        for table in self._cache.rglob("kernels-*.jsonl"):
            if load_times(table).damaged > (number == signal.SIGKILL):  # the line that was being written
                return "damaged the table of kernels"
        try:
            again = subprocess.run([sys.executable, "-m", "pase_mtf.launch", *self._flags], capture_output=True,
                                   text=True, env=self._environment, timeout=_LIMIT, check=False)
        except subprocess.TimeoutExpired:
            return f"the next run: still running after {_LIMIT:.0f} s"
        if again.returncode or "Traceback" in again.stderr or "warning" in again.stderr:
            return f"the next run: exit code {again.returncode}: {again.stderr.strip()[-300:]}"
        if left := [*half_written(self._output), *half_written(self._cache)]:
            return f"left {', '.join(left)}"
        if not (self._output / "summary.json").exists():
            return "the next run has written no summary"
        kept = "all files" if writes and number != signal.SIGKILL else "nothing"
        return f"exit code {process.returncode}; " + (
            "" if number == signal.SIGKILL else f"{kept} left; ") + "the same command ran through afterwards"


def _told(stage: str, work: Callable[..., object]) -> Callable[..., object]:
    def told_of(*arguments: object, **named: object) -> object:
        print(f"stage {stage} begins", flush=True)
        try:
            return work(*arguments, **named)
        finally:
            print(f"stage {stage} is over", flush=True)
    return told_of


if __name__ == "__main__":
    # The launcher, which says when it comes to the stage that is named first.
    _stage = sys.argv.pop(1)
    _holder: object = importlib.import_module(STAGES[_stage][0])
    *_path, _name = STAGES[_stage][1].split(".")
    for _part in _path:
        _holder = getattr(_holder, _part)
    setattr(_holder, _name, _told(_stage, getattr(_holder, _name)))
    runpy.run_module("pase_mtf.launch", run_name="__main__", alter_sys=True)
