"""What a first run spends before its first step, from a cache that is empty, and what later runs spend.

    python -m benchmarks.first_launch                       # the run of `make launch`: transformer on 8 devices
    python -m benchmarks.first_launch --models=alexnet,rnnlm --mesh=8,12

Each of the runs is the launcher's with its defaults, but for the number of steps; kernels of the search are compiled
before, as `make` does. Rows of other processors stay, and so do those of other models and numbers of devices. Writes
docs/benchmarks/first_launch.json and first_launch.md after every row.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from benchmarks import markdown
from benchmarks.commands import check_results, told_in_one_line, whole_numbers
from benchmarks.facts import facts_text, of_rows
from benchmarks.launching import commit, processor, run_launcher
from benchmarks.search import FOLDER
from pase_mtf import models
from pase_mtf.errors import UsageError, nearest
from pase_mtf.files import write_atomically

__all__ = ["document", "main", "measure"]

_STEPS = 10
_LATER = 3
"""Runs after the first one."""
_MEASURING = ("reference_kernels", "kernels")


def measure(model: str, devices: int) -> dict[str, Any]:
    """Runs the launcher with an empty cache, and then again.

    Args:
      model: of the registry.
      devices: how many.

    Returns:
      "runs": of the first and each later one, "spent" (seconds before the first step, by what they went to), "kernels"
      (of how many of its strategy's kernels the times are measured, how many rounds that took) and "gap" (how far the
      strategy may be above the optimum, relative to it); "processor"; "facts", of where it was measured.

    Raises:
      RuntimeError: a run failed.
    """
    runs, where = [], {}
    with tempfile.TemporaryDirectory(prefix="pase_mtf-benchmark-") as folder:
        for _ in range(1 + _LATER):
            summary = run_launcher([f"--model={model}", f"--mesh={devices}", "--devices=cpu", f"--steps={_STEPS}"],
                                   environment={"XDG_CACHE_HOME": os.path.join(folder, "cache")})
            where = summary["facts"]
            runs.append({"spent": summary["spent"], "kernels": summary["search"]["kernels"],
                         "gap": summary["search"]["gap"], "wall_seconds": summary["wall_seconds"]})
    return {"runs": runs, "processor": processor(where), "facts": {
        "machine": where["devices"], "versions": where["versions"], "commit": commit() or "unknown"}}


def _cells(run: Mapping[str, Any]) -> list[str]:
    spent = run["spent"]
    measuring = sum(spent[name] for name in _MEASURING)
    return [f"{measuring:.1f} s", f"{spent['search']:.1f} s", f"{spent['trial_steps']:.1f} s",
            f"{sum(spent.values()):.1f} s", f"{100 * run['gap']:.0f} %"]


def document(results: Mapping[str, Any]) -> str:
    """The page of the results."""
    table = [[row["model"] if number == 0 else "", row["devices"] if number == 0 else "", row["processor"],
              "first" if number == 0 else f"{number + 1}.", *_cells(run),
              f"{run['kernels']['measured_of_strategy']:,} of {run['kernels']['of_strategy']:,}"]
             for row in results["rows"] for number, run in enumerate(row["runs"])]
    head = ["model", "devices", "measured on", "run", "measuring kernels", "searching", "trial steps", "all planning",
            "at most above the optimum", "kernels of its strategy measured"]
    return "\n".join([
        "# What a first run spends before its first step", "", markdown.table(head, table, left=(0, 2)), "",
        "The launcher with its defaults (arms, prices, `--measure_seconds`); the first run finds an empty cache, the "
        "later ones what those before have kept there, and measure what theirs still lack. Searching: without "
        "measuring; of all arms that have to be found. Exporting and lowering the program, and loading TensorFlow, are "
        "none of these. How far the strategy may be above the optimum is what that run has shown: later ones, which "
        "know most of its kernels, look for less long, and may take another. "
        f"{facts_text(of_rows(results['rows']))}. "
        "Reproduce with `python -m benchmarks.first_launch`.", ""])


@told_in_one_line(RuntimeError)
def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="transformer", help="names separated by commas (default: %(default)s)")
    parser.add_argument("--mesh", default="8", help="numbers of devices, separated by commas (default: %(default)s)")
    parser.add_argument("--output", default=str(FOLDER), help="folder of the results")
    flags = parser.parse_args(arguments)
    for name in flags.models.split(","):
        if name not in models.names():
            raise UsageError(f"--models={flags.models}: unknown model {name!r}; {nearest(name, models.names())}")
    wanted = [(model, devices) for model in flags.models.split(",") for devices in whole_numbers("mesh", flags.mesh)]
    path = pathlib.Path(flags.output) / "first_launch.json"
    check_results(path, '{"rows": []}\n')
    for model, devices in tqdm(wanted, unit="row"):
        row = {"model": model, "devices": devices, **measure(model, devices)}
        rows = {_key(other): other for other in json.loads(path.read_text(encoding="utf-8"))["rows"]}
        rows[_key(row)] = row
        results = {"rows": [rows[key] for key in sorted(rows)]}
        page = document(results)
        write_atomically(path, json.dumps(results, indent=1) + "\n")
        write_atomically(path.with_suffix(".md"), page)
    return 0


def _key(row: Mapping[str, Any]) -> tuple[str, int, str]:
    return row["model"], row["devices"], row["processor"]


if __name__ == "__main__":
    sys.exit(main())
