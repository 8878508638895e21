"""The plots of docs/benchmarks/search.md: time against devices beside the paper's, what mcmc reaches over time, and the
time of a step against its memory."""

from __future__ import annotations

import os
from typing import Any

from matplotlib.figure import Figure

from benchmarks.search_document import networks_of
from benchmarks.search_memory import points_of
from pase_mtf.search.frontier import draw_frontier

__all__ = ["TABLE_ONE", "TABLE_ONE_FLEXFLOW", "plot_mcmc", "plot_memory", "plot_times"]

TABLE_ONE = {
    "AlexNet": {4: 0.226, 8: 0.253, 16: 0.295, 32: 0.361, 64: 0.475},
    "Inception-v3": {4: 14.4, 8: 20.0, 16: 39.8, 32: 86.0, 64: 196.0},
    "RNNLM": {4: 0.057, 8: 0.086, 16: 0.069, 32: 0.131, 64: 0.215},
    "Transformer": {4: 9.75, 8: 28.8, 16: 130.9, 32: 553.0, 64: 1883.0}}
"""Seconds to find a strategy on the paper's machine (PaSE, Table I): graph -> devices -> seconds."""
TABLE_ONE_FLEXFLOW = {
    "AlexNet": {4: 2.54, 8: 2.77, 16: 6.98, 32: 7.92, 64: 257.0},
    "Inception-v3": {4: 69.2, 8: 146.5, 16: 365.8, 32: 938.0, 64: 2237.0},
    "RNNLM": {4: 107.0, 8: 164.0, 16: 432.0, 32: 668.0, 64: 1042.0}}
"""The same of FlexFlow, which the paper measured beside it."""

# Panel -> the networks of a line, by the part of their name before the number of devices; the second, where there is
# one, is the paper's own network of the same model.
_PANELS = {"AlexNet": ("alexnet-big", "alexnet"), "Transformer": ("transformer-big", "transformer"),
           "Inception-v3": ("inception3",), "RNNLM": ("rnnlm",), "DenseNet-121": ("densenet-layer", "densenet-direct")}
_COLOURS = {"exact": "#1b6ca8", "pase": "#d1495b", "breadth_first": "#8d6a9f", "mcmc (1)": "#6a994e",
            "mcmc (2)": "#a7c957", "milp": "#edae49", "toulbar2": "#3d405b"}


def plot_times(results: dict[str, dict[str, Any]], path: str | os.PathLike) -> None:
    """A panel per model: seconds to the result against devices. Methods without a result in time have no point."""
    networks = networks_of(results.get("rivals", {}))
    figure = Figure(figsize=(15, 4.2), layout="constrained")
    panels = figure.subplots(1, len(_PANELS), sharey=True)
    for axes, (title, graphs) in zip(panels, _PANELS.items(), strict=True):
        for place, graph in enumerate(graphs):
            for method, colour in _COLOURS.items():
                points = sorted(_points(networks, graph, method))
                if points:
                    # The paper's own networks beside those of the launcher: hollow, not joined.
                    axes.plot(*zip(*points, strict=True), "o" if place else "o-", color=colour, markersize=4,
                              markerfacecolor="none" if place else colour, linewidth=1.2)
        for table, style in ((TABLE_ONE, "--"), (TABLE_ONE_FLEXFLOW, ":")):
            if title in table:
                axes.plot(list(table[title]), list(table[title].values()), style, color="black", linewidth=1.2)
        axes.set(title=title, xscale="log", yscale="log", xlabel="devices")
        axes.set_xlim(3.3, 320 if title.startswith("Dense") else 80)
        ticks = [4, 16, 64, 256] if title.startswith("Dense") else [4, 8, 16, 32, 64]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e5e5e5", linewidth=0.6)
    panels[0].set_ylabel("seconds to the result")
    for method, colour in _COLOURS.items():
        panels[-1].plot([], [], "o-", color=colour, markersize=4,
                        label=f"{method}: no proof" if method.startswith("mcmc") else method)
    panels[-1].plot([], [], "o", color="black", markerfacecolor="none", markersize=4, label="the paper's network")
    panels[-1].plot([], [], "--", color="black", label="paper, its machine: PaSE")
    panels[-1].plot([], [], ":", color="black", label="paper, its machine: FlexFlow")
    figure.legend(*panels[-1].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path)


