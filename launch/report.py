"""report.html: one self-contained file with the strategy, the times and the loss curves."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping
from typing import Any

from pase_mtf.launch.summary import final_table
from pase_mtf.launch.training import History

__all__ = ["report_html"]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
pre { background: #f6f6f4; padding: .8rem; overflow-x: auto; font-size: 13px; line-height: 1.35; }
table { border-collapse: collapse; } td, th { padding: .15rem .8rem .15rem 0; text-align: left; vertical-align: top; }
img { max-width: 100%; } .note { color: #666; }
"""


def report_html(*, title: str, facts: Mapping[str, Any], rows: Mapping[str, Mapping[str, Any]], history: History | None,
                strategy_table: str, layout: str, notes: Mapping[str, str]) -> str:
    """The report.

    Args:
      title: of the page.
      facts: the header of the run.
      rows: the numbers of every arm; empty where nothing was trained.
      history: losses and times; None where nothing was trained.
      strategy_table: the strategy as text.
      layout: layout.txt.
      notes: heading -> text, shown as they are.
    """
    body = [f"<h1>{html.escape(title)}</h1>", "<table>",
            *(f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>"
              for name, value in facts.items()), "</table>"]
    if rows and history:
        body += ["<h2>Arms</h2>", f"<pre>{html.escape(final_table(rows))}</pre>",
                 _image(_bars(rows), "Predicted and measured time of a step, per arm"),
                 "<h2>Losses</h2>", _image(_losses(history), "Loss per step, per arm"),
                 '<p class="note">All arms start from the same values and see the same batches: curves that lie on '
                 "each other are what correct strategies give.</p>"]
    for heading, text in notes.items():
        body += [f"<h2>{html.escape(heading)}</h2>", f"<pre>{html.escape(text)}</pre>"]
    body += ["<h2>Strategy</h2>", f"<pre>{html.escape(strategy_table)}</pre>",
             "<h2>Layout</h2>", f"<pre>{html.escape(layout)}</pre>"]
    return ("<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
            f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
            + "\n".join(body) + "\n</body></html>\n")


def _image(figure: Any, description: str) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight")
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="{html.escape(description)}" src="data:image/svg+xml;base64,{data}">'


def _figure(width: float, height: float) -> tuple[Any, Any]:
    # The figure class itself, not pyplot: no global state, no display.
    from matplotlib.figure import Figure
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _bars(rows: Mapping[str, Mapping[str, Any]]) -> Any:
    figure, axes = _figure(8, 0.9 + 0.55 * len(rows))
    for position, row in enumerate(rows.values()):
        if row["predicted_ms"] is not None:
            axes.barh(position - 0.19, row["predicted_ms"], 0.36, color="#c9c9c4",
                      label="predicted" if "predicted" not in axes.get_legend_handles_labels()[1] else None)
        if row["measured_ms"] is not None:
            lower, upper = row["measured_ms_quartiles"]
            axes.barh(position + 0.19, row["measured_ms"], 0.36, color="#2a6f97",
                      xerr=[[row["measured_ms"] - lower], [upper - row["measured_ms"]]], ecolor="#111",
                      label="measured (median, quartiles)"
                      if "measured (median, quartiles)" not in axes.get_legend_handles_labels()[1] else None)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set_xlabel("ms per step")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
    return figure


def _losses(history: History) -> Any:
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
