"""The page of the cluster benchmark: its rows, tables, plot, and how the links were chosen."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from benchmarks import markdown
from benchmarks.paper_numbers import DEVICES, FIGURE_6
from pase_mtf.launch.flag_values import is_called

__all__ = ["Link", "Row", "document", "plot"]

_PLAIN = "MultiWorkerMirrored"
_ARMS = {"stock_data_parallel": "stock Mesh-TF", _PLAIN: _PLAIN, "data_parallel": "data parallel",
         "expert": "expert", "mcmc": "mcmc", "search": "**searched**"}
_COLORS = {"stock_data_parallel": "#d9d2c5", _PLAIN: "#b08ea2", "expert": "#7fa8c9", "mcmc": "#c9a67f",
           "search": "#2a6f97"}
_COLUMNS = 4
_IN_PAPER = {"expert": "expert", "mcmc": "FlexFlow", "search": "PaSE"}


@dataclasses.dataclass(frozen=True)
class Link:
    """The links of a cluster, and why they are as they are.

    Attributes:
      balance: FLOP in the time of a byte, of a GPU of the paper's cluster.
      flops: FLOP/s of a worker while all run, the best of its matrix products.
      rate: bytes/s that every link is held to, in either direction.
    """

    balance: float
    flops: float
    rate: float


@dataclasses.dataclass
class Row:
    """A model on a cluster.

    Attributes:
      model, devices: what was trained, on how many hosts, one device each.
      cluster: whose balance it has: a machine of configs/machines.
      clients: of the launcher: "one" or "ranks".
      link: fields of `Link`.
      summary: of the launcher's run.
      plain: what the steps of tf.distribute took, in milliseconds; None: there is no such model.
      loads: of the computer, over a minute, before and after.
      facts: processor and commit; how TCP shared the links (`Hosts.congestion_control`), in rows that say it.
      failed: why tf.distribute failed, "before" or "after" the others.
    """

    model: str
    devices: int
    cluster: str
    clients: str
    link: dict[str, float]
    summary: dict[str, Any]
    plain: list[float] | None
    loads: list[float]
    facts: dict[str, str]
    failed: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int, str, str]:
        """Cluster, devices, model, clients."""
        return self.cluster, self.devices, self.model, self.clients

    def milliseconds(self, arm: str) -> float | None:
        """The median step of an arm; None where there is none."""
        if arm == _PLAIN:
            return statistics.median(self.plain) if self.plain else None
        found: float | None = self.arm(arm).get("measured_ms")
        return found

    def arm(self, arm: str) -> dict[str, Any]:
        """The numbers of an arm, whose name may say over how many devices the batch splits; empty: it is missing."""
        return next((found for name, found in self.summary["arms"].items() if is_called(name, arm)), {})

    def speedup(self, arm: str, over: str = "data_parallel") -> float | None:
        """How many times as fast as another an arm is."""
        mine, base = self.milliseconds(arm), self.milliseconds(over)
        return base / mine if mine and base else None

    def predicted(self, arm: str = "search") -> float | None:
        """The speedup over data parallelism that was predicted."""
        mine, base = (_predicted_ms(self.arm(name)) for name in (arm, "data_parallel"))
        return base / mine if mine and base else None

    def in_paper(self, arm: str = "search") -> float | None:
        """The speedup over data parallelism of the paper's Figure 6."""
        row = FIGURE_6.get(self.cluster, {}).get(self.model, {}).get(_IN_PAPER.get(arm, ""))
        return row[DEVICES.index(self.devices)] if row and self.devices in DEVICES else None


def _predicted_ms(found: Mapping[str, Any]) -> float | None:
    """Of a step: as it was simulated, by which strategies are judged, or else the sum of costs; None: unknown."""
    return found.get("simulated_ms") or found.get("predicted_ms")


def _number(value: float | None, form: str = ".2f", unit: str = "×") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def _cell(row: Row, arm: str) -> str:
    if arm == _PLAIN:
        if not row.plain:
            return "failed" if row.failed else "-"
        # As the launcher's (numpy.percentile): the other rule goes beyond all values where there are few.
        low, _, high = (statistics.quantiles(row.plain, n=4, method="inclusive") if len(row.plain) > 1
                        else [row.plain[0]] * 3)
        return f"{statistics.median(row.plain):,.0f} ± {(high - low) / 2:,.0f}"
    found = row.arm(arm) or None
    if not found or found["measured_ms"] is None:
        return "-"
    return f"{found['measured_ms']:,.0f} ± {found['measured_ms_spread']:,.0f}" + (
        " (same)" if found["same_as"] else "")


