"""The main measurement: every model on 2, 4, 8 and 16 virtual devices, our strategy beside all its rivals.

    python -m benchmarks.speedup                             # about fifty minutes on two cores; goes on where it was
    python -m benchmarks.speedup --models=transformer --meshes=8 --steps=20 --again
    python -m benchmarks.speedup --models=alexnet --meshes=8 --batches=16,32,64,128 --name=batches --readme=

Every row, a model on so many devices, is one run of the launcher as a user starts it. A row that speedup.json holds is
not measured again without --again; the file is written after every row, with the commit it was measured at. Writes
docs/benchmarks/speedup.json (the summaries, complete with machine and versions), speedup.md, speedup.svg, and the table
of the README.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from tqdm import tqdm

from benchmarks import distribute
from benchmarks.commands import check_results, told_in_one_line, whole_numbers
from benchmarks.launching import ROOT, check_block, commit, prepare_data, replace_block, run_launcher
from benchmarks.speedup_rows import ARMS, MIRRORED, Row, Rows, compact_table, full_table
from pase_mtf import models
from pase_mtf.files import write_atomically
from pase_mtf.launch.console import LOSSES_DISAGREE
from pase_mtf.runtime import describe_host

__all__ = ["document", "main", "measure", "planned"]

FOLDER = ROOT / "docs" / "benchmarks"
_README_DEVICES = 8
_LONGEST = 900.0
"""Seconds that a run of MirroredStrategy may take."""


def planned(names: Sequence[str], meshes: Sequence[int], batches: Sequence[int | None]) -> list[tuple[str, int, int]]:
    """What is to be measured, in order: all models on the first number of devices, then on the next.

    Args:
      names: of models.
      meshes: numbers of devices.
      batches: examples per step; None: the preset's.

    Returns:
      (model, devices, batch) per row.
    """
    return [(name, devices, batch or models.load_config(name, "tiny").batch)
            for devices in meshes for batch in batches for name in names]


def measure(name: str, devices: int, batch: int, arms: Sequence[str], steps: int, warmup: int, folder: str) -> Row:
    """Measures a row.

    An arm that cannot be had (auto_mtf finds no answer, or is not installed) is left out, and the row says so; every
    other failure is an error.

    Args:
      name: of the model.
      devices: virtual CPU devices.
      batch: examples per step.
      arms: beside stock Mesh-TF, "search" among them; MirroredStrategy runs before the others and after them.
      steps, warmup: of every arm.
      folder: for the data.

    Raises:
      RuntimeError: the launcher failed; holds what it said.
    """
    data_flags, data = prepare_data(name, folder)
    left_out: dict[str, str] = {}
    mirrors = MIRRORED in arms and name in distribute.MODELS
    if mirrors and batch % devices:
        left_out[MIRRORED] = f"a batch of {batch} does not split over {devices} devices"

    def mirrored(before: Sequence[float] = ()) -> list[float]:
        try:
            return _mirrored(name, devices, batch, steps, warmup) if mirrors and MIRRORED not in left_out else []
        except subprocess.TimeoutExpired as late:
            if not before:
                left_out[MIRRORED] = f"its replicas wait for each other, after {late.timeout:.0f} s still"
            return []

    plain = mirrored()
    while True:
        compare = ",".join(arm for arm in arms if arm not in left_out and arm != MIRRORED)
        try:
            summary = run_launcher([f"--model={name}", "--preset=tiny", f"--mesh={devices}", "--devices=cpu",
                                    f"--batch={batch}", f"--steps={steps}", f"--warmup={warmup}",
                                    f"--compare={compare}", *data_flags], allowed=(LOSSES_DISAGREE,))
        except RuntimeError as error:
            found = re.search(r"error: arm (\w+): (.*)", str(error))
            if not found or found[1] not in arms or found[1] == "search" or found[1] in left_out:
                raise
            left_out[found[1]] = found[2]
            continue
        # Where this machine put its temporary files is nobody's business.
        summary["facts"].pop("output", None)
        summary["facts"]["data"] = summary["facts"]["data"].replace(folder + os.sep, "")
        plain += mirrored(plain)  # where it does not end, the row has the steps of before
        return Row(summary, data, commit(), left_out, plain or None)


def _mirrored(name: str, devices: int, batch: int, steps: int, warmup: int) -> list[float]:
    """Milliseconds of the steps of the plain model under MirroredStrategy.

    Raises:
      RuntimeError: it failed; holds what it said.
      subprocess.TimeoutExpired: it does not end.
    """
    done = subprocess.run(distribute.command(name, "mirrored", devices, batch, steps, warmup), cwd=ROOT,
                          capture_output=True, text=True, check=False, timeout=_LONGEST)
    if done.returncode:
        raise RuntimeError(f"MirroredStrategy of {name}: {done.stderr.strip()[-500:]}")
    return [1e3 * seconds for seconds in distribute.steps_of(done.stdout)["seconds"]]


def document(rows: Sequence[Row], table: str) -> str:
    """A table with what it was measured on.

    Args:
      rows: of the table.
      table: of these rows.
    """
    facts = [row.summary["facts"] for row in rows]
    data: dict[str, list[str]] = {}
    for row in rows:
        names = data.setdefault(row.data, [])
        if row.summary["model"] not in names:
            names.append(row.summary["model"])
    steps = sorted({row.summary["arms"]["search"]["measured_steps"] for row in rows})
    without: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for left_out in row.without.items():
            without.setdefault(left_out, []).append(_named(row, rows))
    notes = [f"{', '.join(runs)} devices without {arm}: {why}" for (arm, why), runs in without.items()]
    walls = [(row.summary["wall_seconds"], *row.key) for row in rows if "wall_seconds" in row.summary]
    if walls:
        seconds, model, devices, *_ = max(walls)
        notes.append(f"The longest of these {len(rows)} runs of the launcher, {model} on {devices} devices, took "
                     f"{seconds:.0f} s in all")
    notes += [f"{row.summary['model']} on {row.summary['devices']} devices: {row.summary['disagreement']}"
              for row in rows if not row.equal]
    equal = "; the losses of all arms agree" if all(row.equal for row in rows) else ""
    return (table + "\n\n"
            f"Milliseconds per training step: median of {' or '.join(map(str, steps))} steps ± half the distance of "
            f"the quartiles; arms run interleaved, warm-up excluded{equal}. “Predicted” is the speedup over data "
            "parallelism that the search promised. “(same)”: the very strategy of another column, measured once.  \n"
            + "".join(f"{note}.  \n" for note in notes) + _priced_text(rows)
            + f"Virtual CPU devices of one process on {_all(fact['devices'].partition(' on ')[2] for fact in facts)}; "
            f"{_all(fact['versions'] for fact in facts)}{_commits(rows)}; data: "
            + "; ".join(f"{', '.join(names)}: {what}" for what, names in sorted(data.items()))
            + ". Reproduce with `make benchmark ARGS=--again` (without it, what this processor has no row of).")


def _named(row: Row, rows: Sequence[Row]) -> str:
    """A row by model and devices, and by batch and processor where that does not tell it from others."""
    alike = [other.key for other in rows if other.key[:2] == row.key[:2]]
    more = [text for place, text in ((2, f"batch {row.key[2]}"), (3, row.key[3]))
            if len({key[place] for key in alike}) > 1]
    return f"{row.key[0]} on {row.key[1]}" + (f" ({', '.join(more)})" if more else "")


def _all(values: Any) -> str:
    return " / ".join(sorted(set(values)))


def _priced_text(rows: Sequence[Row]) -> str:
    """Which rows are from before searches took the times of kernels; empty where none is."""
    later = [row for row in rows if "kernels measured" in row.summary["facts"]["machine"]]
    if len(later) == len(rows):
        return ""
    names = ", ".join(f"{row.key[0]} on {row.key[1]}" for row in later)
    by_kernels = f"; by measured kernels: {names}" if later else ""
    return (f"{len(rows) - len(later)} of these {len(rows)} rows were searched and predicted by a model that was "
            f"fitted to the machine, and that is no more{by_kernels}.  \n")


def _commits(rows: Sequence[Row]) -> str:
    known = {row.commit for row in rows if row.commit}
    return f"; commit {_all(known)}" if known else ""


_ABOUT = """# Speedup over data parallelism

