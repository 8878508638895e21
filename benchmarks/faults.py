"""What survives: runs that are killed, ended, out of disk or damaged at random moments, and what the next run finds.

python -m benchmarks.faults        writes docs/benchmarks/faults.md and faults.json

A run is one of AlexNet with a few thousand parameters on two virtual devices, which writes a checkpoint every step.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
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
from collections.abc import Callable, Sequence

from benchmarks.launching import ROOT, commit
from benchmarks.markdown import table
from pase_mtf.calibration.cache import tensorflow_version
from pase_mtf.errors import FormatError
from pase_mtf.files import write_atomically
from pase_mtf.launch.checkpoints.checkpoint import find_checkpoint
from pase_mtf.runtime import describe_host

__all__ = ["Row", "document", "main"]

_PAGE = ROOT / "docs" / "benchmarks" / "faults.md"
_SIZES = {"preset": "tiny", "image": 12, "fully_connected": [32, 16], "batch": 8,
          "convolutions": [{"channels": 8, "kernel": 3, "stride": 2, "pool": 2}]}
_LIMIT = 300.0
_DISK = "200k"


@dataclasses.dataclass(frozen=True)
class Row:
    """One kind of fault.

    Attributes:
      fault: what was done.
      tries: how often.
      survived: how often all was as it should be.
      found: what was found, with how often.
    """

    fault: str
    tries: int
    survived: int
    found: str


class _Runs:
    """Starts the launcher in a folder of its own."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self._sizes = folder / "sizes.json"
        self._sizes.write_text(json.dumps(_SIZES))

    def command(self, output: str | pathlib.Path, *flags: str) -> list[str]:
        """The command line of a run that takes very long."""
        return [sys.executable, "-m", "pase_mtf.launch", "--model=alexnet", f"--preset={self._sizes}", "--mesh=2",
                "--devices=cpu", "--machine=a100", "--steps=1000000", "--log_every=1", "--compare=none",
                "--checkpoint_every=1", f"--output_dir={output}", *flags]

    def start(self, output: str | pathlib.Path, *flags: str) -> subprocess.Popen[str]:
        """A run, whose lines can be read."""
        # A shell's background jobs ignore Ctrl-C, and so would what they start.
        return subprocess.Popen(self.command(output, *flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))

    def resume(self, output: pathlib.Path, steps: int = 3) -> subprocess.CompletedProcess[str]:
        """A run that goes on from another, into a folder beside it."""
        return subprocess.run(
            [sys.executable, "-m", "pase_mtf.launch", f"--resume={output}", f"--steps={steps}", "--warmup=1",
             f"--output_dir={output}-resumed"], capture_output=True, text=True, timeout=_LIMIT, check=False)


def _answers(process: subprocess.Popen[str]) -> None:
    """Waits until a process catches SIGTERM: before that it is Python that is starting, and nothing of ours runs."""
    while process.poll() is None:
        status = pathlib.Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
        caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt:")).split()[1], 16)
        if caught >> signal.SIGTERM - 1 & 1:
            return


def _until(process: subprocess.Popen[str], start: str) -> None:
    """Reads the lines of a run up to one that begins so."""
    assert process.stdout
    for line in process.stdout:
        if line.startswith(start):
            return


