"""What any number of devices costs: building the network and searching it, beside the next power of two.

    python -m benchmarks.search_devices                        # minutes; writes docs/benchmarks/search_devices.md
    python -m benchmarks.search_devices --models=alexnet,gnmt --devices=96   # the other rows stay

A row that had to compile something first shows it: with `--rounds=3`, the default, medians do not.
"""

from __future__ import annotations

import gc
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from benchmarks import markdown
from benchmarks.commands import told_in_one_line, whole_numbers
from benchmarks.facts import facts_text, of_rows
from benchmarks.model_rows import ModelRows, flag_parser
from benchmarks.search_document import seconds_text
from benchmarks.search_networks import Workshop
from pase_mtf import models
from pase_mtf.cost.build import build_network
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.machine.machine import Machine
from pase_mtf.search import solve

__all__ = ["DEVICES", "document", "main", "measure", "next_power"]

DEVICES = (6, 12, 24, 48, 96, 144, 1000, 1024)
"""The numbers of devices that are compared with the next power of two; each power of two is measured, too."""
_PRESET = "big"
_LIMIT = 60.0


def next_power(devices: int) -> int:
    """The least power of two that is no smaller."""
    return 1 << (devices - 1).bit_length()


def measure(path: str, machine: Machine, devices: int, rounds: int) -> dict[str, Any]:
    """Builds and searches one network a few times: medians, in seconds of the processor.

    Args:
      path: of the graph.
      machine: whose numbers count.
      devices: p.
      rounds: how many times; each reads the graph anew, so that nothing is known of its layers.
    """
    built, searched, optimal = [], [], True
    for _ in range(rounds):
        graph = ComputationGraph.load(path)
        gc.collect()  # else whoever comes next pays for what the last one left
        start = time.process_time()
        network = build_network(graph, machine, devices).network
        middle = time.process_time()
        solution = solve(network, certificate=False, time_limit=_LIMIT)
        searched.append(time.process_time() - middle)
        built.append(middle - start)
        optimal = optimal and solution.optimal
    return {"devices": devices, "build_seconds": statistics.median(built),
            "search_seconds": statistics.median(searched), "optimal": optimal, "layers": len(network.vectors),
            "configurations": max(network.sizes)}


def _ratios(rows: Sequence[dict[str, Any]], what: str) -> dict[tuple[str, int], float]:
    """(model, devices) -> how many times as long as for the next power of two, where that was measured, too."""
    known = {(row["model"], row["devices"]): row[what] for row in rows}
    return {(model, devices): seconds / known[model, next_power(devices)] for (model, devices), seconds in known.items()
            if devices != next_power(devices) and (model, next_power(devices)) in known}


def _table(rows: Sequence[dict[str, Any]], what: str) -> str:
    """Seconds per model and number of devices; beside them how many times those of the next power of two they are.
    Empty where a model was not measured on so many."""
    known = {(row["model"], row["devices"]): row for row in rows}
    numbers, ratios = sorted({devices for _, devices in known}), _ratios(rows, what)

    def cell(name: str, number: int) -> str:
        if (name, number) not in known:
            return ""
        beside = f" ({ratios[name, number]:.2f})" if (name, number) in ratios else ""
        missed = ", not proven" if what == "search_seconds" and not known[name, number]["optimal"] else ""
        return seconds_text(known[name, number][what]) + beside + missed
    return markdown.table(["model", *map(str, numbers)],
                          [[name, *(cell(name, number) for number in numbers)]
                           for name in dict.fromkeys(row["model"] for row in rows)])


def document(results: dict[str, Any]) -> str:
    """The page."""
    rows = results["rows"]
    ratios = _ratios(rows, "build_seconds")
    most = "".join(f"\n\nThe most: {largest:.2f} times as long as for the next power of two ({model} on {devices})."
                   for (model, devices), largest in sorted(ratios.items(), key=lambda item: -item[1])[:1])
    return "\n\n".join([
        "# Any number of devices",
        f"{facts_text(of_rows(results['rows'], results.get('facts')))}; priced for {results['machine']}. Reproduce "
        "with `python -m benchmarks.search_devices`.",
        f"Preset {_PRESET} of every model, with its own batch. Seconds of the processor, median of "
        f"{' or '.join(map(str, sorted({row['rounds'] for row in rows})))}, from the graph in memory. In parentheses: "
        "how many times as long as for the next power of two.",
        f"## Building the network{most}", _table(rows, "build_seconds"),
        f"## Searching it\n\n{sum(row['optimal'] for row in rows)} of {len(rows)} optima are proven.",
        _table(rows, "search_seconds")]) + "\n"


@told_in_one_line(RuntimeError, OSError, ValueError)
def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes; returns 1 where an optimum was not proven, 2 where a flag makes no sense."""
    parser = flag_parser(__doc__.splitlines()[0], DEVICES, "h100")
    parser.add_argument("--rounds", type=int, default=3, help="of each (default: %(default)s)")
    flags = parser.parse_args(arguments)
    output = pathlib.Path(flags.output)
    machine, workshop = Machine.load(flags.machine), Workshop(flags.work)
    wanted = set(whole_numbers("devices", flags.devices))
    numbers = sorted(wanted | {next_power(number) for number in wanted})
    results = ModelRows(output / "search_devices", machine.name, document)
    paths = {name: workshop.graph(name, _PRESET, models.load_config(name, _PRESET).batch)
             for name in flags.models.split(",")}
    measure(next(iter(paths.values())), machine, numbers[0], 1)  # loads, or makes, the compiled code
    for name, number in tqdm([(name, number) for name in paths for number in numbers], file=sys.stderr):
        results.rows[name, number] = {"model": name, "rounds": max(1, flags.rounds),
                                      **measure(paths[name], machine, number, max(1, flags.rounds))}
        results.write()  # what was measured stays where the next one is interrupted
    return int(not all(row["optimal"] for row in results.rows.values()))


if __name__ == "__main__":
    sys.exit(main())
