"""Sums of costs beside simulated steps, whole simulations beside those of one changed layer, chains beside the optimum.

    python -m benchmarks.simulator                                   # minutes; writes docs/benchmarks/simulator.md
    python -m benchmarks.simulator --models=alexnet --devices=8      # the other rows stay
"""

from __future__ import annotations

import pathlib
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from tqdm import tqdm

from benchmarks import markdown
from benchmarks.commands import told_in_one_line, whole_numbers
from benchmarks.facts import facts_text, of_rows
from benchmarks.model_rows import ModelRows, flag_parser
from benchmarks.search_document import seconds_text
from benchmarks.search_networks import Workshop
from pase_mtf import models
from pase_mtf.cost.build import PricedNetwork, build_network
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.machine.machine import Machine
from pase_mtf.search import solve
from pase_mtf.simulator.mcmc import search_simulated
from pase_mtf.simulator.simulate import Simulator
from pase_mtf.strategy.experts import data_parallel
from pase_mtf.strategy.simulated import shortest_simulated, worth_simulating
from pase_mtf.strategy.strategy import with_configurations

__all__ = ["DEVICES", "document", "draw_example", "main", "measure", "plot"]

DEVICES = (4, 8, 16, 32)
_PRESET = "big"
_CHANGES, _CHEAPEST, _CHAIN_SECONDS = 200, 10, 10.0
_DRAWN = "alexnet", 4


def _changes(priced: PricedNetwork, assignment: Sequence[int], seed: int) -> dict[str, Any]:
    """Random changes of one layer after the other: seconds of a whole simulation of each, and of what it touches."""
    draw, now = random.Random(seed), list(assignment)
    whole, changing, taken = Simulator(priced), Simulator(priced), ([], [])
    changing.seconds(now)
    equal = True
    for _ in range(_CHANGES):
        layer = draw.randrange(len(now))
        before, now[layer] = now[layer], draw.randrange(len(priced.configurations[layer]))
        # The tasks of what was not met before are made for the first time.
        whole.seconds(now)
        changing.change(layer, now[layer])
        changing.change(layer, before)
        start = time.process_time()
        said = whole.seconds(now)
        middle = time.process_time()
        equal = changing.change(layer, now[layer]) == said and equal
        taken[0].append(middle - start)
        taken[1].append(time.process_time() - middle)
    return {"whole_seconds": statistics.median(taken[0]), "change_seconds": statistics.median(taken[1]), "equal": equal}


def measure(graph: ComputationGraph, machine: Machine, devices: int, time_limit: float, seed: int) -> dict[str, Any]:
    """Everything of one model on so many devices.

    Args:
      graph: of the model.
      machine: with devices of their own.
      devices: p.
      time_limit: seconds for the chain.
      seed: of the random changes, and of the chain.
    """
    priced = build_network(graph, machine, devices)
    priced, parallel = with_configurations(priced, data_parallel(graph, devices))
    simulator = Simulator(priced)
    cheapest = solve(priced.network)
    _, told = shortest_simulated(priced, cheapest, worth_simulating(priced), None)  # as `find_strategy` does
    chain = search_simulated(priced, parallel, time_limit=time_limit, seed=seed)
    return {"devices": devices, "tasks": simulator.tasks(parallel),
            "parallel_sum": priced.network.cost(parallel), "parallel_simulated": simulator.seconds(parallel),
            "sum": cheapest.cost, "simulated": told["cheapest_simulated_seconds"], "found": told["simulated_seconds"],
            "shortest": told.get("shortest_simulated_seconds", told["simulated_seconds"]),
            "judged": told["simulated"], "place": told["simulated_rank"], "chain": chain.seconds,
            "proposals": chain.proposals, "chain_limit": time_limit, **_changes(priced, parallel, seed)}


def _found(row: dict[str, Any]) -> tuple[float, str]:
    """Seconds of the step that the search takes of those it simulates, its place among how many: of a row of an earlier
    version what is known of them, the ten cheapest and data parallelism."""
    if "found" in row:
        return row["found"], f"{row['place']} of {row['judged']}"
    return min((row["shortest"], str(row["place"])), (row["parallel_simulated"], "data parallel"))