def _points(networks: dict[str, dict[str, Any]], graph: str, method: str) -> list[tuple[int, float]]:
    found = []
    for name, row in networks.items():
        base, _, devices = name.rpartition("_")
        result = row.get(method, {})
        if base == graph and devices.isdigit() and "cost" in result and (
                result["optimal"] or method.startswith("mcmc")):
            found.append((int(devices), result.get("warm_seconds", result["seconds"])))
    return found


def plot_mcmc(results: dict[str, dict[str, Any]], path: str | os.PathLike) -> None:
    """Cost above the optimum of the best strategy that mcmc has met, over time, from both starts; where `exact` had its
    proof, a mark on the axis."""
    networks = networks_of(results.get("rivals", {}))
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, method in zip(panels, ("mcmc (1)", "mcmc (2)"), strict=True):
        chosen = [name for name, row in networks.items()
                  if row.get(method, {}).get("history") and row.get("exact", {}).get("optimal")
                  and row[method].get("network") == row["exact"].get("network")]
        # The largest network of every graph: a line each.
        largest: dict[str, str] = {}
        for name in sorted(chosen, key=lambda name: int(name.rpartition("_")[2])):
            largest[name.rpartition("_")[0]] = name
        for number, name in enumerate(sorted(largest.values())):
            history, best = networks[name][method]["history"], networks[name]["exact"]["cost"]
            end = networks[name][method]["seconds"]
            times = [max(seconds, 1e-3) for seconds, _ in history] + [max(end, 1e-3)]
            costs = [max(cost / best - 1, 1e-5) for _, cost in history]
            axes.step(times, [*costs, costs[-1]], where="post", color=f"C{number}", label=name)
            axes.plot([networks[name]["exact"].get("warm_seconds", networks[name]["exact"]["seconds"])], [1e-5], "|",
                      color=f"C{number}", markersize=12, markeredgewidth=2)
        axes.set(title=f"{method}: from " + ("data parallelism or each layer's cheapest" if method.endswith("(1)")
                                             else "the expert's strategy or a random one"),
                 xscale="log", yscale="log", xlabel="seconds")
        axes.spines[["top", "right"]].set_visible(False)
    handles = panels[0].get_legend_handles_labels()
    if handles[0]:
        figure.legend(*handles, loc="outside right center", frameon=False, fontsize=8)
    panels[0].set_ylabel("cost above the optimum\n(1e-5: reached; |: exact had proved it)")
    figure.savefig(path)


def plot_memory(results: dict[str, dict[str, Any]], path: str | os.PathLike) -> None:
    """A panel per model, a line per number of devices: the least cost of a step within a memory limit."""
    rows = {name: row for name, row in results.get("memory", {}).items() if "error" not in row}
    models = list(dict.fromkeys(name.rpartition("_")[0] for name in rows))
    figure = Figure(figsize=(5 * max(1, len(models)), 4.2), layout="constrained")
    panels = figure.subplots(1, max(1, len(models)), squeeze=False)[0]
    for axes, model in zip(panels, models, strict=False):
        # The launcher's graphs are priced in seconds, DenseNet by the paper's formulas in FLOP.
        unit, word = (1e9, "GFLOP") if model.startswith("densenet") else (1e-3, "ms")
        for name, row in rows.items():
            base, _, devices = name.rpartition("_")
            if base == model:
                draw_frontier(axes, points_of(row), f"p = {devices}", unit=unit)
        axes.set(title=model, xscale="log", yscale="log", xlabel="memory limit per device (GB)",
                 ylabel=f"predicted {word} a step")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e5e5e5", linewidth=0.6)
        axes.legend(frameon=False)
    figure.savefig(path)
