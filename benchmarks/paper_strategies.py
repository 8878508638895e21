"""Table II of the PaSE paper beside ours: two strategies for 32 devices, priced by the paper's formulas."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks import paper_numbers
from benchmarks.search_densenet import paper_machine
from pase_mtf.cost.build import build_network
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.graph.configurations import Configuration, enumerate_configurations
from pase_mtf.machine.machine import Machine
from pase_mtf.search import solve

__all__ = ["DEVICES", "MACHINE", "WORDS", "compare", "orders"]

DEVICES = 32
MACHINE = "1080ti"
"""In whose seconds, by our own cost model, the strategies are priced as well."""
WORDS = (500.0, 2500.0, 5000.0, 7533.0, 30133.0)
"""FLOP for a word sent, with which both are priced: 2500 is 10 TFLOPS and 16 GB/s, 30133 is 11.3 TFLOPS and 1.5 GB/s (a
GTX 1080 Ti and its share of InfiniBand), 7533 the same with words taken for bytes."""
_AXES = 4
"""Mesh axes that a configuration may have: the paper's LSTM is split in four dims."""

Offered = Sequence[Sequence[Configuration]]


def orders(splits: Sequence[tuple[str, int]], devices: int) -> tuple[Configuration, ...]:
    """Every configuration with these splits: whatever the order of its axes, and with the devices that are left over
    either idle or repeating the work. The paper's table leaves both open.

    Args:
      splits: (dim, parts).
      devices: p, a multiple of the parts of all dims together.
    """
    left = devices // math.prod(parts for _, parts in splits)
    copies = [("", left)] if left > 1 else []
    return tuple(dict.fromkeys(Configuration(axes) for extra in ([], copies)
                               for axes in itertools.permutations([*splits, *extra])))


def compare(model: str, graph: ComputationGraph) -> dict[str, Any]:
    """Our optimum of the paper's formulas beside the paper's strategy, which gets the benefit of every doubt: layers
    that its table does not name take what suits them best, and so do the orders of axes and the idle devices.

    Returns:
      JSON: costs in FLOP ("ours", "theirs", and by part), their ratio at other prices of a word, seconds of our own
      cost model, and per row of the paper's table what ours has there and what it costs to take the paper's instead,
      all the rest as suits it best.
    """
    everything = [enumerate_configurations(layer, DEVICES, idle=True, max_axes=_AXES) for layer in graph.layers]
    rows = paper_numbers.paper_rows(model, graph)
    named = [orders(row.splits, DEVICES) if row.name else () for row in rows]
    theirs = [choices or all_choices for choices, all_choices in zip(named, everything, strict=True)]
    ours = _cheapest(graph, everything)
    paper = _cheapest(graph, theirs)
    result: dict[str, Any] = {
        "optimal": ours["optimal"], "ours": ours["cost"], "theirs": paper["cost"], "ours_parts": ours["parts"],
        "theirs_parts": paper["parts"], "usual": _cheapest(graph, None)["cost"], "rows": []}
    for name in dict.fromkeys(row.name for row in rows if row.name):
        layers = [number for number, row in enumerate(rows) if row.name == name]
        taken = list(everything)
        for number in layers:
            taken[number] = named[number]
        forced = _cheapest(graph, taken)
        result["rows"].append({
            "row": name, "layers": len(layers),
            "same": sum(_splits(ours["chosen"][number]) == dict(rows[number].splits) for number in layers),
            "ours": _grouped((graph.layers[number].name, ours["chosen"][number]) for number in layers),
            "price": forced["cost"] - ours["cost"],
            "parts": {part: cost - ours["parts"][part] for part, cost in forced["parts"].items()}})
    result["ratios"] = {f"{word:g}": _cheapest(graph, theirs, _sending(word))["cost"]
                        / _cheapest(graph, everything, _sending(word))["cost"] for word in WORDS}
    machine = Machine.load(MACHINE)
    chosen = [orders(tuple(_splits(configuration).items()), DEVICES) for configuration in ours["chosen"]]
    unnamed = [choices or other for choices, other in zip(named, chosen, strict=True)]
    result["seconds"] = {name: _cheapest(graph, offered, machine, "seconds")["cost"]
                         for name, offered in (("ours", chosen), ("theirs", unnamed), ("best", None))}
    result["layers"] = {layer.name: [str(mine), str(other), row.name] for layer, mine, other, row in zip(
        graph.layers, ours["chosen"], paper["chosen"], rows, strict=True)}
    return result


def _cheapest(graph: ComputationGraph, offered: Offered | None, machine: Machine | None = None,
              model: str = "pase") -> dict[str, Any]:
    priced = build_network(graph, machine or paper_machine(), DEVICES, offered, model)
    solution = solve(priced.network, certificate=False)
    return {"cost": solution.cost, "optimal": solution.optimal, "parts": priced.breakdown(solution.assignment).parts,
            "chosen": [choices[index] for choices, index in zip(priced.configurations, solution.assignment,
                                                                strict=True)]}


def _sending(word: float) -> Machine:
    """The paper's machine, with that many FLOP for a word."""
    machine = paper_machine()
    return dataclasses.replace(machine, links=tuple(
        dataclasses.replace(link, bandwidth=machine.rates["matmul"] / word) for link in machine.links))


def _splits(configuration: Configuration) -> dict[str, int]:
    return dict(configuration.splits)


def _grouped(layers: Iterable[tuple[str, Configuration]]) -> list[list[Any]]:
    """[splits, layers that have them] by falling number of layers; the order of axes is left out."""
    found: dict[str, list[str]] = collections.defaultdict(list)
    for name, configuration in layers:
        found[" ".join(f"{dim}:{parts}" for dim, parts in sorted(configuration.splits.items())) or "whole"].append(name)
    return sorted(([splits, names] for splits, names in found.items()), key=lambda entry: -len(entry[1]))
