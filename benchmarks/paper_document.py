"""Writes docs/paper.md and its plots from what `benchmarks.paper` found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.paper_numbers import DEVICES, FIGURE_6, TABLE_1

__all__ = ["document", "plot_speedups"]

_ARMS = (("expert", "#7fa8c9"), ("FlexFlow", "#c9a67f"), ("ours", "#2a6f97"))


_DIFFERENCES = {
    "alexnet":
        "Where they differ: two channels of conv 3 to 5 are split beside 16 parts of the batch, which halves the "
        "weights whose gradients are summed over the batch; conv 5 splits its out-channels, so that fc 1 finds them "
        "split. “(copies)” says that the other devices repeat the work where the paper's leave them idle: the same "
        "time.",
    "transformer":
        "Where they differ: embedding and output split the batch beside the vocabulary, on all 32 devices where the "
        "paper's row uses 16; attention repeats its work on two copies rather than splitting heads, which costs "
        "arithmetic and saves the all-reduces that a split of heads needs.",
}


def plot_speedups(found: dict[str, Any], machine: str, path: str) -> None:
    """Draws predicted speedups over data parallelism as bars, the paper's measured ones as marks."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(4.6 * len(found), 3.2), layout="constrained")
    panels = figure.subplots(1, len(found), squeeze=False)[0]
    for axes, (model, machines) in zip(panels, found.items(), strict=True):
        for number, (arm, color) in enumerate(_ARMS):
            places = [place + 0.27 * (number - 1) for place in range(len(DEVICES))]
            heights = [machines[machine][str(devices)].get(arm, {}).get("speedup", 0) for devices in DEVICES]
            axes.bar(places, heights, 0.25, color=color, label=f"{arm}, predicted")
            measured = FIGURE_6[machine].get(model, {}).get("PaSE" if arm == "ours" else arm)
            if measured:
                axes.plot(places, measured, "_", color="black", markersize=9, markeredgewidth=1.6,
                          label="the paper's, measured" if arm == "ours" else None)
        axes.axhline(1, color="#888", linewidth=0.8)
        axes.set_xticks(range(len(DEVICES)), [str(devices) for devices in DEVICES])
        axes.set(title=f"{model}, {machine}", xlabel="devices")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("times data parallelism")
    panels[-1].legend(frameon=False, fontsize=8)
    figure.savefig(path)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---|" + "--:|" * (len(head) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _times(found: dict[str, Any]) -> str:
    rows = []
    for model, by_devices in found.items():
        paper = TABLE_1.get(model, {})
        for number, devices in enumerate(DEVICES):
            row = by_devices[str(devices)]
            search = row["pase"]
            rows.append([
                model, str(devices), f"{row['exact']:.4f}" + ("" if row["optimal"] else " (not proven)"),
                f"{row['build']:.3f}", f"{search['seconds']:.2f}" if "seconds" in search else search["says"],
                *(f"{paper[name][number]:g}" if name in paper else "–" for name in ("PaSE", "FlexFlow"))])
    return ("## Table I: seconds to find a strategy\n\nThe paper's cost model and constants (5000 FLOP a word), search "
            "alone with compiled code loaded; “network” is what building the cost network takes. `pase` is the paper's "
            "algorithm as we wrote it, in a process of its own.\n\n"
            + _table(["model", "p", "`exact`", "network", "`pase`, ours", "PaSE, paper", "FlexFlow, paper"], rows))


def _strategies(found: dict[str, Any]) -> str:
    parts = ["## Table II: the strategies at p = 32, the paper's cost model\n\nOurs is the proven optimum of the "
             "paper's formulas and constants on our graph, which has more layers than the paper's table has rows; “the "
             "paper's” is its row in our dims (conv 5: b 16, c 2, and so on), idle devices included."]
    for model, row in found.items():
        body = [[name + (f" ({count}×)" if count > 1 else ""), mine, theirs, "same" if mine == theirs else ""]
                for name, mine, theirs, count in row["rows"]]
        parts.append(
            f"### {model}\n\n" + _table(["layer", "ours", "the paper's", ""], body) + "\n\n"
            f"Cost of ours {row['ours']:.6g} FLOP{'' if row['optimal'] else ' (not proven)'}, of the paper's strategy "
            f"{row['theirs']:.6g} FLOP by the same formulas: the paper's costs {row['theirs'] / row['ours']:.3f} times "
            f"ours. In seconds of our own cost model: ours {1e3 * row['ours_seconds']:.1f} ms, the paper's "
            f"{1e3 * row['theirs_seconds']:.1f} ms, the optimum of our own model {1e3 * row['best_seconds']:.1f} ms."
            "\n\n" + _DIFFERENCES.get(model, ""))
    return "\n\n".join(parts)


def _speedups(found: dict[str, Any]) -> str:
    rows = []
    for model, machines in found.items():
        for machine, by_devices in machines.items():
            for number, devices in enumerate(DEVICES):
                row = by_devices[str(devices)]
                measured = FIGURE_6[machine].get(model, {})
                rows.append([model, machine, str(devices), *(_speedup(row, arm) for arm, _ in _ARMS),
                             *(f"{measured[name][number]:.2f}" if name in measured else "–"
                               for name in ("expert", "FlexFlow", "PaSE"))])
    return ("## Figure 6: speedup over data parallelism\n\nPredicted by our cost model (seconds, links from data "
            "sheets), beside what the paper measured. FlexFlow: its search on our costs, the better of its two "
            "starts.\n\n"
            "![1080 Ti](paper-1080ti.svg)\n![2080 Ti](paper-2080ti.svg)\n\n"
            + _table(["model", "machine", "p", "expert", "FlexFlow", "ours", "expert, paper", "FlexFlow, paper",
                      "PaSE, paper"], rows))


def _scale(found: dict[str, Any]) -> str:
    rows = [[model, devices,
             *(f"{1e3 * row[name]['seconds']:.2f} ms" if name in row else "–" for name in ("data parallel", "ours")),
             *(_speedup(row, arm) for arm, _ in _ARMS), "yes" if row["optimal"] else "no"]
            for model, by_devices in found.items() for devices, row in by_devices.items()]
    return ("## At scale, predicted\n\nNodes of eight H100, 1024 examples a step; speedups over data parallelism.\n\n"
            + _table(["model", "p", "data parallel", "ours", "expert", "FlexFlow", "ours, times", "proven"], rows))


def _speedup(row: dict[str, Any], arm: str) -> str:
    return f"{row[arm]['speedup']:.2f}" if arm in row else "–"


def document(results: dict[str, Any]) -> str:
    """docs/paper.md, of the sections there are."""
    facts = results["facts"]
    parts = ["# The PaSE paper's tables, beside ours\n\nElango, *PaSE: Parallelization Strategies for Efficient DNN "
             "Training*, IPDPS 2021 (arXiv 2407.04001). Reproduce with `python -m benchmarks.paper`. "
             f"{facts['processor']}, Python {facts['python']}."]
    writers = {"times": _times, "strategies": _strategies, "speedups": _speedups, "scale": _scale}
    parts += [write(results[name]) for name, write in writers.items() if name in results]
    return "\n\n".join(parts) + "\n"
