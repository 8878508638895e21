"""What survives: runs that are killed, ended, out of disk, damaged or cut off at random moments, and what the next run
finds.

    python -m benchmarks.faults                       # goes on where it was; all of it takes about an hour
    python -m benchmarks.faults --only=SIGTERM --again

A run is one of AlexNet with a few thousand parameters on two virtual devices, which writes a checkpoint every step; or
one with everything at its default (`benchmarks.fault_stages`), or over processes (`benchmarks.fault_clusters`). Writes
docs/benchmarks/faults.json, after every row, and faults.md.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import io
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.commands import kept_when_interrupted, told_in_one_line
from benchmarks.fault_clusters import cluster_faults
from benchmarks.fault_rows import Fault, Found, Row, Sizes, losses, told
from benchmarks.fault_stages import stage_faults
from benchmarks.launching import ROOT, commit
from benchmarks.markdown import table
from pase_mtf.calibration.cache import tensorflow_version
from pase_mtf.errors import FormatError, UsageError
from pase_mtf.files import write_atomically
from pase_mtf.launch.checkpoints.checkpoint import find_checkpoint
from pase_mtf.machine.kernel_file import load_times
from pase_mtf.runtime import describe_host

__all__ = ["document", "main"]

_PAGE = ROOT / "docs" / "benchmarks" / "faults.md"
_LIMIT = 300.0
_DISK = "200k"


class _Runs:
    """Starts the launcher in a folder of its own."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self._sizes = Sizes(folder)
        self._started: list[subprocess.Popen[str]] = []

    def command(self, output: str | pathlib.Path, *flags: str) -> list[str]:
        """The command line of a run that takes very long."""
        return [sys.executable, "-m", "pase_mtf.launch", *self._sizes.flags, "--mesh=2", "--machine=a100",
                "--steps=1000000", "--checkpoint_every=1", f"--output_dir={output}", *flags]

    def start(self, output: str | pathlib.Path, *flags: str) -> subprocess.Popen[str]:
        """A run, whose lines can be read."""
        self._started.append(subprocess.Popen(
            self.command(output, *flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            preexec_fn=_as_from_a_terminal))
        return self._started[-1]

    def close(self) -> None:
        """Ends those that still run: a signal that ends the benchmark does not come to them."""
        for process in self._started:
            process.kill()
            process.wait()

    def resume(self, output: pathlib.Path, steps: int = 3) -> subprocess.CompletedProcess[str]:
        """A run that goes on from another, into a folder beside it."""
        return subprocess.run(
            [sys.executable, "-m", "pase_mtf.launch", f"--resume={output}", f"--steps={steps}", "--warmup=1",
             f"--output_dir={output}-resumed"], capture_output=True, text=True, timeout=_LIMIT, check=False)


def _as_from_a_terminal() -> None:
    """A shell's background jobs ignore Ctrl-C, and those of nohup SIGHUP; so would what they start."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _answers(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Waits until a process catches a signal: before that it is Python that is starting, and nothing of ours runs.
    Python itself catches Ctrl-C: of that, SIGTERM tells."""
    sign = signal.SIGTERM if number == signal.SIGINT else number
    while process.poll() is None:
        status = pathlib.Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
        caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt:")).split()[1], 16)
        if caught >> sign - 1 & 1:
            return


def _until(process: subprocess.Popen[str], start: str) -> None:
    """Reads the lines of a run up to one that begins so."""
    assert process.stdout
    for line in process.stdout:
        if line.startswith(start):
            return


def _went_on(runs: _Runs, output: pathlib.Path) -> str:
    """What a resumed run made of an ended one: what is wrong, "" where it had the very losses that would have come."""
    try:
        last = find_checkpoint(str(output)).step
        done = runs.resume(output)
    except FormatError:  # what these faults are to find: a row, and not the end of the benchmark
        return "no whole checkpoint was left"
    except subprocess.TimeoutExpired:
        return f"resumed: still running after {_LIMIT:.0f} s"
    if done.returncode:
        return f"resumed: exit code {done.returncode}"
    before, after = losses(output), losses(pathlib.Path(f"{output}-resumed"))
    if min(after) != last:
        return "resumed at another step"
    if any(abs(after[step] - before[step]) > 1e-5 * abs(before[step]) for step in before.keys() & after.keys()):
        return "other losses"
    if any(name.startswith(".") for name in os.listdir(output / "checkpoint")):
        return "left half a checkpoint"
    return ""


def _killed(runs: _Runs, tries: int, *, writing: bool) -> Found:
    """Kills runs: at a moment within a second, or at one at which a checkpoint is half written."""
    generator, found = random.Random(0), collections.Counter[str]()
    halves = 0
    for number in range(tries):
        output = runs.folder / f"killed-{'writing' if writing else 'training'}-{number}"
        process = runs.start(output)
        _until(process, "step     2")
        if writing:
            _stop_while_it_writes(process, output, generator)
        else:
            time.sleep(generator.uniform(0, 1))
        process.kill()
        process.communicate()
        halves += _half_written(output)
        found[_went_on(runs, output) or "went on with the losses that would have come"] += 1
    survived = sum(count for what, count in found.items() if what.startswith("went on"))
    return Found(tries, survived, f"{told(found)}; in {halves} a checkpoint was being written")


def _stop_while_it_writes(process: subprocess.Popen[str], output: pathlib.Path, generator: random.Random) -> None:
    """Stops a run a random time after it has begun to write a checkpoint, of which no more is there than a part."""
    seconds = 0.05
    while process.poll() is None:
        while not _half_written(output) and process.poll() is None:
            pass
        time.sleep(generator.uniform(0, seconds))
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        if _half_written(output):
            return
        process.send_signal(signal.SIGCONT)  # it was whole by then
        seconds /= 2


def _half_written(output: pathlib.Path) -> bool:
    """Whether there is a part of a checkpoint; one that is being removed was whole."""
    folder = output / "checkpoint"
    return folder.exists() and any(name.startswith(".partial-") and not name.startswith(".partial-step-")
                                   for name in os.listdir(folder))


def _ended(runs: _Runs, number: signal.Signals, code: int) -> Iterator[Fault]:
    """The signal in every stage: how the run ended, and what it left."""
    def strike(name: str, wait: Callable[[subprocess.Popen[str]], object], flags: Sequence[str]) -> Found:
        output = runs.folder / f"{number.name}-{name.replace(' ', '-')}"
        process = runs.start(output, *flags)
        wait(process)
        process.send_signal(number)
        try:
            _, err = process.communicate(timeout=_LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return Found(1, 0, f"still running after {_LIMIT:.0f} s")
        tidy = process.returncode in (code, 0 if flags else code) and "Traceback" not in err
        # From its first step on a run leaves what it has measured.
        if output.exists() or name.startswith(("in training", "after the last step")):
            found = "checkpoint, summary, report; went on from there"
            whole = all((output / name).exists() for name in ("summary.json", "report.html", "checkpoint"))
            problem = _went_on(runs, output) if whole else "not all files"
            tidy, found = tidy and not problem, problem or found
        else:
            found = "nothing left"
        return Found(1, int(tidy), f"exit code {process.returncode}, {found}")

    for name, wait, flags in (
            ("as soon as its first module runs", lambda process: _answers(process, number), ()),
            ("after 0.5 s", lambda process: time.sleep(0.5), ()),
            ("in the search", lambda process: _until(process, "output"), ()),
            ("while lowering", lambda process: (_until(process, "predicted step"), time.sleep(0.1)), ()),
            ("in training", lambda process: _until(process, "step     5"), ()),
            ("after the last step, while files are written", lambda process: _until(process, "step     3"),
             ("--steps=3", "--warmup=1"))):
        yield Fault(f"{number.name} {name}", functools.partial(strike, name, wait, flags))


def _disk_full(runs: _Runs) -> Found:
    """A small file system, which a namespace of its own lets us mount; the kernel may forbid it."""
    output = runs.folder / "disk"
    output.mkdir()
    # What is left is copied out of the namespace, where its file system ends.
    command = " ".join(runs.command(output / "run", "--checkpoint_every=20"))
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", f"mount -t tmpfs -o size={_DISK} tmpfs {output} && "
         f"{{ {command}; code=$?; cp -r {output} {runs.folder}/full; exit $code; }}"],
        capture_output=True, text=True, timeout=_LIMIT, check=False)
    if "unshare" in done.stderr or "mount" in done.stderr:
        return Found(0, 0, "not tried: no file system can be mounted here")
    return _full_disk_found(done, _went_on(runs, runs.folder / "full" / "run"))


