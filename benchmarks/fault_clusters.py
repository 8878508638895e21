"""Faults of runs over processes: one is killed, stopped, or cut off the network, at start-up, in calibration, in
training. Every run is struck twice: after the first it has to go on by itself, after the second to end. Or it is asked
to end as a whole (SIGTERM), as schedulers do, and the same command goes on with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from benchmarks import namespaces
from benchmarks.fault_rows import Fault, Found, Sizes, half_written, losses
from pase_mtf.errors import ClusterError

__all__ = ["cluster_faults"]

_MARK = "PASE_MTF_FAULTS"
_STAGES = ("start-up", "calibration", "training")
_PORT = 2222
_FOUND_WITHIN = 15.0
_LIMIT = 240.0
_EVERY = 5
"""Steps between two checkpoints."""
_CLOSE = 1e-4
"""As the tests of the launcher ask of losses over processes."""

_Strike = Callable[["_Run"], None]


def cluster_faults(folder: pathlib.Path) -> Iterator[Fault]:
    """All of them, to be tried in a folder."""
    undisturbed: dict[int, float] = {}
    signals = (("a worker is killed (-9)", 1, signal.SIGKILL), ("rank 0 is killed (-9)", 0, signal.SIGKILL),
               ("a worker is stopped (SIGSTOP)", 1, signal.SIGSTOP), ("rank 0 is stopped (SIGSTOP)", 0, signal.SIGSTOP))
    for count, stages in ((2, _STAGES), (4, _STAGES[2:])):
        for what, rank, number in signals:
            for stage in stages:
                for clients in ("one", "ranks"):
                    def strike(run: _Run, rank: int = rank, number: int = number) -> None:
                        pid = run.pid(rank)
                        if not pid:  # 0 would be this benchmark, and all that was started with it
                            raise TimeoutError(f"rank {rank} had ended before it was struck")
                        os.kill(pid, number)

                    yield _fault(folder, f"local:{count}, --clients={clients}: {what}", stage, clients, count, strike,
                                 f"rank {rank} ", undisturbed)
    for what, host in (("a worker's host is cut off", 1), ("the host of rank 0 is cut off", 0)):
        for stage in _STAGES:
            for clients in ("one", "ranks"):
                def cut(run: _Run, host: int = host) -> None:
                    assert run.hosts is not None
                    run.hosts.cut(host)

                yield _fault(folder, f"3 hosts, --clients={clients}: {what}", stage, clients, 3, cut,
                             f"rank {host} (", undisturbed, over_hosts=True)


    for count, over_hosts, stages in ((2, False, _STAGES), (3, True, _STAGES[2:])):
        for stage in stages:
            for clients in ("one", "ranks"):
                yield _ended(folder, f"{'3 hosts' if over_hosts else f'local:{count}'}, --clients={clients}: SIGTERM",
                             stage, clients, count, undisturbed, over_hosts=over_hosts)


def _fault(folder: pathlib.Path, what: str, stage: str, clients: str, count: int, strike: _Strike, named: str,
           undisturbed: dict[int, float], *, over_hosts: bool = False) -> Fault:
    return _tried(folder, what, stage, clients, count, lambda run: _twice(run, stage, strike, named, undisturbed),
                  "went on with the losses that would have come; then exit code 7, one line, nothing left", undisturbed,
                  over_hosts=over_hosts)


def _ended(folder: pathlib.Path, what: str, stage: str, clients: str, count: int, undisturbed: dict[int, float], *,
           over_hosts: bool) -> Fault:
    survived = ("exit code 143, checkpoint, summary, report; the same command went on with the same losses"
                if stage == "training" else "exit code 143, nothing left; the same command ran through")
    return _tried(folder, what, stage, clients, count, lambda run: _asked_to_end(run, stage, undisturbed), survived,
                  undisturbed, over_hosts=over_hosts)


def _tried(folder: pathlib.Path, what: str, stage: str, clients: str, count: int,
           strike: Callable[[_Run], tuple[str, list[float]]], survived: str, undisturbed: dict[int, float], *,
           over_hosts: bool) -> Fault:
    """A fault of one run, which is started for it. `strike` tells what was wrong ("": nothing) and the seconds."""
    def tried() -> Found:
        if over_hosts and (why := namespaces.missing()):
            return Found(0, 0, f"not tried: {why}")
        if not undisturbed:
            undisturbed.update(_undisturbed(folder))
        with contextlib.ExitStack() as stack:
            try:
                hosts = stack.enter_context(namespaces.hosts(count)) if over_hosts else None
            except RuntimeError as error:  # namespaces can be had here, and what joins them cannot
                return Found(0, 0, f"not tried: {error}")
            run = _Run(folder, clients, count, hosts, measured=stage == "calibration")
            try:
                problem, seconds = strike(run)
            except TimeoutError as error:
                problem, seconds = str(error), []
            finally:
                run.end()
        # Those of a problem are for whoever looks into it.
        if problem:
            return Found(1, 0, f"{problem}; it said: {' '.join(run.said().split())[-600:]}", seconds)
        return Found(1, 1, survived, seconds)
    return Fault(f"{what}, in {stage}" if stage != "start-up" else f"{what} at start-up", tried)


def _undisturbed(folder: pathlib.Path) -> dict[int, float]:
    """Step -> loss in one process."""
    output = folder / "undisturbed"
    subprocess.run([sys.executable, "-m", "pase_mtf.launch", *Sizes(folder).flags, "--mesh=2", "--steps=400",
                    "--warmup=1", "--strategy=data_parallel", "--machine=a100", f"--output_dir={output}"], check=True,
                   capture_output=True, timeout=_LIMIT)
    return losses(output)


class _Run:
    """A run over processes: its launchers, and what they say.

    Attributes:
      output: its folder.
      hosts: on which it runs; None: all on this one.
    """

    def __init__(self, folder: pathlib.Path, clients: str, count: int, hosts: namespaces.Hosts | None, *,
                 measured: bool):
        """Starts it; `measured`: on a machine that has to be calibrated first."""
        self._place = folder / f"cluster-{time.monotonic_ns()}"
        self.output, self.hosts = self._place / "run", hosts
        for name in ("tmp", "cache"):
            (self._place / name).mkdir(parents=True)
        cluster = (f"local:{count}" if hosts is None else
                   ",".join(f"{address}:{_PORT}" for address in hosts.addresses))
        self._command = [sys.executable, "-m", "pase_mtf.launch", *Sizes(folder).flags, f"--mesh={count}", "--warmup=1",
                         "--strategy=data_parallel", f"--checkpoint_every={_EVERY}", "--max_restarts=1",
                         f"--clients={clients}", f"--cluster={cluster}",
                         f"--machine={'local' if measured else 'a100'}"]
        self._said = [self._place / f"said-{number}" for number in range(1 if hosts is None else count)]
        self.launchers = self.start(1000000)

    def start(self, steps: int) -> list[subprocess.Popen[bytes]]:
        """Starts the run, or goes on with it: as many launchers as there are hosts."""
        started = []
        for number, said in enumerate(self._said):
            command = [*self._command, f"--steps={steps}", "--resume=auto",
                       f"--output_dir={self.output if not number else self._place / f'run-{number}'}"]
            with open(said, "ab") as file:
                started.append(subprocess.Popen(
                    command if self.hosts is None else self.hosts.on(number, [*command, f"--task={number}"]),
                    stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                    env={**os.environ, _MARK: str(self._place), "TMPDIR": str(self._place / "tmp"),
                         "XDG_CACHE_HOME": str(self._place / "cache"), "TF_CPP_MIN_LOG_LEVEL": "3"}))
        return started

    def codes(self) -> list[int] | None:
        """The exit codes of its launchers; None: not all have ended within a minute."""
        end = time.monotonic() + 60.0
        while any(launcher.poll() is None for launcher in self.launchers):
            if time.monotonic() > end:
                return None
            time.sleep(0.02)
        return [launcher.returncode for launcher in self.launchers]

    def said(self, launcher: int = 0) -> str:
        """What a launcher and its processes have said."""
        return self._said[launcher].read_text(errors="replace")

    def until(self, what: str, true: Callable[[], object], seconds: float = _LIMIT) -> float:
        """Waits for something; the seconds that it took.

        Raises:
          TimeoutError: it did not come, or the run has ended before.
        """
        begin = time.monotonic()
        while not true():
            if time.monotonic() - begin > seconds:
                raise TimeoutError(f"no {what} within {seconds:g} s")
            if self.launchers[0].poll() is not None and not true():
                raise TimeoutError(f"exit code {self.launchers[0].returncode} before {what}")
            time.sleep(0.02)
        return time.monotonic() - begin

    def step(self) -> int:
        """The last step that was done; -1: none."""
        path = self.output / "metrics.jsonl"
        return path.read_bytes().count(b"\n") - 1 if path.exists() else -1

    def pid(self, rank: int) -> int:
        """The process of a rank; 0 where there is none yet."""
        return next((pid for pid, own in self.processes().items() if own.get("rank") == rank), 0)

    def processes(self) -> dict[int, dict[str, object]]:
        """The processes of the run that live, with what a launcher has told them."""
        found = {}
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError, ValueError):
                variables = dict(entry.partition("=")[::2] for entry in pathlib.Path(f"/proc/{name}/environ").read_text(
                    errors="replace").split("\0"))
                if variables.get(_MARK) == str(self._place):
                    found[int(name)] = json.loads(variables.get("PASE_MTF_CLUSTER", "{}"))
        return found

    def left(self) -> str:
        """What there is of it after its end, in words; empty: nothing."""
        left = [f"process {pid}" for pid in self.processes()]
        left += os.listdir(self._place / "tmp")
        left += half_written(self.output)
        if self.hosts is not None:
            for host in range(len(self.launchers)):
                table = subprocess.run(self.hosts.on(host, ["cat", "/proc/net/tcp", "/proc/net/tcp6"]),
                                       capture_output=True, text=True, check=True).stdout
                left += [f"port {row.split()[1]}" for row in table.splitlines() if row.split()[3] == "0A"]
        return ", ".join(left)

    def end(self) -> None:
        """Ends all of it, whatever became of it."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for launcher in self.launchers:
            launcher.kill()
            launcher.wait()


