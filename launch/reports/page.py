"""report.html: one self-contained file with the strategy, the times and the loss curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jinja2

from pase_mtf.launch.reports.pictures import draw_losses, draw_memory, draw_steps, draw_timeline, image
from pase_mtf.launch.reports.text import final_table
from pase_mtf.launch.summary import ArmRow
from pase_mtf.launch.training import History
from pase_mtf.search.frontier import FrontierPoint
from pase_mtf.simulator.timeline import Timeline

__all__ = ["report_html"]

_PAGE = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
                           keep_trailing_newline=True).from_string("""\
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
pre { background: #f6f6f4; padding: .8rem; overflow-x: auto; font-size: 13px; line-height: 1.35; }
table { border-collapse: collapse; } td, th { padding: .15rem .8rem .15rem 0; text-align: left; vertical-align: top; }
img { max-width: 100%; } .note { color: #666; } .headline { font-size: 1.4rem; }
.graph { max-height: 40rem; overflow: auto; border: 1px solid #ddd; }
</style></head>
<body>
<h1>{{ title }}</h1>
{% if headline %}
<p class="headline">{{ headline }}</p>
{% endif %}
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
<img alt="Time of a step over the memory of a device" src="{{ memory }}">
<p class="note">The line: the fastest strategy within each limit on the memory of a device; dotted, what none can be
faster than. The points: the arms of this run, red as predicted, the chosen one filled{% if not elsewhere %}; green as
measured, joined to what was predicted{% endif %}.</p>
{% endif %}
{% if timeline %}
<h2>What each device does when</h2>
<img alt="The simulated step, device by device" src="{{ timeline }}">
<p class="note">Predicted: {{ simulated }}; timeline-predicted.json is for ui.perfetto.dev.</p>
{% if traced %}
<img alt="The traced step, device by device" src="{{ traced }}">
<p class="note">Measured: one step that TensorFlow traced, which takes longer than others: {{ took }};
timeline-measured.json.</p>
{% endif %}
{% endif %}
{% for heading, text in notes.items() %}
<h2>{{ heading }}</h2>
<pre>{{ text }}</pre>
{% endfor %}
<h2>Strategy</h2>
{% if graph %}
<p class="note">A box per layer, coloured by how it is split; point at one for its alternatives. A red line: the tensor
is moved from one sharding to another.</p>
<div class="graph">{{ graph | safe }}</div>
{% endif %}
<pre>{{ strategy_table }}</pre>
<h2>Layout</h2>
<pre>{{ layout }}</pre>
</body></html>
""")


def report_html(*, title: str, facts: Mapping[str, str], rows: Mapping[str, ArmRow], history: History | None,
                strategy_table: str, layout: str, notes: Mapping[str, str],
                frontier: Sequence[FrontierPoint] = (), memory_limit: float = math.inf,
                others: Mapping[str, Sequence[FrontierPoint]] | None = None, headline: str = "",
                parts: Mapping[str, Mapping[str, float]] | None = None,
                traced_parts: Mapping[str, Mapping[str, float]] | None = None, timeline: Timeline | None = None,
                traced: Timeline | None = None, graph: str = "", elsewhere: bool = False) -> str:
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
      others: what it buys where other blocks are computed again, by what to call that.
      headline: what was found, in one line; empty: none.
      parts: arm -> part of its predicted step -> seconds.
      traced_parts: arm -> kind -> seconds of its devices in a traced step.
      timeline: the simulated step of the strategy; None: no picture of it.
      traced: the same step as it was measured; None: no picture of it.
      graph: the strategy as a picture (`graph_picture`), SVG; empty: none.
      elsewhere: predictions are of another machine than the one that trained: what was measured is not drawn among
        them.
    """
    measured: dict[str, str] = {}
    if rows:
        curves = image(draw_losses(history)) if history is not None and history.records else ""
        measured = {"arms": final_table(rows), "times": image(draw_steps(rows, parts or {}, traced_parts)),
                    "losses": curves}
    memory = image(draw_memory(rows, frontier, memory_limit, others or {}, measured=not elsewhere)) if frontier else ""
    return _PAGE.render(title=title, facts=facts, measured=measured, memory=memory, notes=notes, headline=headline,
                        strategy_table=strategy_table, layout=layout, graph=graph, elsewhere=elsewhere,
                        timeline=image(draw_timeline(timeline), "png") if timeline else "",
                        simulated=f"{1e3 * timeline.seconds:.2f} ms" if timeline else "",
                        traced=image(draw_timeline(traced), "png") if traced else "",
                        took=f"{1e3 * traced.seconds:.2f} ms" if traced else "")