def _full_disk_found(done: subprocess.CompletedProcess[str], problem: str) -> Found:
    """What became of a run whose disk was full, and of the one that went on from it; where that is not as it should be,
    what the run said last."""
    lines = [line for line in done.stderr.splitlines() if line] or ["nothing"]
    wrong = ["a traceback"] * ("Traceback" in done.stderr) + [
        f"the last line: {lines[-1]}"] * ("free space" not in lines[-1])
    return Found(1, int(done.returncode == 2 and not wrong and not problem), ", ".join(
        [f"exit code {done.returncode}", *(wrong or ["one line"])])
        + f"; {problem or 'went on from the last whole checkpoint'}")


def _flipped(runs: _Runs, tries: int, *, both: bool) -> Found:
    """A byte of the last checkpoint, or one in either; what `--resume` finds before TensorFlow is loaded."""
    output = runs.folder / f"flipped-{both}"
    process = runs.start(output)
    _until(process, "step     5")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=_LIMIT)
    step, generator = find_checkpoint(str(output)).step, random.Random(1)
    found = collections.Counter[str]()
    for _ in range(tries):
        damaged = runs.folder / "damaged"
        shutil.copytree(output, damaged)
        newest, other = sorted((damaged / "checkpoint").glob("step-*"), key=lambda path: -int(path.name[5:]))
        changed, said = list[str](), io.StringIO()
        for folder in (newest, other) if both else (newest,):
            file = generator.choice(sorted(folder.iterdir()))
            changed.append(str(file))
            raw = bytearray(file.read_bytes())
            raw[generator.randrange(len(raw))] ^= 1 << generator.randrange(8)
            file.write_bytes(raw)
        try:
            with contextlib.redirect_stderr(said):
                taken = find_checkpoint(str(damaged)).step
            found["not noticed" if taken >= step else "the one before was taken, the damaged file named"
                  if changed[0] in said.getvalue() else "the damaged file was not named"] += 1
        except FormatError as error:
            named = changed[0] in str(error) and "\n" not in str(error)
            found["refused in one line that names the file" if named else "refused"] += 1
        shutil.rmtree(damaged)
    right = "refused in one line" if both else "the one before"
    return Found(tries, sum(count for what, count in found.items() if what.startswith(right)), told(found))