def document(results: dict[str, Any]) -> str:
    """The page."""
    rows = results["rows"]
    faster = [row["whole_seconds"] / row["change_seconds"] for row in rows]
    # What is returned may be longer than the shortest by a thousandth (`shortest_simulated`).
    least = [min(_found(row)[0], row.get("shortest", _found(row)[0])) for row in rows]
    ahead = [(row, row["chain"] / found) for row, found in zip(rows, least, strict=True)
             if row["chain"] < found * (1 - 1e-9)]
    limits, earlier = sorted({row["chain_limit"] for row in rows}), sum("found" not in row for row in rows)
    commands = (f"python -m benchmarks.simulator{'' if limit == _CHAIN_SECONDS else f' --seconds={limit:g}'}"
                for limit in limits)
    return "\n\n".join([
        "# The simulator",
        f"{facts_text(of_rows(results['rows'], results.get('facts')))}; priced for {results['machine']}. Reproduce "
        f"with `{'` or `'.join(commands)}`.",
        f"Preset {_PRESET} of every model, with its own batch. Milliseconds of a step. *sum*: what the exact search "
        "minimises. *found*: of the cheapest by that sum (ten, or fewer of a large network), data parallelism, and "
        "what is cheapest where a part of the gradients' all-reduces is hidden, the shortest simulated step, or of "
        "those that are longer by a thousandth at most the cheapest by the sum: what `find_strategy` returns, and "
        "its place among these by the sum"
        + (f" (of {earlier} rows, of an earlier version, the shortest of the ten cheapest and data parallelism alone)"
           if earlier else "")
        + ". *chain*: FlexFlow's search on simulated time from data parallelism on, "
        f"{' or '.join(f'{limit:g}' for limit in limits)} s each.",
        f"The chain found a step shorter than all of these in {len(ahead)} of {len(rows)} rows"
        + (": " + ", ".join(f"{row['model']} on {row['devices']} ({ratio:.3f})" for row, ratio in ahead)
           if ahead else "") + ".",
        markdown.table(
            ["model", "devices", "data parallel: sum", "simulated", "optimum: sum", "simulated", "found", "place",
             "chain", "proposals"],
            [[row["model"], str(row["devices"]),
              *(f"{1e3 * row[name]:.3f}" for name in ("parallel_sum", "parallel_simulated", "sum", "simulated")),
              f"{1e3 * _found(row)[0]:.3f}", _found(row)[1],
              f"{1e3 * row['chain']:.3f}", str(row["proposals"])] for row in rows]),
        f"![What each device does when, {_DRAWN[0]} on {_DRAWN[1]} devices](simulator.svg)",
        "## Simulating what changed",
        f"One simulation of a step, seconds of the processor, median of {_CHANGES} random changes of one layer: all of "
        "it, and what the change touches. Equal to the last digit: "
        f"{sum(row['equal'] for row in rows)} of {len(rows)}. {min(faster):.1f} to {max(faster):.1f} times as fast "
        "(FlexFlow reports 2.2 to 6.9).",
        markdown.table(
            ["model", "devices", "tasks", "whole", "change", "times as fast"],
            [[row["model"], str(row["devices"]), str(row["tasks"]), seconds_text(row["whole_seconds"]),
              seconds_text(row["change_seconds"]), f"{row['whole_seconds'] / row['change_seconds']:.1f}"]
             for row in rows])]) + "\n"


def plot(priced: PricedNetwork, arms: dict[str, Sequence[int]], path: pathlib.Path) -> None:
    """Draws what each device does when, an arm below the other, on one axis of time.

    Args:
      priced: of what is drawn.
      arms: title -> the index of every layer's configuration.
      path: of the picture.
    """
    figure = Figure(figsize=(11, 3.2 * len(arms)), layout="constrained")
    simulator, panels = Simulator(priced), figure.subplots(len(arms), sharex=True, squeeze=False)[:, 0]
    for axes, (title, assignment) in zip(panels, arms.items(), strict=True):
        timeline = simulator.timeline(assignment, title)
        timeline.draw(axes)
        axes.set_title(f"{title}: {1e3 * timeline.seconds:.1f} ms")
        axes.label_outer()
        if axes is not panels[-1]:
            axes.get_legend().remove()
    figure.savefig(path)


def draw_example(graph: ComputationGraph, machine: Machine, path: pathlib.Path) -> None:
    """The picture of the page: data parallelism and the shortest simulated step, on four devices."""
    priced = build_network(graph, machine, _DRAWN[1])
    priced, parallel = with_configurations(priced, data_parallel(graph, _DRAWN[1]))
    found, _ = shortest_simulated(priced, solve(priced.network), _CHEAPEST, None)
    plot(priced, {"data parallel": parallel, "search": found.assignment}, path)


@told_in_one_line(RuntimeError, OSError, ValueError)
def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes; returns 1 where a change was not simulated like all of a step, 2 on a flag that is wrong."""
    parser = flag_parser(__doc__.splitlines()[0], DEVICES, "1080ti")
    parser.add_argument("--seconds", type=float, default=_CHAIN_SECONDS, help="of each chain (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of random numbers (default: %(default)s)")
    flags = parser.parse_args(arguments)
    output = pathlib.Path(flags.output)
    machine, workshop = Machine.load(flags.machine), Workshop(flags.work)
    numbers = whole_numbers("devices", flags.devices)
    results = ModelRows(output / "simulator", machine.name, document)
    for name in tqdm(flags.models.split(","), file=sys.stderr):
        graph = ComputationGraph.load(workshop.graph(name, _PRESET, models.load_config(name, _PRESET).batch))
        for number in numbers:
            row = measure(graph, machine, number, flags.seconds, flags.seed)
            results.rows[name, number] = {"model": name, **row}
        # After every model: what was measured stays where the next one is interrupted.
        results.write()
        if name == _DRAWN[0]:
            draw_example(graph, machine, output / "simulator.svg")
    return int(not all(row["equal"] for row in results.rows.values()))


if __name__ == "__main__":
    sys.exit(main())