Every model of the papers, at the sizes of preset `tiny`, against every rival: stock Mesh-TensorFlow's data
parallelism, a plain TensorFlow 2 model of the same parameters and batch under `tf.distribute.MirroredStrategy` (AlexNet
and the Transformer only), data parallelism through our lowering, the strategy that people write by hand (`expert`),
FlexFlow's search from data parallelism (`mcmc`) and from the expert strategy (`mcmc_expert`) with our costs, and
`mesh_tensorflow.auto_mtf`. The model under MirroredStrategy trains one made-up batch over and over, where the others
read data, and its median is of twice as many steps as theirs (30), half of them before the others and half after.
"Losses equal": the launcher compared the losses of all arms step by step, of stock Mesh-TF the first; the number is the
most that any two of all arms were apart at any step. `python -m benchmarks.speedup` measures what is missing here,
`--again` everything.
"""


def plot(rows: Sequence[Row], path: str) -> None:
    """Draws the speedup over stock Mesh-TF's data parallelism, a panel per model, a group of bars per mesh."""
    names = list(dict.fromkeys(row.summary["model"] for row in rows))
    hosts = sorted({row.key[-1] for row in rows})
    # Bars of several processors stand side by side: a letter says which, where there is more than one.
    marks = {host: chr(ord("a") + number) if len(hosts) > 1 else "" for number, host in enumerate(hosts)}
    columns = min(4, len(names))
    lines = -(-len(names) // columns)
    figure = Figure(figsize=(3.2 * columns + 0.6, 2.6 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).ravel()
    arms = (("data_parallel", "data parallel, our lowering", "#c5c9c7"), ("expert", "expert", "#7fa8c9"),
            ("search", "searched", "#2a6f97"))
    for axes, name in zip(panels, names, strict=False):
        shown = sorted((row for row in rows if row.summary["model"] == name), key=lambda row: row.key)
        for number, (arm, label, color) in enumerate(arms):
            heights = [(row.milliseconds("stock_data_parallel") or 0) / (row.milliseconds(arm) or float("inf"))
                       for row in shown]
            axes.bar([place + 0.27 * (number - 1) for place in range(len(shown))], heights, 0.25, color=color,
                     label=label)
        axes.axhline(1, color="#888", linewidth=0.8)
        axes.set_xticks(range(len(shown)), [f"{row.summary['devices']}{marks[row.key[-1]]}" for row in shown])
        axes.set_title(name, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[len(names):]:
        axes.remove()
    panels[0].set_ylabel("times stock data parallelism", fontsize=8)
    panels[0].set_xlabel("devices", fontsize=8)
    if len(hosts) > 1:
        figure.supxlabel("; ".join(f"{mark}: {host}" for host, mark in marks.items()), fontsize=8)
    panels[0].legend(frameon=False, fontsize=8)
    figure.savefig(path)


def write(rows: Rows, stem: str, readme: str, batches: bool) -> None:
    """Writes the document and the plot of the rows, and the README's table.

    Args:
      rows: all that are measured.
      stem: of the files.
      readme: whose table is replaced; empty: none.
      batches: the rows differ in their batch: a compact table, no plot.
    """
    found = list(rows)
    if batches:
        write_atomically(f"{stem}.md", f"# Speedup over data parallelism\n\n{document(found, compact_table(found))}\n")
    else:
        write_atomically(f"{stem}.md", f"{_ABOUT}\n{document(found, full_table(found))}\n\n"
                                       f"![times stock data parallelism]({os.path.basename(stem)}.svg)\n")
        plot(found, f"{stem}.svg")
    shown = _of_one_processor([row for row in found if row.summary["devices"] == _README_DEVICES])
    if readme and shown:
        replace_block(readme, "speedup", document(shown, compact_table(shown)))


def _of_one_processor(rows: Sequence[Row]) -> list[Row]:
    """Those of the processor that has most of them."""
    hosts = collections.Counter(row.key[-1] for row in rows)
    best = max(hosts, key=lambda host: (hosts[host], host), default="")
    return [row for row in rows if row.key[-1] == best]


@told_in_one_line()
def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes; returns 1 where a row failed (the others are measured all the same)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="all", help="names separated by commas")
    parser.add_argument("--meshes", default="8,4,16,2", help="numbers of devices, in the order of measuring")
    parser.add_argument("--arms", default="", help="beside stock Mesh-TF; rows that are there and lack one are "
                        f"measured again (default: {','.join((MIRRORED, *ARMS))}, and rows that are there lack none)")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--batches", default="", help="examples per step; empty: the preset's")
    parser.add_argument("--name", default="speedup", help="of the files")
    parser.add_argument("--again", action="store_true", help="measure rows that are there already, too")
    parser.add_argument("--output", default=str(FOLDER))
    parser.add_argument("--readme", help="whose table is replaced; empty: none (default: the README of this checkout "
                        "for the rows of docs/benchmarks/speedup.json, none for others)")
    flags = parser.parse_args(arguments)
    names = models.names() if flags.models == "all" else flags.models.split(",")
    asked = tuple(filter(None, flags.arms.split(",")))
    arms = tuple(dict.fromkeys([*(asked or (MIRRORED, *ARMS)), "data_parallel", "search"]))
    plan = planned(names, whole_numbers("meshes", flags.meshes),
                   whole_numbers("batches", flags.batches) if flags.batches else [None])
    stem = os.path.join(flags.output, flags.name)
    if flags.readme is None:  # a trial elsewhere must not replace the table of what is kept
        ours = os.path.abspath(stem) == str(FOLDER / "speedup") and not flags.batches
        flags.readme = str(ROOT / "README.md") if ours else ""
    if flags.readme:
        check_block(flags.readme, "speedup")
    check_results(f"{stem}.json", "[]\n")
    rows, failed = Rows(f"{stem}.json"), 0
    known = {key: rows.get(*key, describe_host()) for key in plan}
    missing = [key for key in plan if flags.again or (row := known[key]) is None or not row.holds(asked)]
    print(f"{len(plan) - len(missing)} of {len(plan)} rows are there, {len(missing)} to measure", flush=True)
    with tempfile.TemporaryDirectory(prefix="pase_mtf-data-") as folder:
        for name, devices, batch in (bar := tqdm(missing, unit="row", disable=None)):
            bar.set_description(f"{name} on {devices}")
            earlier = known[name, devices, batch]
            with_earlier = dict.fromkeys([*arms, *(earlier.measured() if earlier else ())])
            try:
                row = measure(name, devices, batch, tuple(with_earlier), flags.steps, flags.warmup, folder)
            except RuntimeError as error:
                tqdm.write(f"error: {error}", file=sys.stderr)
                failed += 1
                continue
            rows.add(row)
            write(rows, stem, flags.readme, bool(flags.batches))
            tqdm.write(_report(row), file=sys.stdout)
            sys.stdout.flush()
            failed += not row.equal
    if len(rows) and not missing:
        write(rows, stem, flags.readme, bool(flags.batches))
    return int(failed > 0 or not len(rows))


def _report(row: Row) -> str:
    """One line about a row that was just measured."""
    best = row.over_best_rival()
    return (f"{row.summary['model']} on {row.summary['devices']}, batch {row.summary['batch']}: "
            f"{row.milliseconds('search') or 0:.0f} ms, {row.speedup('stock_data_parallel') or 0:.2f}x over stock, "
            f"{row.speedup('data_parallel') or 0:.2f}x over data parallel, "
            + (f"{best[0]:.2f}x over the best rival ({best[1]}), " if best else "")
            + f"losses {'equal' if row.equal else 'DIFFER'}, {row.summary['wall_seconds']:.0f} s in all")


if __name__ == "__main__":
    sys.exit(main())