def _reach(run: _Run, stage: str, ranks: Sequence[int]) -> None:
    """Waits until a run is in a stage."""
    if stage == "start-up":
        run.until("processes", lambda: all(map(run.pid, ranks)))
        return
    if stage == "calibration":
        run.until("calibration", lambda: "is measured first" in run.said())
        time.sleep(random.Random(stage).uniform(0.0, 1.0))  # it takes two seconds on a fast machine
        return
    before = max(run.step(), 0)
    run.until("training", lambda: run.step() > before + 2 * _EVERY + 1)


def _unlike(run: _Run, undisturbed: Mapping[int, float], least: int = 0) -> str:
    """What is wrong with the steps of a run; empty: each is there once, at least so many, with the loss of a run that
    nothing happened to."""
    found = losses(run.output)
    if run.step() + 1 != len(found):  # by step: of two lines of one step that keeps the later
        return "a step stands there twice"
    if list(found) != list(range(len(found))) or len(found) < least:
        return "a step is missing"
    far = any(abs(found[step] - undisturbed[step]) > _CLOSE * abs(undisturbed[step])
              for step in found.keys() & undisturbed.keys())
    return "other losses" if far else ""


def _asked_to_end(run: _Run, stage: str, undisturbed: Mapping[int, float]) -> tuple[str, list[float]]:
    """Ends a run in the stage, and goes on with it: what is wrong ("": nothing), seconds until it had ended."""
    _reach(run, stage, range(3 if run.hosts else 2))
    begin = time.monotonic()
    for launcher in run.launchers:
        launcher.send_signal(signal.SIGTERM)
    codes, seconds = run.codes(), [time.monotonic() - begin]
    if codes != [128 + signal.SIGTERM] * len(run.launchers):
        return f"exit codes {codes}", seconds
    if left := run.left():
        return f"left: {left}", seconds
    kept, trained = run.output.exists(), stage == "training"
    if kept != trained or "Traceback" in run.said():
        return f"{'left' if kept else 'lost'} its folder, or a traceback", seconds
    done = run.step() + 1
    if trained and not all((run.output / name).exists() for name in (
            "summary.json", "report.html", f"checkpoint/step-{done}/checkpoint.json")):
        return "lacks a checkpoint of the last step, the summary or the report", seconds
    run.launchers = run.start(done + _EVERY)
    if codes := [code for code in run.codes() or [None] if code != 0]:
        return f"went on to exit codes {codes}", seconds
    if problem := _unlike(run, undisturbed, done + _EVERY):
        return problem, seconds
    left = run.left()
    return (f"left: {left}" if left else ""), seconds


