"""The main measurement: both models on 2, 4, 8 and 16 virtual devices, our strategy beside data parallelism.

    python -m benchmarks.speedup                             # a quarter of an hour on two cores
    python -m benchmarks.speedup --models=transformer --meshes=8 --steps=10
    python -m benchmarks.speedup --models=alexnet --meshes=8 --batches=16,32,64,128 --name=batches --readme=

Every row is one run of the launcher as a user starts it. Writes docs/benchmarks/speedup.md, speedup.svg and
speedup.json (the summaries, complete with machine and versions), and the table of the README. With --add the rows that
are not measured anew stay.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from benchmarks.launching import prepare_data, replace_block, run_launcher
from pase_mtf.files import write_atomically

__all__ = ["main", "table", "with_earlier"]

ROOT = pathlib.Path(__file__).absolute().parents[1]
FOLDER = ROOT / "docs" / "benchmarks"


def table(summaries: Sequence[dict[str, Any]]) -> str:
    """The summaries as a Markdown table."""
    lines = ["| model | devices | stock Mesh-TF, data parallel | data parallel, our lowering | expert | searched | "
             "over stock | over data parallel | predicted | search |",
             "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"]
    for summary in summaries:
        arms = summary["arms"]
        ours = arms["search"]
        predicted = _ratio(arms["data_parallel"]["predicted_ms"], ours["predicted_ms"])
        lines.append(f"| {summary['model']} ({summary['preset']}, batch {summary['batch']}) | {summary['devices']} | "
                     + " | ".join(_milliseconds(arms[name]) for name in (
                         "stock_data_parallel", "data_parallel", "expert", "search"))
                     + f" | {ours['speedup_over_stock']:.2f}× | {ours['speedup_over_data_parallel']:.2f}× | "
                       f"{predicted:.2f}× | {summary['search']['seconds']:.2f} s |")
    return "\n".join(lines)


def _milliseconds(row: dict[str, Any]) -> str:
    same = " (same)" if row["same_as"] else ""
    return f"{row['measured_ms']:.0f} ± {row['measured_ms_spread']:.0f} ms{same}"


def _ratio(one: float, other: float) -> float:
    return one / other


def document(results: Sequence[dict[str, Any]]) -> str:
    """The table with what it was measured on."""
    facts = results[0]["summary"]["facts"]
    data = "; ".join(sorted({f"{entry['summary']['model']}: {entry['data']}" for entry in results}))
    steps = results[0]["summary"]["arms"]["search"]["measured_steps"]
    return (table([entry["summary"] for entry in results]) + "\n\n"
            f"Milliseconds per training step: median of {steps} steps ± half the distance of the quartiles; arms run "
            "interleaved, warm-up excluded; the losses of all arms agree. “Predicted” is the speedup over data "
            "parallelism that the search promised. “(same)”: the very strategy of another column, measured once.  \n"
            f"Virtual CPU devices of one process on {facts['devices'].partition(' on ')[2]}; {facts['versions']}; "
            f"data: {data}. Reproduce with `make benchmark`.")


def plot(summaries: Sequence[dict[str, Any]], path: str) -> None:
    """Draws the speedup over stock Mesh-TF's data parallelism, a panel per model, a group of bars per mesh."""
    from matplotlib.figure import Figure
    models = list(dict.fromkeys(summary["model"] for summary in summaries))
    figure = Figure(figsize=(4.5 * len(models), 3.2), layout="constrained")
    panels = figure.subplots(1, len(models), squeeze=False)[0]
    arms = (("data_parallel", "data parallel, our lowering", "#c5c9c7"), ("expert", "expert", "#7fa8c9"),
            ("search", "searched", "#2a6f97"))
    for axes, model in zip(panels, models, strict=True):
        rows = sorted((summary for summary in summaries if summary["model"] == model),
                      key=lambda summary: summary["devices"])
        for number, (arm, label, color) in enumerate(arms):
            heights = [row["arms"][arm]["speedup_over_stock"] for row in rows]
            axes.bar([place + 0.27 * (number - 1) for place in range(len(rows))], heights, 0.25, color=color,
                     label=label)
        axes.axhline(1, color="#888", linewidth=0.8)
        axes.set_xticks(range(len(rows)), [f"{row['devices']} devices" for row in rows])
        axes.set_title(model)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("times stock data parallelism")
    panels[0].legend(frameon=False)
    figure.savefig(path)


def with_earlier(path: str, results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows that were just measured, and those of a file that were not measured anew.

    Args:
      path: of the JSON that an earlier run wrote; it need not exist.
      results: as `main` collects them.

    Returns:
      All rows, in order of model, devices and batch.
    """
    def place(entry: dict[str, Any]) -> tuple[str, int, int]:
        return entry["summary"]["model"], entry["summary"]["devices"], entry["summary"]["batch"]

    rows = {}
    if os.path.exists(path):
        rows = {place(entry): entry for entry in json.loads(pathlib.Path(path).read_text(encoding="utf-8"))}
    rows |= {place(entry): entry for entry in results}
    return [rows[key] for key in sorted(rows)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes; returns 1 where a run failed (the others are written all the same)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="alexnet,transformer")
    parser.add_argument("--meshes", default="2,4,8,16")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--batches", default="", help="examples per step; empty: the preset's")
    parser.add_argument("--name", default="speedup", help="of the files")
    parser.add_argument("--add", action="store_true", help="keep the rows of an earlier run that are not measured now")
    parser.add_argument("--output", default=str(FOLDER))
    parser.add_argument("--readme", default=str(ROOT / "README.md"), help="empty: leave it alone")
    flags = parser.parse_args(arguments)
    results, failed = [], False
    with tempfile.TemporaryDirectory(prefix="pase_mtf-data-") as folder:
        for model in flags.models.split(","):
            data_flags, data = prepare_data(model, folder)
            for mesh, batch in itertools.product(flags.meshes.split(","), flags.batches.split(",")):
                try:
                    summary = run_launcher([f"--model={model}", f"--mesh={mesh}", "--devices=cpu",
                                            f"--steps={flags.steps}", *([f"--batch={batch}"] if batch else []),
                                            *data_flags])
                except RuntimeError as error:
                    print(f"error: {error}", file=sys.stderr)
                    failed = True
                    continue
                # Where this machine put its temporary files is nobody's business.
                summary["facts"].pop("output", None)
                summary["facts"]["data"] = summary["facts"]["data"].replace(folder + os.sep, "")
                results.append({"summary": summary, "data": data})
                ours = summary["arms"]["search"]
                print(f"{model} on {mesh}, batch {summary['batch']}: {ours['measured_ms']:.0f} ms, "
                      f"{ours['speedup_over_stock']:.2f}x over stock, "
                      f"{ours['speedup_over_data_parallel']:.2f}x over data parallel, {summary['wall_seconds']:.0f} s "
                      "in all", flush=True)
    if results:
        os.makedirs(flags.output, exist_ok=True)
        stem = os.path.join(flags.output, flags.name)
        if flags.add:
            results = with_earlier(f"{stem}.json", results)
        text = document(results)
        write_atomically(f"{stem}.json", json.dumps(results, indent=1) + "\n")
        if not flags.batches:
            plot([entry["summary"] for entry in results], f"{stem}.svg")
        write_atomically(f"{stem}.md", f"# Speedup over data parallelism\n\n{text}\n")
        if flags.readme and not failed:
            replace_block(flags.readme, "speedup", text)
    return int(failed or not results)


if __name__ == "__main__":
    sys.exit(main())
