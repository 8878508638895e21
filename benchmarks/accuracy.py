"""Predicted against measured step time, for at least twelve strategies per model.

    python -m benchmarks.accuracy

Searched, expert, data parallel and random strategies of very different cost, measured interleaved in one run of the
launcher. Writes docs/benchmarks/accuracy.md, accuracy.json, and a plot per model.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.launching import prepare_data, run_launcher
from benchmarks.speedup import FOLDER
from pase_mtf.files import write_atomically

__all__ = ["agreement", "main"]


def agreement(predicted: Sequence[float], measured: Sequence[float]) -> tuple[float, float]:
    """How well predictions agree with measurements.

    Args:
      predicted, measured: seconds, one per strategy.

    Returns:
      (median of |predicted - measured| / measured, Spearman's rank correlation).
    """
    one, other = np.asarray(predicted), np.asarray(measured)
    error = float(np.median(np.abs(one - other) / other))
    from scipy.stats import spearmanr
    return error, float(spearmanr(one, other).statistic)


def points(summary: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Strategy -> (predicted, measured) milliseconds; a strategy that several arms share counts once."""
    return {name: (row["predicted_ms"], row["measured_ms"]) for name, row in summary["arms"].items()
            if row["predicted_ms"] is not None and not row["same_as"]}


def plot(name: str, found: dict[str, tuple[float, float]], path: str) -> None:
    """Draws predicted over measured, with the line where they are equal."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(5.5, 5), layout="constrained")
    axes = figure.subplots()
    for label, (predicted, measured) in found.items():
        random = label.startswith("random")
        axes.plot(measured, predicted, "o", color="#9aa5ab" if random else "#2a6f97", markersize=6)
        if not random:
            axes.annotate(label, (measured, predicted), textcoords="offset points", xytext=(7, -3), fontsize=8)
    values = [value for pair in found.values() for value in pair]
    ends = (min(values) * 0.8, max(values) * 1.25)
    axes.plot(ends, ends, "-", color="#ddd", zorder=0)
    axes.set(xscale="log", yscale="log", xlabel="measured ms", ylabel="predicted ms", title=name)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="alexnet,transformer")
    parser.add_argument("--mesh", default="8")
    parser.add_argument("--random", type=int, default=9, help="how many random strategies")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--output", default=str(FOLDER))
    flags = parser.parse_args(arguments)
    os.makedirs(flags.output, exist_ok=True)
    lines = ["| model | devices | strategies | median error | rank correlation |", "|---|--:|--:|--:|--:|"]
    collected = {}
    with tempfile.TemporaryDirectory(prefix="pase_mtf-data-") as folder:
        for model in flags.models.split(","):
            data_flags, _ = prepare_data(model, folder)
            try:
                summary = run_launcher([
                    f"--model={model}", f"--mesh={flags.mesh}", "--devices=cpu", f"--steps={flags.steps}", *data_flags,
                    f"--compare=data_parallel,expert,search,random:{flags.random}"], limit=3600)
            except RuntimeError as error:
                print(f"error: {error}", file=sys.stderr)
                return 1
            found = collected[model] = points(summary)
            error, correlation = agreement(*zip(*found.values(), strict=True))
            lines.append(f"| {model} ({summary['preset']}) | {summary['devices']} | {len(found)} | "
                         f"{100 * error:.0f} % | {correlation:.2f} |")
            print(lines[-1], flush=True)
            plot(f"{model}, {summary['devices']} devices", found, os.path.join(flags.output, f"accuracy-{model}.svg"))
            facts = summary["facts"]
    write_atomically(os.path.join(flags.output, "accuracy.json"), json.dumps(collected, indent=1) + "\n")
    write_atomically(os.path.join(flags.output, "accuracy.md"), "\n".join([
        "# Predicted against measured step time", "", *lines, "",
        f"{facts['devices']}; {facts['versions']}; machine {facts['machine']}.", "",
        *(f"![{model}](accuracy-{model}.svg)" for model in collected), ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