def _twice(run: _Run, stage: str, strike: _Strike, named: str, undisturbed: Mapping[int, float],
           ) -> tuple[str, list[float]]:
    """Strikes in the stage, and once more in training: what is wrong ("": nothing), seconds until each was found."""
    ranks = range(3 if run.hosts else 2)
    _reach(run, stage, ranks)
    strike(run)
    seconds = [run.until("restart", lambda: "starting again" in run.said(), 60.0)]
    line = next(line for line in run.said().splitlines() if "starting again" in line)
    if not line.startswith(named):
        return f"named {line!r}", seconds
    if run.hosts:
        for host in range(len(run.hosts.addresses)):
            run.hosts.mend(host)
    _reach(run, "training", ranks)
    strike(run)
    begin, codes = time.monotonic(), run.codes()
    if codes is None:
        return "a launcher has not ended within a minute", seconds
    seconds.append(time.monotonic() - begin)
    if codes != [ClusterError.exit_code] * len(codes):
        return f"exit codes {codes}", seconds
    for number in range(len(codes)):
        last = (run.said(number).splitlines() or [""])[-1]
        if "error: " not in last or "rank " not in last or (not number and f"error: {named}" not in last):
            return f"its last line is {last!r}", seconds
    if problem := _unlike(run, undisturbed):
        return problem, seconds
    if max(seconds) > _FOUND_WITHIN:
        return f"found after {max(seconds):.1f} s", seconds
    left = run.left()
    return (f"left: {left}" if left else ""), seconds
