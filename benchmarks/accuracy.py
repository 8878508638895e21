"""Predicted against measured step time, for some fifteen strategies of every model.

    python -m benchmarks.accuracy                          # 1 to 6 minutes a model on two cores; goes on where it was
    python -m benchmarks.accuracy --models=rnnlm --mesh=4 --again --seconds=300
    python -m benchmarks.accuracy --prices=roofline          # predictions by few rates: accuracy-roofline.*

Searched, expert and data parallel strategies, random ones, and those between the searched and random ones (without
these, nearly all strategies of some models are as slow as each other, and their ranks are those of the machine's
drift), measured interleaved in one run of the launcher per model and number of devices. What accuracy.json holds of
the processor at hand is not measured again without --again, what it holds of others stays; the file is written after
every run, with the commit it was measured at. Writes docs/benchmarks/accuracy.md, accuracy.json, and a plot per run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from scipy.stats import spearmanr
from tqdm import tqdm

from benchmarks import markdown
from benchmarks.commands import check_results, told_in_one_line
from benchmarks.launching import ROOT, commit, prepare_data, processor, run_launcher
from pase_mtf import models
from pase_mtf.calibration.cache import kernels_path
from pase_mtf.calibration.load import PRICES
from pase_mtf.errors import UsageError, nearest
from pase_mtf.files import write_atomically
from pase_mtf.launch.console import LOSSES_DISAGREE
from pase_mtf.machine.kernel_file import load_times
from pase_mtf.machine.kernel_table import save_tables
from pase_mtf.runtime import describe_host

__all__ = ["agreement", "document", "main", "points", "together"]

FOLDER = ROOT / "docs" / "benchmarks"
_STEPS_SECONDS = 3600.0
"""For all of a run but finding strategies and measuring kernels: lowering, and the steps of every arm."""
_OF_STEPS = "steps"
"""What `slowness_of` tells of runs whose speed was told by the kernels of their steps."""
_TRIES = 3
"""Runs of one model, the second and third with more strategies."""


class _AtSpeed(NamedTuple):
    """How far the speed of a run explains its error.

    Attributes:
      error: of what was predicted, the median.
      then: the same, of what was predicted times how much longer kernels took.
      own: whether these were kernels of its steps.
      run: which.
    """

    error: float
    then: float
    own: bool
    run: str


def agreement(predicted: Sequence[float], measured: Sequence[float]) -> tuple[float, float]:
    """How well predictions agree with measurements.

    Args:
      predicted, measured: seconds, one per strategy.

    Returns:
      (median of |predicted - measured| / measured, Spearman's rank correlation).
    """
    one, other = np.asarray(predicted), np.asarray(measured)
    error = float(np.median(np.abs(one - other) / other))
    return error, float(spearmanr(one, other).statistic)


def points(summary: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Strategy -> (predicted, measured) milliseconds; a strategy that several arms share counts once."""
    return {name: (row["predicted_ms"], row["measured_ms"]) for name, row in summary["arms"].items()
            if row["predicted_ms"] is not None and row["measured_ms"] is not None and not row["same_as"]}


def together(runs: Sequence[Mapping[str, tuple[float, float]]]) -> dict[str, tuple[float, float]]:
    """Strategy -> (predicted, the median of what was measured), of those that are the same in all runs.

    Args:
      runs: `points` of each. A search that ends by the clock may find another strategy of that name, which its
        prediction tells.
    """
    return {name: (predicted, float(np.median([found[name][1] for found in runs])))
            for name, (predicted, _) in runs[0].items()
            if all(name in found and math.isclose(found[name][0], predicted, rel_tol=1e-6) for found in runs)}


def _drift(first: Mapping[str, tuple[float, float]], others: Mapping[str, tuple[float, float]]) -> float:
    """How many times what a table says the run predicted that kept it: it scales prices by how fast the machine is."""
    by_hand = [name for name in ("data_parallel", "expert") if name in first and name in others]
    return float(np.median([first[name][0] / others[name][0] for name in by_hand])) if by_hand else 1.0


def plot(name: str, found: Mapping[str, Sequence[float]], path: str) -> None:
    """Draws predicted over measured, with the line where they are equal."""
    figure = Figure(figsize=(5.5, 5), layout="constrained")
    axes = figure.subplots()
    for label, (predicted, measured) in found.items():
        drawn = label.startswith(("random", "changed"))
        axes.plot(measured, predicted, "o", color="#9aa5ab" if drawn else "#2a6f97", markersize=6)
        if not drawn:
            axes.annotate(label, (measured, predicted), textcoords="offset points", xytext=(7, -3), fontsize=8)
    values = [value for pair in found.values() for value in pair]
    ends = (min(values) * 0.8, max(values) * 1.25)
    axes.plot(ends, ends, "-", color="#ddd", zorder=0)
    axes.set(xscale="log", yscale="log", xlabel="measured ms", ylabel="predicted ms", title=name)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def document(results: Mapping[str, Mapping[str, Any]], stem: str = "accuracy") -> str:
    """The text of accuracy.md.

    Args:
      results: "model-devices-processor" -> what `main` keeps of a run: model, points, preset, devices, facts, commit.
      stem: what the names of its files begin with.
    """
    rows, errors, at_speeds = [], dict[str, list[float]](), list[_AtSpeed]()
    for result in results.values():
        found = result["points"]
        predicted, measured = map(np.asarray, zip(*found.values(), strict=True))
        error, correlation = agreement(predicted, measured)
        errors.setdefault(processor(result["facts"]), []).extend(np.abs(predicted - measured) / measured)
        bias = float(np.median(predicted / measured)) - 1
        missed = measured[predicted.argmin()] / measured.min() - 1
        slowness = result.get("slowness")  # of runs from before it was looked at, nobody knows
        at_speed = "-"
        if slowness:
            own = result.get("slowness_of") == _OF_STEPS
            at_speeds.append(_AtSpeed(error, agreement(predicted * slowness, measured)[0], own,
                                      f"{result['model']} on {result['devices']}, {processor(result['facts'])}"))
            at_speed = f"{100 * at_speeds[-1].then:.0f} % ({slowness:.2f}{'' if own else '*'})"
        drawn = ", ".join(f"{number} {kind}" for kind in ("random", "changed")
                          if (number := sum(name.startswith(kind) for name in found)))
        strategies = f"{len(found)} ({drawn})" if drawn else str(len(found))
        if result.get("runs", 1) > 1:
            strategies += f", {result['runs']} runs"
        rows.append([f"{result['model']} ({result['preset']})", result["devices"], strategies,
                     f"{measured.max() / measured.min():.1f}×", f"{100 * error:.0f} %", at_speed,
                     f"{100 * bias:+.0f} %", f"{correlation:.2f}", f"{100 * missed:.0f} %", processor(result["facts"]),
                     result["commit"] or "-"])
    every = {where: found for where, found in errors.items() if len(errors) > 1} | {
        "": [error for found in errors.values() for error in found]}
    rows += [["all", "", len(found), "", f"{100 * float(np.median(found)):.0f} %", *[""] * 4, where, ""]
             for where, found in every.items()]
    table = markdown.table(["model", "devices", "strategies", "slowest ÷ fastest", "median error",
                            "at the speed of the run", "bias",
                            "rank correlation", "best missed by", "measured on", "commit"], rows, left=(0, 9, 10))
    facts = [result["facts"] for result in results.values()]
    machines = {f"{fact['devices']}; {fact['versions']}; machine {fact['machine']}." for fact in facts}
    return "\n".join([
        "# Predicted against measured step time", "",
        "Every model under data parallelism, the expert's, the searched and random strategies, and (“changed”) the",
        "best with a tenth to nine tenths of its layers as in a random one; the search takes what is predicted to be",
        "the fastest, without trial steps (`--notrial`). Of rows with several runs the median of these counts: a host",
        "that others use, too, becomes faster or slower by a tenth and more within minutes, and strategies meet that",
        "by chance.",
        "Error: of the predicted against the measured time of a step; bias: the median of predicted ÷ measured, less",
        "one; best missed by: how much longer the step of the strategy that is predicted to be the fastest took than",
        "the fastest. At the speed of the run: the error of the predictions times how much longer kernels took while",
        "the steps ran (in brackets) than prices say: a virtual machine is not of one speed for an hour. The kernels",
        "are those with the largest shares of the steps; (*): ten reference kernels, the same of all programs, of",
        "earlier versions; of rows with several runs nobody looked. Up to commit 7f113ba1 kernels were priced too low,",
        "the more the fewer devices there are: what threads had computed was read from a clock that lags behind, and",
        "kernels found all that they read in the caches (docs/launcher.md).",
        *_worth_of_speed(at_speeds), "", table, "",
        *(f"{text}  " for text in sorted(machines)),
        f"Reproduce with `python -m benchmarks.accuracy{_flag(stem)}`.", "", *_measuring(results),
        *(f"![{_title(result)}]({stem}-{name}.svg)" for name, result in results.items()),
        ""])


def _worth_of_speed(runs: Sequence[_AtSpeed]) -> list[str]:
    """Whether the speed of the run explains the error."""
    said = list[str]()
    for own, which in ((True, "by kernels of the steps"), (False, "by reference kernels")):
        if not (found := [run for run in runs if run.own == own]):
            continue
        worst = max(found, key=lambda run: run.then - run.error)
        grows = (f", and grows from {100 * worst.error:.0f} to {100 * worst.then:.0f} % at worst ({worst.run})"
                 if worst.then > worst.error else "")
        said.append(f"In {sum(run.then < run.error for run in found)} of {len(found)} runs the error is less {which}"
                    f"{grows}.")
    return said


def _measuring(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What it took to find the searched strategies by measured kernels; nothing of runs that did not keep it."""
    rows = [[result["model"], result["devices"], processor(result["facts"]), f"{kernels['seconds']:.0f}",
             kernels["rounds"], f"{kernels['measured_of_strategy']:,} of {kernels['of_strategy']:,}",
             f"{kernels['measured']:,} of {kernels['seen']:,}"]
            for result in results.values() if (kernels := result.get("kernels"))]
    if not rows:
        return []
    return ["## Search with measuring", "",
            "Seconds: how long kernels were timed for until the searched strategy was found; rounds: searches",
            "that were followed by timing. Kernels of an earlier run on this machine are in its table, and",
            "take none. Timed: of the kernels that the strategy runs, and, when it was found, of all that any",
            "strategy on the way would have run (up to commit f181b63: that any arm would have run, in the end).", "",
            markdown.table(["model", "devices", "measured on", "seconds", "rounds", "of the strategy's",
                            "of all seen"], rows, left=(0, 2)), ""]


def _flag(stem: str) -> str:
    prices = stem.removeprefix("accuracy").removeprefix("-")
    return f" --prices={prices}" if prices else ""


def _earlier(path: str) -> dict[str, Any]:
    """What an earlier run wrote, as far as it holds all that is written today."""
    if not os.path.exists(path):
        return {}
    found = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    kept = [{"model": name, **result} for name, result in found.items() if "points" in result]
    return {_name(result["model"], result["devices"], processor(result["facts"])): result for result in kept}


def _name(model: str, devices: int, host: str) -> str:
    """What tells a run from others, and is part of a file's name."""
    return "-".join([model, str(devices), re.sub(r"[^a-z0-9.]+", "-", host.lower().replace("(r)", "")).strip("-")])


def _title(result: Mapping[str, Any]) -> str:
    return f"{result['model']}, {result['devices']} devices, {processor(result['facts'])}"


def _counts(text: str) -> list[int]:
    return [int(count) for count in text.split(",")]


def _measured(name: str, devices: int, flags: argparse.Namespace, folder: str) -> dict[str, Any]:
    """What is kept of runs of the launcher: of the first with so many strategies that differ, of none such, of that
    with the most of them. Of what measuring took, that of the first run, which finds the kernels unknown.

    A host that others use, too, is faster or slower by a tenth and more within minutes, and the turns of one strategy
    meet that by chance. So with prices by kernels those of the first run are kept in a file, and other runs predict by
    that and measure all strategies again, some minutes later each.
    """
    data_flags, _ = prepare_data(name, folder)

    def run(more: int, prices: Sequence[str]) -> dict[str, Any]:
        # Random strategies make strange sums: losses that drift apart say nothing about the time of a step.
        return run_launcher([
            f"--model={name}", "--preset=tiny", f"--mesh={devices}", "--devices=cpu", f"--steps={flags.steps}",
            f"--warmup={flags.warmup}", "--notrial", *data_flags, f"--measure_seconds={flags.seconds:g}", *prices,
            f"--compare=data_parallel,expert,search,random:{flags.random + more},changed:{flags.changed + more}"],
            limit=flags.seconds + _STEPS_SECONDS, allowed=(LOSSES_DISAGREE,))

    # What was drawn twice, or is the best itself, is known after a run only; kernels that it measured take none again.
    first, drawn, more = list[dict[str, Any]](), list[int](), 0
    while len(first) < _TRIES:
        first.append(run(more, [f"--prices={flags.prices}"]))
        drawn.append(more)
        missing = flags.strategies - len(points(first[-1]))
        if missing <= 0:
            break
        more += missing
    summary = max(first, key=lambda summary: len(points(summary)))
    more = drawn[first.index(summary)]  # of what is drawn beyond nobody has timed the kernels
    others = []
    if flags.prices == "measured" and flags.runs:
        table = os.path.join(folder, f"kernels-{name}-{devices}.json")
        save_tables(table, [load_times(kernels_path(devices))])
        others = [run(more, [f"--machine={table}"]) for _ in range(flags.runs)]
    facts = {key: summary["facts"][key] for key in ("devices", "versions", "machine")}
    found = together([points(one) for one in others or [summary]])
    drift = _drift(points(summary), found)
    found = {arm: (drift * predicted, measured) for arm, (predicted, measured) in found.items()}
    return {"model": name, "points": found, "runs": len(others) or 1,
            "preset": summary["preset"], "devices": summary["devices"], "commit": commit(), "facts": facts,
            # By a file of kernel times nobody looks; how fast the first run was says nothing of those that count.
            "slowness": None if others else summary.get("slowness"), "slowness_of": _OF_STEPS,
            "kernels": (first[0]["search"] or {}).get("kernels"),
            "wall_seconds": sum(one["wall_seconds"] for one in (*first, *others))}


@told_in_one_line()
def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes; returns 1 where a run failed (the others are measured all the same)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="all", help="names separated by commas")
    parser.add_argument("--mesh", default="8,4", type=_counts, help="numbers of devices, separated by commas")
    parser.add_argument("--random", type=int, default=6, help="how many random strategies, at least")
    parser.add_argument("--changed", type=int, default=8, help="how many between the best and random ones, at least")
    parser.add_argument("--strategies", type=int, default=14, help="how many that differ, at least: more are drawn "
                        f"and all measured again, up to {_TRIES - 1} times, where some are the same")
    parser.add_argument("--seconds", type=float, default=1200.0, help="of a run, to find strategies and time kernels; "
                        "what was not timed then is estimated")
    parser.add_argument("--runs", type=int, default=3, help="that measure the steps of all strategies, each in a "
                        "process of its own; their median counts; with prices by kernels")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--prices", default="measured", choices=PRICES, help="what predicts: kernels, or a roofline")
    parser.add_argument("--again", action="store_true", help="measure models that are there already, too")
    parser.add_argument("--output", default=str(FOLDER))
    flags = parser.parse_args(arguments)
    names = models.names() if flags.models == "all" else flags.models.split(",")
    for name in names:
        if name not in models.names():
            raise UsageError(f"--models={flags.models}: unknown model {name!r}; {nearest(name, models.names())}")
    stem = "accuracy" if flags.prices == "measured" else f"accuracy-{flags.prices}"
    path = os.path.join(flags.output, f"{stem}.json")
    check_results(path, "{}\n")
    results, failed = _earlier(path), False
    runs = [(name, devices) for devices in flags.mesh for name in names]
    host = describe_host()
    missing = [run for run in runs if flags.again or _name(*run, host) not in results]
    with tempfile.TemporaryDirectory(prefix="pase_mtf-data-") as folder:
        for name, devices in (bar := tqdm(missing, unit="run", disable=None)):
            bar.set_description(f"{name}, {devices} devices")
            try:
                found = _measured(name, devices, flags, folder)
            except RuntimeError as error:
                tqdm.write(f"error: {error}", file=sys.stderr)
                failed = True
                continue
            results = dict(sorted({**results, _name(name, devices, host): found}.items()))
            write_atomically(path, json.dumps(results, indent=1) + "\n")
            plot(_title(found), found["points"],
                 os.path.join(flags.output, f"{stem}-{_name(name, devices, host)}.svg"))
            # After every row: one takes many minutes, and a run that is ended leaves page and rows alike.
            write_atomically(os.path.join(flags.output, f"{stem}.md"), document(results, stem))
            error, correlation = agreement(*zip(*found["points"].values(), strict=True))
            tqdm.write(f"{name}, {devices} devices: {len(found['points'])} strategies, median error "
                       f"{100 * error:.0f} %, rank correlation {correlation:.2f}, {found['wall_seconds']:.0f} s in all",
                       file=sys.stdout)
            sys.stdout.flush()
    if results and not missing:
        write_atomically(os.path.join(flags.output, f"{stem}.md"), document(results, stem))
    return int(failed or not results)


if __name__ == "__main__":
    sys.exit(main())
