"""Runs of the launcher as a user starts them, each in a process of its own, and what their summaries say."""

from __future__ import annotations

import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.make_parallel_text import collect
from pase_mtf import models
from pase_mtf.errors import PaseError, UsageError
from pase_mtf.files import write_atomically
from pase_mtf.launch.summary import read_summary

__all__ = ["FASHION_MNIST", "ROOT", "check_block", "commit", "losses_agree_to", "prepare_data", "processor",
           "replace_block", "run_launcher"]

ROOT = pathlib.Path(__file__).absolute().parents[1]
FASHION_MNIST = "/usr/share/datasets/fashion-mnist"  # Debian's package dataset-fashion-mnist
_TEXT_LANGUAGE = "de"
_LEAST_PAIRS = 1000


def prepare_data(model: str, folder: str) -> tuple[list[str], str]:
    """The data flag for a model, and what it is: real data where this machine has some, else synthetic.

    Pictures for the models of pictures, whose readers fit them to the sizes of a preset; text for all others: with its
    translation where a model learns to translate, the German side by itself where it learns one language.

    Args:
      model: of the registry.
      folder: where text that is collected from this machine is put, once for all models.
    """
    kind = models.get(model).data_kind
    if kind == "images":
        if os.path.isdir(FASHION_MNIST):
            return [f"--data={FASHION_MNIST}"], "Fashion-MNIST"
        return [], "synthetic"
    paths = [os.path.join(folder, f"text.{suffix}.txt") for suffix in ("en", _TEXT_LANGUAGE)]
    if not all(map(os.path.exists, paths)):
        try:
            pairs = collect(_TEXT_LANGUAGE)
        except PaseError:
            pairs = []
        if len(pairs) < _LEAST_PAIRS:
            return [], "synthetic"
        for side, path in enumerate(paths):
            write_atomically(path, "".join(f"{pair[side]}\n" for pair in pairs))
    lines = pathlib.Path(paths[0]).read_text(encoding="utf-8").count("\n")
    if kind == "text":
        return [f"--data={paths[1]}"], f"messages of programs, German ({lines:,})"
    return [f"--data={','.join(paths)}"], f"messages of programs, English to German ({lines:,} pairs)"


def run_launcher(flags: Sequence[str], limit: float = 1800, allowed: Sequence[int] = (),
                 environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """One run of the launcher.

    Args:
      flags: of the launcher.
      limit: seconds after which it is ended.
      allowed: exit codes that count as done as well (the summary says what was wrong).
      environment: variables that are set for it, besides those of this process.

    Returns:
      Its summary.json, with "wall_seconds", the time of the whole process, "losses", those of every arm, step by step,
      and "losses_agree_to", the largest difference between two arms at the same step, relative to the loss.

    Raises:
      RuntimeError: it failed; holds what it said.
    """
    with tempfile.TemporaryDirectory(prefix="pase_mtf-benchmark-") as folder:
        output = os.path.join(folder, "run")
        start = time.perf_counter()
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pase_mtf.launch", *flags, "--nocheckpoint", f"--output_dir={output}"],
                capture_output=True, text=True, timeout=limit, check=False, env={**os.environ, **(environment or {})})
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"launcher {' '.join(flags)}: not done after {limit:.0f} s") from None
        wall = time.perf_counter() - start
        if done.returncode and done.returncode not in allowed:
            raise RuntimeError(f"launcher {' '.join(flags)} exited with {done.returncode}: "
                               f"{done.stderr.strip()[-500:]}")
        summary = read_summary(os.path.join(output, "summary.json"))
        records = [json.loads(line) for line in pathlib.Path(output, "metrics.jsonl").read_text().splitlines()]
    losses: dict[str, list[float]] = {}
    for record in records:
        losses.setdefault(record["arm"], []).append(record["loss"])
    return {**summary, "wall_seconds": wall, "losses": losses, "losses_agree_to": losses_agree_to(records)}


def losses_agree_to(records: Sequence[dict[str, Any]]) -> float | None:
    """The largest difference between the losses of two arms at the same step, relative to the larger one.

    Args:
      records: the lines of metrics.jsonl, with step, arm and loss.

    Returns:
      None where no step was done by two arms, or a loss is not finite.
    """
    losses: dict[int, list[float]] = {}
    for record in records:
        losses.setdefault(record["step"], []).append(math.nan if record["loss"] is None else float(record["loss"]))
    shared = [values for values in losses.values() if len(values) > 1]
    if not shared or not all(math.isfinite(value) for values in shared for value in values):
        return None
    return max((max(values) - min(values)) / max(*map(abs, values), 1e-30) for values in shared)


def commit() -> str | None:
    """The commit of the program that is measured, with "+" where files differ from it; None outside of a checkout."""
    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", os.path.dirname(os.path.abspath(__file__)), *arguments],
                              capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/*.py", ":/configs")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def processor(facts: Mapping[str, str]) -> str:
    """What a run was measured on, such as "AMD EPYC (2 cores)".

    Args:
      facts: of the run's summary.
    """
    return facts["devices"].partition(" on ")[2]


def check_block(path: str, name: str) -> None:
    """Refuses a README in which there is no place for a table, before anything is measured for it.

    Raises:
      UsageError: it cannot be read, or has no marks (`replace_block`).
    """
    try:
        content = pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--readme={path}: cannot read it ({error}); name another file, or none") from error
    _, found, rest = content.partition(f"<!-- {name} -->")
    if not found or f"<!-- /{name} -->" not in rest:
        raise UsageError(f"--readme={path}: has no <!-- {name} --> ... <!-- /{name} -->; put these two lines where "
                         "the table should stand")


def replace_block(path: str, name: str, text: str) -> None:
    """Replaces what stands between `<!-- name -->` and `<!-- /name -->` in a file.

    Raises:
      ValueError: the file has no such marks.
    """
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    content = pathlib.Path(path).read_text(encoding="utf-8")
    head, found_begin, rest = content.partition(begin)
    _, found_end, tail = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"{path}: has no {begin} ... {end}; put these two lines where the table should stand")
    write_atomically(path, f"{head}{begin}\n{text.strip()}\n{end}{tail}")