def _losses(folder: pathlib.Path) -> dict[int, float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {entry["step"]: entry["loss"] for entry in map(json.loads, lines)}


def _went_on(runs: _Runs, output: pathlib.Path) -> str:
    """What a resumed run made of an ended one: what is wrong, "" where it had the very losses that would have come."""
    last = find_checkpoint(str(output)).step
    done = runs.resume(output)
    if done.returncode:
        return f"resumed: exit code {done.returncode}"
    before, after = _losses(output), _losses(pathlib.Path(f"{output}-resumed"))
    if min(after) != last:
        return "resumed at another step"
    if any(abs(after[step] - before[step]) > 1e-5 * abs(before[step]) for step in before.keys() & after.keys()):
        return "other losses"
    if any(name.startswith(".") for name in os.listdir(output / "checkpoint")):
        return "left half a checkpoint"
    return ""


def _killed(runs: _Runs, tries: int) -> Row:
    generator, found = random.Random(0), collections.Counter()
    halves = 0
    for number in range(tries):
        output = runs.folder / f"killed-{number}"
        process = runs.start(output)
        _until(process, "step     2")
        time.sleep(generator.uniform(0, 1))
        process.kill()
        process.communicate()
        halves += any(name.startswith(".partial") for name in os.listdir(output / "checkpoint"))
        found[_went_on(runs, output) or "went on with the losses that would have come"] += 1
    survived = sum(count for what, count in found.items() if what.startswith("went on"))
    return Row("kill -9 at a random moment of training", tries, survived,
               f"{_told(found)}; in {halves} a checkpoint was being written")


def _ended(runs: _Runs, number: signal.Signals, code: int) -> list[Row]:
    """The signal in every stage: how the run ended, and what it left."""
    def strike(name: str, wait: Callable[[subprocess.Popen[str]], object], flags: Sequence[str] = ()) -> Row:
        output = runs.folder / f"{number.name}-{len(rows)}"
        process = runs.start(output, *flags)
        wait(process)
        process.send_signal(number)
        try:
            _, err = process.communicate(timeout=_LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return Row(f"{number.name} {name}", 1, 0, f"still running after {_LIMIT:.0f} s")
        tidy = process.returncode in (code, 0 if flags else code) and "Traceback" not in err
        if output.exists():
            found = "checkpoint, summary, report; went on from there"
            whole = all((output / name).exists() for name in ("summary.json", "report.html", "checkpoint"))
            problem = _went_on(runs, output) if whole else "not all files"
            tidy, found = tidy and not problem, problem or found
        else:
            found = "nothing left"
        return Row(f"{number.name} {name}", 1, int(tidy), f"exit code {process.returncode}, {found}")

    rows: list[Row] = []
    for name, wait, flags in (
            ("as soon as its first module runs", _answers, ()),
            ("after 0.5 s", lambda process: time.sleep(0.5), ()),
            ("in the search", lambda process: _until(process, "output"), ()),
            ("while lowering", lambda process: (_until(process, "predicted step"), time.sleep(0.1)), ()),
            ("in training", lambda process: _until(process, "step     5"), ()),
            ("after the last step, while files are written", lambda process: _until(process, "step     3"),
             ("--steps=3", "--warmup=1"))):
        rows.append(strike(name, wait, flags))
    return rows


def _disk_full(runs: _Runs) -> Row:
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
        return Row("disk full in training", 0, 0, "not tried: no file system can be mounted here")
    lines = [line for line in done.stderr.splitlines() if line]
    tidy = done.returncode == 2 and "Traceback" not in done.stderr and "free space" in lines[-1]
    problem = _went_on(runs, runs.folder / "full" / "run")
    return Row(f"disk full in training ({_DISK}B)", 1, int(tidy and not problem),
               f"exit code {done.returncode}, one line; {problem or 'went on from the last whole checkpoint'}")


def _flipped(runs: _Runs, tries: int) -> list[Row]:
    """A byte of the last checkpoint, and one in either; what `--resume` finds before TensorFlow is loaded."""
    output = runs.folder / "flipped"
    process = runs.start(output)
    _until(process, "step     5")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=_LIMIT)
    step, generator = find_checkpoint(str(output)).step, random.Random(1)
    rows = []
    for both in (False, True):
        found: collections.Counter[str] = collections.Counter()
        for _ in range(tries):
            damaged = runs.folder / "damaged"
            shutil.copytree(output, damaged)
            newest, other = sorted((damaged / "checkpoint").glob("step-*"), key=lambda path: -int(path.name[5:]))
            for folder in (newest, other) if both else (newest,):
                file = generator.choice(sorted(folder.iterdir()))
                raw = bytearray(file.read_bytes())
                raw[generator.randrange(len(raw))] ^= 1 << generator.randrange(8)
                file.write_bytes(raw)
            try:
                taken = find_checkpoint(str(damaged)).step
                found["the one before was taken, the damaged file named" if taken < step else "not noticed"] += 1
            except FormatError as error:
                found["refused in one line that names the file" if "step-" in str(error) else "refused"] += 1
            shutil.rmtree(damaged)
        right = "refused in one line" if both else "the one before"
        rows.append(Row(f"a bit flipped in {'both checkpoints' if both else 'the last checkpoint'}", tries,
                        sum(count for what, count in found.items() if what.startswith(right)), _told(found)))
    return rows


def _told(found: collections.Counter[str]) -> str:
    return "; ".join(f"{what}: {count}" for what, count in found.most_common())


def document(measured: dict[str, object]) -> str:
    """The page."""
    rows = [Row(**row) for row in measured["rows"]]  # type: ignore[attr-defined]
    body = table(("fault", "tries", "survived", "what was found"),
                 [(row.fault, row.tries, row.survived, row.found) for row in rows], left=(0, 3))
    return (f"# What survives\n\n{body}\n\nAlexNet with 3,114 parameters on two virtual devices, a checkpoint every "
            f"step. Survived: exit code and files as they should be, no traceback, and `--resume` went on at the "
            "last whole checkpoint with the losses that the ended run had or would have had. "
            f"{measured['where']}. Reproduce with `python -m benchmarks.faults`.\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Tries all faults and writes the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--tries", type=int, default=20, help="random moments of kill -9, and random bits")
    parser.add_argument("--output", type=pathlib.Path, default=_PAGE, help="the page; its numbers lie beside it")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="pase_mtf-faults-") as folder:
        runs = _Runs(pathlib.Path(folder))
        rows: list[Row] = []
        for rows_of in (lambda: [_killed(runs, options.tries)], lambda: _ended(runs, signal.SIGTERM, 143),
                        lambda: _ended(runs, signal.SIGINT, 130), lambda: [_disk_full(runs)],
                        lambda: _flipped(runs, options.tries)):
            rows += rows_of()
            print(*(f"{row.fault}: {row.survived} of {row.tries} ({row.found})" for row in rows[-6:]), sep="\n")
    where = f"{describe_host()}; TensorFlow {tensorflow_version()}, Python {sys.version.split()[0]}, commit {commit()}"
    measured = {"where": where, "rows": [dataclasses.asdict(row) for row in rows]}
    write_atomically(options.output.with_suffix(".json"), json.dumps(measured, indent=1) + "\n")
    write_atomically(options.output, document(measured))
    return int(any(row.survived < row.tries for row in rows))


if __name__ == "__main__":
    sys.exit(main())