def _main_table(rows: Sequence[Row]) -> str:
    head = ["cluster", "model", "hosts", *_ARMS.values(), "over data parallel", "predicted", "the paper's",
            "over MultiWorkerMirrored", "data parallel: predicted ms", "searched: predicted ms", "losses",
            "measured on", "commit"]
    body = []
    for row in rows:
        body.append([row.cluster, row.model, row.devices, *(_cell(row, arm) for arm in _ARMS),
                     f"**{_number(row.speedup('search'))}**", _number(row.predicted()), _number(row.in_paper()),
                     _number(row.speedup("search", _PLAIN)),
                     *(_number(_predicted_ms(row.arm(arm)), ",.0f", "")
                       for arm in ("data_parallel", "search")),
                     "**differ**" if row.summary.get("disagreement") else "equal", row.facts["processor"],
                     row.facts["commit"]])
    return markdown.table(head, body, left=(0, 1))


def _with_ranks(rows: Sequence[Row]) -> Iterator[tuple[Row, Row | None]]:
    """Every row, and that of the same code with a graph per rank over the same links, if there is one."""
    def alike(row: Row) -> tuple[object, ...]:
        return *row.key[:3], row.link["flops"], row.facts["processor"], row.facts["commit"]

    of_ranks = {alike(row): row for row in rows if row.clients == "ranks"}
    return ((row, of_ranks.get(alike(row))) for row in rows)


def _ranks_table(rows: Sequence[Row]) -> str:
    body = []
    for row, other in _with_ranks(rows):
        if row.clients != "one" or other is None:
            continue
        for arm in ("data_parallel", "search"):
            one, ranks = row.milliseconds(arm), other.milliseconds(arm)
            body.append([row.cluster, row.model, row.devices, _ARMS[arm].strip("*"), _cell(row, arm),
                         _cell(other, arm), _number(one / ranks if one and ranks else None)])
    return markdown.table(["cluster", "model", "hosts", "strategy", "one client", "a graph per rank", "one over ranks"],
                          body, left=(0, 1, 3)) if body else ""


def _links_table(rows: Sequence[Row]) -> str:
    found: dict[tuple[str, int, float], list[Row]] = {}
    for row in rows:
        found.setdefault((row.cluster, row.devices, row.link["rate"]), []).append(row)
    body = []
    for (cluster, devices, _), alike in sorted(found.items()):
        row, link = alike[-1], Link(**alike[-1].link)
        of = ", ".join(dict.fromkeys(row.model for row in alike))
        body.append([cluster, devices, of, f"{link.balance:,.0f}", f"{link.flops / 1e9:.1f}", f"{link.rate / 1e6:.2f}",
                     f"{8 * link.rate / 1e6:,.0f}", row.summary["facts"]["machine"].partition("; ")[2] or "-"])
    return markdown.table(["cluster", "hosts", "models", "FLOP per byte", "GFLOP/s of a worker", "MB/s of a link",
                           "Mbit/s", "what calibration found"], body, left=(0, 2, 7))


def _notes(rows: Sequence[Row]) -> str:
    loads = [load for row in rows for load in row.loads]
    facts = sorted({", ".join([row.facts["processor"], f"commit {row.facts['commit']}", *(
        [f"TCP by {row.facts['tcp']}"] if "tcp" in row.facts else [])]) for row in rows})
    versions = sorted({row.summary["facts"]["versions"] for row in rows})
    steps = sorted({row.summary["arms"]["search"]["measured_steps"] for row in rows}
                   | {len(row.plain) for row in rows if row.plain})
    left_out = sorted({f"{row.model}: no {arm} ({why})" for row in rows if row.clients == "one"
                       for arm, why in row.summary["left_out"].items()})
    left_out += [f"{row.model} on {row.devices} hosts, {row.cluster}: {_PLAIN} failed {when} the others ({why})"
                 for row in rows for when, why in row.failed.items()]
    return (f"Milliseconds a step: medians of {' or '.join(map(str, steps))} steps ± half the distance of the "
            "quartiles (preset tiny, synthetic data), arms of the launcher in turns, MultiWorkerMirroredStrategy "
            "half of its steps before them, half after. “(same)”: the very strategy of another arm, trained once. "
            "Predicted are simulated steps, by which strategies are judged, not sums of costs. All "
            f"hosts of a row share the cores of one computer ({'; '.join(facts)}; {'; '.join(versions)}), whose load "
            f"over a minute was {min(loads):.1f} to {max(loads):.1f} meanwhile, of which the workers are a part: "
            "with other work beside it a computing worker is slower than when its link was chosen, and a link is not."
            + "".join(f" {entry}." for entry in left_out))


