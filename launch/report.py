"""What a run shows people: its header, the table at its end, and report.html."""

from __future__ import annotations

import base64
import importlib.metadata
import io
import math
import os
import platform
from collections.abc import Mapping, Sequence

import jinja2
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tabulate import tabulate

from pase_mtf.amounts import bytes_text
from pase_mtf.compat import tf
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.launch.data import Data
from pase_mtf.launch.flag_values import ArmName
from pase_mtf.launch.plan import Plan
from pase_mtf.launch.summary import ArmRow
from pase_mtf.launch.training import History
from pase_mtf.machine.machine import Machine
from pase_mtf.search.frontier import FrontierPoint, draw_frontier
from pase_mtf.strategy.devices import devices_text
from pase_mtf.strategy.strategy import Strategy

__all__ = ["describe_run", "final_table", "report_html", "search_summary"]


def describe_run(plan: Plan, data: Data, machine: Machine, graph: ComputationGraph,
                 arms: Sequence[ArmName]) -> dict[str, str]:
    """The header of a run: what it runs, on what, under which arms, and where its numbers come from."""
    options = plan.options
    rate = "its own schedule" if options.learning_rate is None else f"{options.learning_rate:g}"
    facts = {
        "versions": f"pase_mtf {_version('pase_mtf')}, TensorFlow {tf.__version__}, Mesh-TensorFlow "
                    f"{_version('mesh-tensorflow')}, Python {platform.python_version()}",
        "devices": str(plan.devices),
        "machine": f"{machine.name}: {machine.source}" + (
            "; NOT the devices of this run: predicted and measured times do not compare" if plan.machine else ""),
        "model": f"{options.model}, preset {options.preset}, {graph.parameters:,} parameters, "
                 f"{graph.flops / 1e9:.2f} GFLOP a step",
        "training": f"batch {options.batch}, {options.optimizer}, learning rate {rate}, seed {options.seed}, "
                    f"{options.warmup} warm-up + {options.steps} steps",
        "data": data.describe(),
        "arms": ", ".join(arm.name for arm in arms),
        "output": os.path.abspath(options.output_dir),
    }
    if options.uneven:
        facts["data parallelism"] = options.uneven
    for arm in arms:
        if arm.method == "expert" and arm.argument:
            facts["expert"] = (f"has no strategy for {plan.devices.count} devices: over {arm.argument} of them, "
                               f"{plan.devices.count - int(arm.argument)} idle")
    if plan.checkpoint:
        facts["resumes"] = f"{options.resume} at step {plan.first_step}"
    return facts


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def search_summary(strategy: Strategy, graph: ComputationGraph) -> str:
    """One paragraph about the search: its size, its time, what it proved, and the step it predicts, by part."""
    found = strategy.search
    if found.get("simpler"):
        proof = (f"data parallelism, predicted {100 * found['gap']:.2g} % above the optimum: as good, as far as "
                 "predictions tell, and simpler")
    elif found.get("optimal"):
        proof = "optimal (proven)"
    elif found.get("gap") is not None:
        proof = f"at most {100 * found['gap']:.2g} % above the optimum"
    else:
        proof = "no bound"
    useful = devices_text(strategy.devices, found.get("useful_devices", strategy.devices),
                          found.get("suggested_devices"))
    proof += f"; {useful}" if useful else ""
    parts = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in strategy.parts.items())
    return (f"search: {len(graph.layers)} layers, {len(graph.edges)} edges, {found.get('configurations', 0)} "
            f"configurations, {found.get('seconds', 0.0):.2f} s, {proof}\n"
            f"predicted step: {1e3 * strategy.seconds:.2f} ms ({parts})")


def final_table(rows: Mapping[str, ArmRow]) -> str:
    """The table a run ends with."""
    head = ["arm", "predicted ms", "measured ms", "examples/s", "over stock", "over data par.", "predicted memory",
            "measured memory"]
    lines = []
    for name, row in rows.items():
        spread = f" ± {row['measured_ms_spread']:.1f}" if row["measured_ms"] is not None else ""
        lines.append([
            f"{name} (= {row['same_as']})" if row["same_as"] else name, number(row["predicted_ms"], ".1f"),
            number(row["measured_ms"], ".1f") + spread, number(row["examples_per_second"], ".1f"),
            number(row["speedup_over_stock"], ".2f", "×"), number(row["speedup_over_data_parallel"], ".2f", "×"),
            size(row["predicted_bytes"]), size(row["measured_bytes"])])
    return tabulate(lines, head, disable_numparse=True, colalign=("left", *["right"] * (len(head) - 1)))


def number(value: float | None, form: str, unit: str = "") -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else f"{value:{form}}{unit}"


def size(value: float | None) -> str:
    """Bytes for people, or a dash."""
    return "-" if value is None else bytes_text(value)