def _two_at_once(runs: _Runs) -> Found:
    """Two runs with everything at its default, of which neither finds any kernel times."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(runs.folder / "cache-of-two"), "TF_CPP_MIN_LOG_LEVEL": "3"}
    processes = [subprocess.Popen(
        runs.command(runs.folder / f"one-of-two-{number}", "--machine=local", "--steps=3", "--warmup=1",
                     "--compare=data_parallel", "--measure_seconds=10"),
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment) for number in range(2)]
    try:
        said = [process.communicate(timeout=_LIMIT)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    waited = sum("are timed by another run, which is waited for" in text for text in said)
    damaged = sum(load_times(table).damaged for table in (runs.folder / "cache-of-two").rglob("kernels-*.jsonl"))
    survived = codes == [0, 0] and waited >= 1 and not damaged and not any("Traceback" in text for text in said)
    return Found(1, int(survived), f"exit codes {codes[0]} and {codes[1]}, {waited} waited for the other, "
                 f"{damaged} lines of the table are damaged")


def _faults(runs: _Runs, tries: int) -> Iterator[Fault]:
    """All of them, in the order of the page."""
    yield Fault("kill -9 at a random moment of training", lambda: _killed(runs, tries, writing=False))
    yield Fault("kill -9 while a checkpoint is written", lambda: _killed(runs, tries, writing=True))
    yield from _ended(runs, signal.SIGTERM, 143)
    yield from _ended(runs, signal.SIGINT, 130)
    yield from _ended(runs, signal.SIGHUP, 129)
    yield from stage_faults(runs.folder, tries)
    yield Fault("two runs measure the machine at once", lambda: _two_at_once(runs))
    yield Fault(f"disk full in training ({_DISK}B)", lambda: _disk_full(runs))
    yield Fault("a bit flipped in the last checkpoint", lambda: _flipped(runs, tries, both=False))
    yield Fault("a bit flipped in both checkpoints", lambda: _flipped(runs, tries, both=True))
    yield from cluster_faults(runs.folder)


def document(measured: dict[str, Any]) -> str:
    """The page."""
    rows = _rows(measured)
    alone, over = [row for row in rows if not row.clustered], [row for row in rows if row.clustered]
    body = table(("fault", "tries", "survived", "what was found"),
                 [(row.fault, row.tries, row.survived, row.found) for row in alone], left=(0, 3))
    if over:
        body += "\n\n## Over processes\n\n" + table(
            ("fault", "tries", "survived", "found after s", "what was found"),
            [(row.fault, row.tries, row.survived, ", ".join(f"{seconds:.1f}" for seconds in row.seconds), row.found)
             for row in over], left=(0, 4)) + (
            "\n\nBut for SIGTERM, which all launchers get, a run is struck twice: in the stage that is named, and, "
            "when it has started again by itself from its last checkpoint (`--max_restarts=1`), in training. "
            "Found after: from the fault until all processes were ended and it started again, and until all "
            "launchers had ended (of SIGTERM: that only). Survived: within 15 s each, a line that names the rank, "
            "every step once with the loss that it has in one process, exit code 7 of every launcher (of SIGTERM "
            "143, and 0 of the same command with `--resume=auto`), and no process, port or temporary file left. "
            "Hosts are network namespaces, whose cable is taken out of the hub.")
    where: dict[str, dict[str, None]] = {}
    for row in rows:
        where.setdefault(row.where, {})[row.commit or "unknown"] = None
    told = {row.fault for row in rows}
    missing = [fault for fault in measured.get("faults", ()) if fault not in told]
    untried = f"Not tried yet, of {len(missing) + len(told)}: {'; '.join(missing)}. " if missing else ""
    return (f"# What survives\n\n{body}\n\n{untried}AlexNet with 3,114 parameters on two virtual devices, a checkpoint "
            "every step (every 20 where the disk is full); runs that are struck at a random moment of a stage have "
            "everything else at its default, those over processes one device in each, and a checkpoint every 5 steps. "
            "Survived: exit code and files as they should be, no traceback, and `--resume` went on at the last whole "
            "checkpoint with the losses that the ended run had or would have had; of a stage, the same command ran "
            "through afterwards, and losses were not compared. "
            + " / ".join(f"{place}, commit {', '.join(commits)}" for place, commits in where.items())
            + ". Reproduce with `python -m benchmarks.faults`.\n")


def _rows(measured: dict[str, Any]) -> list[Row]:
    """The rows of a file; those of earlier versions are all of one computer."""
    return [Row(**{"where": measured.get("where", ""), **row}) for row in measured["rows"]]


def _kept(page: pathlib.Path) -> dict[str, Row]:
    """The rows that there are, by their faults: whatever computer they were measured on, until they are tried anew."""
    path = page.with_suffix(".json")
    return {row.fault: row for row in _rows(json.loads(path.read_text(encoding="utf-8")))} if path.exists() else {}


def _write(page: pathlib.Path, faults: Sequence[str], rows: Sequence[Row]) -> None:
    measured = {"faults": list(faults), "rows": [dataclasses.asdict(row) for row in rows]}
    write_atomically(page.with_suffix(".json"), json.dumps(measured, indent=1) + "\n")
    write_atomically(page, document(measured))


@told_in_one_line()
@kept_when_interrupted
def main(arguments: Sequence[str] | None = None) -> int:
    """Tries the faults that have no row yet, and writes the page after each; returns 1 where one was not survived."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__.splitlines()[0])
    parser.add_argument("--tries", type=int, default=20, help="random moments of kill -9, and random bits")
    parser.add_argument("--only", default="", help="faults with this in their name")
    parser.add_argument("--again", action="store_true", help="those that have a row, too")
    parser.add_argument("--output", type=pathlib.Path, default=_PAGE, help="the page; its numbers lie beside it")
    options = parser.parse_args(arguments)
    where = f"{describe_host()}; TensorFlow {tensorflow_version()}, Python {sys.version.split()[0]}"
    rows = _kept(options.output)
    with (tempfile.TemporaryDirectory(prefix="pase_mtf-faults-") as folder,
          contextlib.closing(_Runs(pathlib.Path(folder))) as runs):
        faults = list(_faults(runs, options.tries))
        names = [fault.name for fault in faults]
        if not any(options.only in fault.name for fault in faults):
            raise UsageError(f"--only={options.only}: no fault has this in its name; the page has the names of all: "
                             f"{options.output}")
        for fault in faults:
            known = rows.get(fault.name)
            untried = known is None or not known.tries  # as where there was no root, or no run came to a stage
            if options.only in fault.name and (options.again or untried):
                begin = time.monotonic()
                row = Row(fault.name, *fault.tried(), commit=commit() or "", where=where)
                if row.tries or untried:  # what was tried elsewhere stands where it cannot be tried
                    rows[fault.name] = row
                order = sorted(rows, key=lambda name: names.index(name) if name in names else len(names))
                _write(options.output, names, [rows[name] for name in order])
                print(f"{row.fault}: {row.survived} of {row.tries} ({row.found}), {time.monotonic() - begin:.0f} s",
                      flush=True)
    return int(any(row.survived < row.tries for row in rows.values() if row.where == where and row.fault in names))


if __name__ == "__main__":
    sys.exit(main())