_HEAD = """# A cluster with the balance of the paper's

The paper's Figure 6 is of GPUs whose links are slow beside their arithmetic. Virtual devices of one process have no
such links. Here every worker is a host of its own, a network namespace of one computer, and all that it sends and is
sent goes through a link that `tc` (a token bucket, in either direction) holds to a rate. It is chosen so that a worker
can compute as many FLOP in the time of a byte as a GPU of the paper's cluster:

    rate of a link = FLOP/s of a worker while all run / (peak FLOP/s of the GPU / bytes/s of its link)

The GPU's numbers are those of its data sheet and of the links that join as many of them (`configs/machines/`): of four
1080 Ti in a node 11.3 TFLOP/s over 12 GB/s (peer to peer over PCIe), of four 2080 Ti 13.4 TFLOP/s over 3 GB/s (which
have no peer to peer: each copy is staged through the host's memory). The worker's are the best rate that the
calibration found for a matrix product on each of the workers while all of them ran it, the links held by nothing.
Then the links are held, and the launcher calibrates through them as it does for a user (`--machine=local` under
`--cluster`): what it found stands in the last column.
"""


_SPARSE = """tf.distribute sends the gradient of an embedding as the rows that a batch looked up (TensorFlow's
IndexedSlices). A gather of Mesh-TensorFlow is a product with one-hot vectors, whose gradient is the whole table: stock
Mesh-TF adds up whole tables. Our lowering sends rows, too, where these are fewer elements than the table's all-reduce
([how](../lowering.md)). Of the 10.0 MB of the transformer's gradients 4.2 MB are of two tables, of which each of four
hosts looks up 0.13 MB.
"""


def _beside_plain(rows: Sequence[Row]) -> str:
    """What our data parallelism takes beside tf.distribute's, where rows of tables travel."""
    told = []
    for row, ranks in _with_ranks(rows):
        plain = row.milliseconds(_PLAIN)
        if row.model != "transformer" or not plain:
            continue
        for client, one in (("one client", row), ("a graph per rank", ranks)):
            ours = one.milliseconds("data_parallel") if one else None
            if ours:
                told.append(f"{ours / plain:.2f} times with {client} ({row.devices} hosts, {row.cluster})")
    return (f"{_SPARSE}Of the step of MultiWorkerMirroredStrategy our data parallelism takes {', '.join(told)}.\n"
            if told else "")


def document(rows: Sequence[Row]) -> str:
    """The page of these rows."""
    main = [row for row in rows if row.clients == "one"]
    ranks = _ranks_table(rows)
    return "\n".join([
        _HEAD, _links_table(rows), "", "## Speedups", "", _main_table(main), "", _notes(rows), "",
        *([beside] if (beside := _beside_plain(rows)) else []),
        "![times data parallelism, measured, predicted, and in the paper](cluster.svg)", "",
        *(["## One client, and a graph per rank", "", "The same runs with `--clients=ranks`, measured one after the "
           "other.", "", ranks, ""] if ranks else []),
        "Reproduce with `python -m benchmarks.cluster` (Linux, root, iproute2).", ""])


def plot(rows: Sequence[Row], path: str) -> None:
    """A panel per cluster and model: bars for what was measured, circles for what was predicted, black marks for the
    paper's."""
    shown = [row for row in rows if row.clients == "one" and row.milliseconds("data_parallel")]
    if not shown:
        return
    lines = -(-len(shown) // _COLUMNS)
    figure = Figure(figsize=(3.4 * min(len(shown), _COLUMNS), 2.8 * lines + 0.6), layout="constrained")
    panels = figure.subplots(lines, min(len(shown), _COLUMNS), squeeze=False).ravel()
    handles: dict[str, Any] = {}
    for axes, row in zip(panels, shown, strict=False):
        for place, (arm, color) in enumerate(_COLORS.items()):
            measured, predicted, paper = row.speedup(arm), row.predicted(arm), row.in_paper(arm)
            handles[_ARMS[arm].strip("*")] = axes.bar(place, measured or 0.0, 0.75, color=color)
            if predicted:
                handles["predicted"], = axes.plot(place, predicted, "o", color="white", markeredgecolor="black",
                                                  markersize=6)
            if paper:
                handles["in the paper"], = axes.plot(place, paper, "_", color="black", markersize=16,
                                                     markeredgewidth=2.2)
        axes.axhline(1, color="#888", linewidth=0.8)
        axes.set_xticks([])
        axes.set_title(f"{row.model}, {row.devices} hosts, {row.cluster}", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[len(shown):]:
        axes.remove()
    panels[0].set_ylabel("times our data parallelism")
    figure.legend(handles.values(), handles, loc="outside upper center", ncols=4, frameon=False, fontsize=8)
    with rc_context({"svg.hashsalt": "cluster"}):  # the same numbers give the same file
        figure.savefig(path, metadata={"Date": None})