_PAGE = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
                           keep_trailing_newline=True).from_string("""\
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
pre { background: #f6f6f4; padding: .8rem; overflow-x: auto; font-size: 13px; line-height: 1.35; }
table { border-collapse: collapse; } td, th { padding: .15rem .8rem .15rem 0; text-align: left; vertical-align: top; }
img { max-width: 100%; } .note { color: #666; }
</style></head>
<body>
<h1>{{ title }}</h1>
<table>
{% for name, value in facts.items() %}
<tr><th>{{ name }}</th><td>{{ value }}</td></tr>
{% endfor %}
</table>
{% if measured %}
<h2>Arms</h2>
<pre>{{ measured.arms }}</pre>
<img alt="Predicted and measured time of a step, per arm" src="{{ measured.times }}">
{% if measured.losses %}
<h2>Losses</h2>
<img alt="Loss per step, per arm" src="{{ measured.losses }}">
<p class="note">All arms start from the same values and see the same batches: curves that lie on each other are what
correct strategies give.</p>
{% endif %}
{% endif %}
{% if memory %}
<h2>Time and memory</h2>
<img alt="Predicted time of a step over the memory of a device" src="{{ memory }}">
<p class="note">The line: the fastest strategy within each limit on the memory of a device; dotted, what none can be
faster than. The points: the arms of this run, the chosen one filled.</p>
{% endif %}
{% for heading, text in notes.items() %}
<h2>{{ heading }}</h2>
<pre>{{ text }}</pre>
{% endfor %}
<h2>Strategy</h2>
<pre>{{ strategy_table }}</pre>
<h2>Layout</h2>
<pre>{{ layout }}</pre>
</body></html>
""")


def report_html(*, title: str, facts: Mapping[str, str], rows: Mapping[str, ArmRow], history: History | None,
                strategy_table: str, layout: str, notes: Mapping[str, str],
                frontier: Sequence[FrontierPoint] = (), memory_limit: float = math.inf) -> str:
    """The text of report.html: one self-contained file with the strategy, the times and the loss curves.

    Args:
      title: of the page.
      facts: the header of the run.
      rows: the numbers of every arm, predicted and, where it was trained, measured.
      history: losses and times; None, or without records, where nothing was trained.
      strategy_table: the strategy as text.
      layout: layout.txt.
      notes: heading -> text, shown as they are.
      frontier: what memory buys; empty: no picture of it.
      memory_limit: bytes that a device may hold.
    """
    measured: dict[str, str] = {}
    if rows:
        curves = _image(_losses(history)) if history is not None and history.records else ""
        measured = {"arms": final_table(rows), "times": _image(_bars(rows)), "losses": curves}
    memory = _image(_memory(rows, frontier, memory_limit)) if frontier else ""
    return _PAGE.render(title=title, facts=facts, measured=measured, memory=memory, notes=notes,
                        strategy_table=strategy_table, layout=layout)


def _image(figure: Figure) -> str:
    """The figure as the URL of an image that holds it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight")
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    # The figure class itself, not pyplot: no global state, no display.
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _bars(rows: Mapping[str, ArmRow]) -> Figure:
    """Predicted and measured time of a step, per arm."""
    figure, axes = _figure(8, 0.9 + 0.55 * len(rows))
    labels = {"predicted": "predicted", "measured": "measured (median, quartiles)"}  # each is said once in the legend
    for position, row in enumerate(rows.values()):
        if row["predicted_ms"] is not None:
            axes.barh(position - 0.19, row["predicted_ms"], 0.36, color="#c9c9c4", label=labels.pop("predicted", None))
        if row["measured_ms"] is not None and row["measured_ms_quartiles"] is not None:
            lower, upper = row["measured_ms_quartiles"]
            axes.barh(position + 0.19, row["measured_ms"], 0.36, color="#2a6f97", label=labels.pop("measured", None),
                      xerr=[[row["measured_ms"] - lower], [upper - row["measured_ms"]]], ecolor="#111")
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set_xlabel("ms per step")
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside upper left", ncols=2, frameon=False)  # beside the bars, never on them
    return figure


def _memory(rows: Mapping[str, ArmRow], points: Sequence[FrontierPoint], limit: float) -> Figure:
    """Predicted time of a step over the memory of a device: what can be had, the arms, and the limit."""
    figure, axes = _figure(8, 3.6)
    draw_frontier(axes, points, "fastest within the limit", color="#2a6f97", unit=1e-3)
    ends = [points[0].memory_limit, points[-1].memory_limit]
    for position, (arm, row) in enumerate(rows.items()):
        if row["predicted_bytes"] is None or row["predicted_ms"] is None:
            continue
        ends.append(row["predicted_bytes"])
        axes.plot(row["predicted_bytes"] / 1e9, row["predicted_ms"], marker="osD^vP*"[position % 7], markersize=9,
                  linestyle="", color="#c1121f", fillstyle="none" if position else "full", label=arm)
    if limit <= 1.5 * max(ends):  # else it is far from everything that is drawn
        axes.axvline(limit / 1e9, color="#111", linewidth=1, label="memory limit")
    axes.set_xlabel("GB on the fullest device")
    axes.set_ylabel("predicted ms per step")
    figure.legend(loc="outside upper left", ncols=4, frameon=False)
    return figure


def _losses(history: History) -> Figure:
    """Loss per step, per arm."""
    figure, axes = _figure(8, 3.6)
    for number, (arm, records) in enumerate(history.records.items()):
        # Dashed, ever shorter: curves that coincide stay visible.
        axes.plot([record.step for record in records], [record.loss for record in records], label=arm,
                  linestyle=(0, (6, 1 + 2 * number)) if number else "-", linewidth=2)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    if history.records:
        axes.legend(frameon=False)
    return figure
