"""Runs of the launcher as a user starts them, each in a process of its own, and what their summaries say."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.make_parallel_text import collect
from pase_mtf.errors import PaseError
from pase_mtf.files import write_atomically

__all__ = ["FASHION_MNIST", "prepare_data", "replace_block", "run_launcher"]

FASHION_MNIST = "/usr/share/datasets/fashion-mnist"  # Debian's package dataset-fashion-mnist
_TEXT_LANGUAGE = "de"


def prepare_data(model: str, folder: str) -> tuple[list[str], str]:
    """The data flag for a model, and what it is: real data where this machine has some, else synthetic.

    Args:
      model: of the registry.
      folder: where text that is collected from this machine is put.
    """
    if model == "alexnet":
        if os.path.isdir(FASHION_MNIST):
            return [f"--data={FASHION_MNIST}"], "Fashion-MNIST"
    else:
        try:
            pairs = collect(_TEXT_LANGUAGE)
        except PaseError:
            pairs = []
        if len(pairs) >= 1000:
            paths = []
            for side, suffix in enumerate(("en", _TEXT_LANGUAGE)):
                paths.append(os.path.join(folder, f"text.{suffix}.txt"))
                write_atomically(paths[-1], "".join(f"{pair[side]}\n" for pair in pairs))
            return [f"--data={','.join(paths)}"], f"messages of programs, English to German ({len(pairs):,} pairs)"
    return [], "synthetic"


def run_launcher(flags: Sequence[str], limit: float = 1800) -> dict[str, Any]:
    """One run of the launcher.

    Args:
      flags: of the launcher.
      limit: seconds after which it is ended.

    Returns:
      Its summary.json, with "wall_seconds", the time of the whole process.

    Raises:
      RuntimeError: it failed; holds what it said.
    """
    with tempfile.TemporaryDirectory(prefix="pase_mtf-benchmark-") as folder:
        output = os.path.join(folder, "run")
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "pase_mtf.launch", *flags, "--nocheckpoint", f"--output_dir={output}"],
            capture_output=True, text=True, timeout=limit, check=False)
        wall = time.perf_counter() - start
        if done.returncode:
            raise RuntimeError(f"launcher {' '.join(flags)} exited with {done.returncode}: "
                               f"{done.stderr.strip()[-500:]}")
        summary = json.loads(pathlib.Path(output, "summary.json").read_text())
    return {**summary, "wall_seconds": wall}


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
