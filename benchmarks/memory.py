"""Predicted memory of a device beside what TensorFlow's allocator reports, for many strategies of every model.

    python -m benchmarks.memory                      # some 15 minutes of a core; rows are kept
    python -m benchmarks.memory --models=rnnlm --devices=4,6 --random=7,8

Every strategy is lowered for virtual devices of one process and trained for some traced steps with made-up examples.
The allocator's records tell what a device held at most (`launch.arms.memory`), in the fullest of these steps, on the
fullest device. Writes docs/benchmarks/memory.json and memory.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from benchmarks import markdown
from benchmarks.commands import told_in_one_line, whole_numbers
from benchmarks.facts import facts_text, of_rows
from benchmarks.model_rows import ModelRows, flag_parser
from pase_mtf import models
from pase_mtf.calibration.load import load_machine
from pase_mtf.compat import tf
from pase_mtf.errors import InfeasibleError
from pase_mtf.export.exporter import export_graph
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.graph.configurations import Configuration
from pase_mtf.launch.arms.memory import peak_bytes_per_device, variable_bytes_per_device
from pase_mtf.launch.arms.program import Program, build_program
from pase_mtf.launch.data.synthetic import synthetic_source
from pase_mtf.launch.strategies.finding import random_configurations
from pase_mtf.lowering.lowering import lower
from pase_mtf.machine.machine import LOCAL, Machine
from pase_mtf.models.blocks import ALL
from pase_mtf.runtime import Devices, session_config, unfolding_threads
from pase_mtf.strategy.experts import data_parallel, expert, zero
from pase_mtf.strategy.find import find_strategy
from pase_mtf.strategy.strategy import Strategy, evaluate_strategy

__all__ = ["STEPS", "Measured", "Way", "document", "main", "measure", "on_this_host", "strategies"]

STEPS = 3
"""Traced steps of every strategy."""
_DEVICES = (4,)
_FRACTIONS = 4
_SECONDS = 2.0
"""Of the search of a point."""
_ELSEWHERE = ": predicted times are those of another machine than the one that was measured on"
_PIECES = 4
"""Into so many microbatches a batch is cut."""
_BY_HAND = {"data_parallel": data_parallel, "expert": expert}


def on_this_host(name: str, devices: int) -> Machine:
    """The machine that a name stands for, its devices in one process: they share their memory, and what kernels of this
    processor take is taken."""
    return dataclasses.replace(load_machine(name, devices), shared_cores=True,
                               unfolding_threads=unfolding_threads(devices))


@dataclasses.dataclass(frozen=True)
class Way:
    """How a model's step is computed.

    Attributes:
      recompute: the blocks that are computed again in the backward pass.
      microbatches: in how many pieces the batch is computed, one after the other.
    """

    recompute: tuple[str, ...] = ()
    microbatches: int = 1

    def program(self, model: str) -> Program:
        """The training step of a model's smallest preset, in the current tf.Graph."""
        config = models.load_config(model, "tiny")
        return build_program(models.get(model), config, config.batch, config.optimizer, config.learning_rate, 0,
                             self.microbatches, self.recompute)

    def exported(self, model: str, sharded_updates: bool = False) -> ComputationGraph:
        """The step as the search takes it."""
        with tf.Graph().as_default():
            return export_graph(self.program(model).graph, name=model, sharded_updates=sharded_updates)


_PLAIN = Way()


def strategies(model: str, devices: int, machine: Machine, seeds: Sequence[int]) -> dict[str, Strategy]:
    """What is measured of a model: what the search finds, what people write by hand, and random strategies.

    Args:
      model: of the registry; its smallest preset.
      devices: virtual CPUs.
      machine: whose prices the search takes.
      seeds: of the random strategies.

    Returns:
      Name -> strategy. Without those by hand that need a batch that splits over so many devices.
    """
    graph, found = _PLAIN.exported(model), {}
    found["search"] = find_strategy(graph, devices, machine)
    drawn: dict[str, tuple[Configuration, ...]] = {
        f"random {seed}": random_configurations(graph, devices, seed, seed) for seed in seeds}
    for name, write in _BY_HAND.items():
        try:
            drawn[name] = write(graph, devices)
        except InfeasibleError:
            continue
    found |= {name: evaluate_strategy(graph, chosen, devices, machine) for name, chosen in drawn.items()}
    if "data_parallel" in drawn:
        sharded = _PLAIN.exported(model, sharded_updates=True)
        found["zero"] = evaluate_strategy(sharded, zero(sharded, devices), devices, machine)
    return found


class Measured(NamedTuple):
    """What a training takes.

    Attributes:
      nbytes: on the fullest device in the fullest of some traced steps.
      least: in that of these steps in which it is least.
      seconds: of a step, the median of as many that are not traced.
    """

    nbytes: int
    least: int
    seconds: float


def measure(model: str, strategy: Strategy, way: Way = _PLAIN, *, steps: int = STEPS) -> Measured:
    """Trains a strategy on virtual devices.

    Args:
      model: that it is for.
      strategy: of its smallest preset.
      way: how its step is computed.
      steps: as many are traced, and as many are not.
    """
    devices, config = Devices.first(strategy.devices, "cpu"), models.load_config(model, "tiny")
    examples = synthetic_source(models.get(model).data_kind, config, 0).load(np.arange(config.batch))
    with tf.Graph().as_default() as made:
        program = way.program(model)
        lowering = lower(program.graph, strategy, list(devices.names))
        loss = lowering.export_to_tf_tensor(program.loss)
        with tf.control_dependencies([loss, *map(lowering.lowered_operation, program.updates)]):
            step = tf.assign_add(program.global_step, 1).op
        fill, initialize = lowering.copy_masters_to_slices(), tf.global_variables_initializer()
        held = variable_bytes_per_device(made, [step])
        peaks, seconds = [], []
        with tf.Session(config=session_config(devices)) as session:
            session.run(initialize)
            session.run(fill)
            for number in range(1, 2 * steps + 2):  # the first one, too: slices part with their masters there
                feed = {placeholder: number if name == "step" else examples[name]
                        for name, placeholder in program.placeholders.items()}
                start = time.perf_counter()
                if number <= steps:
                    metadata = tf.RunMetadata()
                    session.run([loss, step], feed, tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), metadata)
                    peaks.append(max(peak_bytes_per_device(metadata, held).values()))
                else:
                    session.run([loss, step], feed)
                    seconds.append(time.perf_counter() - start)
    return Measured(max(peaks), min(peaks), statistics.median(seconds[1:]))


def _row(model: str, devices: int, machine: Machine, seeds: Sequence[int], points: int) -> dict[str, Any]:
    chosen_by = strategies(model, devices, machine, seeds)
    known: dict[tuple[Configuration, ...], dict[str, float]] = {}

    def measured(strategy: Strategy, way: Way = _PLAIN) -> dict[str, float]:
        found = measure(model, strategy, way)
        return {"predicted": strategy.memory_bytes, "measured": found.nbytes, "least": found.least,
                "predicted_seconds": strategy.seconds, "measured_seconds": found.seconds}

    arms = {name: measured(strategy) for name, strategy in chosen_by.items()}
    graph, best, frontier = _PLAIN.exported(model), chosen_by["search"], []
    known[best.configurations] = arms["search"]
    for point in best.memory_frontier(points) if points else ():
        chosen = find_strategy(graph, devices, machine, memory_limit=point.memory_limit, time_limit=_SECONDS)
        if chosen.configurations not in known:
            known[chosen.configurations] = measured(chosen)
        frontier.append({"limit": point.memory_limit, **known[chosen.configurations]})
    kept: dict[str, Any] = {"model": model, "devices": devices, "arms": arms, "frontier": frontier}
    for name, way in _WAYS.items():
        if way.microbatches == 1 or not models.get(model).batch_statistics:
            kept[name] = _instead(model, devices, machine, way, arms, measured)
    return kept


_WAYS = {"again": Way(recompute=(ALL,)), "pieces": Way(microbatches=_PIECES)}
"""What saves memory by the way in which a step is computed, by its place in a row."""


def _instead(model: str, devices: int, machine: Machine, way: Way, arms: Mapping[str, dict[str, float]],
             measured: Callable[[Strategy, Way], dict[str, float]]) -> dict[str, list[dict[str, float]]]:
    """The fastest strategy without a limit, and data parallelism: as they are, and with the step computed in this
    way."""
    graph = way.exported(model)
    found = {"search": [arms["search"], measured(find_strategy(graph, devices, machine), way)]}
    if "data_parallel" in arms:
        with contextlib.suppress(InfeasibleError):  # a microbatch need not split over so many devices
            by_hand = evaluate_strategy(graph, data_parallel(graph, devices), devices, machine)
            found["data_parallel"] = [arms["data_parallel"], measured(by_hand, way)]
    return found


def document(results: Mapping[str, Any]) -> str:
    """The page of the results."""
    rows = results["rows"]
    ratios = [arm["predicted"] / arm["measured"] for row in rows for arm in row["arms"].values()]
    within = sum(1.0 <= ratio <= 1.1 for ratio in ratios)
    table = [[row["model"], str(row["devices"]), name,
              *(f"{arm[key] / 1e6:.2f}" for key in ("predicted", "least", "measured")),
              f"{arm['predicted'] / arm['measured']:.2f}"] for row in rows for name, arm in row["arms"].items()]
    bought = [[row["model"], str(row["devices"]), f"{point['limit'] / 1e6:.2f}", f"{point['predicted'] / 1e6:.2f}",
               f"{point['measured'] / 1e6:.2f}", f"{1e3 * point['predicted_seconds']:.2f}",
               f"{1e3 * point['measured_seconds']:.0f}"] for row in rows for point in _points(row["frontier"])]
    return "\n\n".join([
        "# Memory, predicted and measured",
        "Preset `tiny` of every model, virtual devices of one process. Measured: what TensorFlow's allocator says that "
        f"the fullest device held at most, its slices of the variables included, in the fullest of {STEPS} traced "
        "steps, and in the one in which that was least: TensorFlow runs what is ready in whatever order its threads "
        "come to it, and one device may be ahead of the others, or hold what was made once for several of them. "
        f"Predicted over measured: {min(ratios):.2f} to {max(ratios):.2f}, median {statistics.median(ratios):.2f}; of "
        f"the {len(ratios)} strategies of the first table {sum(ratio >= 1.0 for ratio in ratios)} held no more than "
        f"predicted, {within} of them with no more than a tenth to spare; "
        f"{sum(ratio >= 1 / 1.05 for ratio in ratios)} held at most 5 % more. {_others(rows)}",
        markdown.table(["model", "devices", "strategy", "predicted, MB", "measured least, MB", "measured, MB", "ratio"],
                       table, left=(0, 2)),
        "## What memory buys",
        f"The fastest strategies that are found in {_SECONDS:g} s of search each, proven or not, within limits between "
        f"the lightest and what the fastest needs, priced for machine "
        f"{results['machine']} with devices that share their cores"
        f"{_ELSEWHERE * (results['machine'] != LOCAL)}. Measured ones are medians of a few steps, on a machine that "
        "others use, too: rough. A strategy stands once, with the least of the limits within which it is found; where "
        "one stands alone the fastest is the lightest as well: devices that share cores pay for every copy.",
        markdown.table(["model", "devices", "limit, MB", "predicted, MB", "measured, MB", "predicted step, ms",
                        "measured step, ms"], bought, left=(0,)),
        "## Blocks computed again",
        "The fastest strategy without a limit on memory, and data parallelism: with all activations kept -> with every "
        "block of the model computed again in the backward pass (`--recompute=all`). Times as above.",
        _pairs({(row["model"], row["devices"], name): pair for row in rows for name, pair in row["again"].items()}),
        "## Microbatches",
        f"The same two: the batch at once -> in {_PIECES} pieces, whose gradients are added up "
        f"(`--microbatches={_PIECES}`). What is added up lies there for the whole step: where weights take more than "
        "activations, this costs memory. Models that normalise over the batch have no such pieces. Times as above.",
        _pairs({(row["model"], row["devices"], name): pair for row in rows
                for name, pair in row.get("pieces", {}).items()}),
        "## Updates in parts",
        "Data parallelism in which every device updates all weights -> `zero`: every device updates a part of them, "
        "and keeps the optimizer's slots of that part (`--sharded_updates`). What is saved is as large as the slots; a "
        "model without any holds the parts of its new weights besides. Times as above.",
        _pairs({(row["model"], row["devices"], "data_parallel -> zero"): [
            row["arms"][name] for name in ("data_parallel", "zero")] for row in rows if "zero" in row["arms"]}),
        f"{facts_text(of_rows(results['rows'], results.get('facts')))}. Reproduce with "
        "`python -m benchmarks.memory`.",
        ""])


def _points(frontier: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """One of each strategy, that of the least limit."""
    return [point for before, point in itertools.pairwise([{}, *frontier])
            if any(point[key] != before.get(key) for key in point if key != "limit")]


def _others(rows: Sequence[Mapping[str, Any]]) -> str:
    """How what stands in the other tables keeps to its prediction."""
    known = [arm for row in rows for arm in row["arms"].values()]
    others: list[tuple[str, Mapping[str, float]]] = []  # who it is, what was measured
    for row in rows:
        for name, entry in [*((f"within {point['limit'] / 1e6:.2f} MB", point) for point in row["frontier"]),
                            *((f"{name}, computed again", pair[1]) for name, pair in row["again"].items()),
                            *((f"{name}, microbatches", pair[1]) for name, pair in row.get("pieces", {}).items())]:
            entry = {key: entry[key] for key in ("predicted", "measured")}
            if not any(entry.items() <= other.items() for other in (*known, *(other for _, other in others))):
                others.append((f"{row['model']}, {row['devices']} devices, {name}", entry))
    above = [f"{who} ({100 * (entry['measured'] / entry['predicted'] - 1):.1f} % more)" for who, entry in others
             if entry["measured"] > entry["predicted"]]
    return (f"Of the {len(others)} others in the tables below {len(others) - len(above)} held no more"
            f"{'; ' if above else ''}{', '.join(above)}{' did not' if above else ''}.")


def _pairs(found: Mapping[tuple[str, int, str], Sequence[Mapping[str, float]]]) -> str:
    """A table of (model, devices, strategy) -> what was measured before and after."""
    def both(pair: Sequence[Mapping[str, float]], key: str, unit: float, digits: int) -> str:
        return " -> ".join(f"{entry[key] / unit:.{digits}f}" for entry in pair)

    return markdown.table(
        ["model", "devices", "strategy", "predicted, MB", "measured, MB", "predicted step, ms", "measured step, ms"],
        [[model, str(devices), name, both(pair, "predicted", 1e6, 2), both(pair, "measured", 1e6, 2),
          both(pair, "predicted_seconds", 1e-3, 2), both(pair, "measured_seconds", 1e-3, 0)]
         for (model, devices, name), pair in found.items()], left=(0, 2))


@told_in_one_line()
def main(arguments: Sequence[str] | None = None) -> int:
    """Measures every model."""
    parser = flag_parser(__doc__.splitlines()[0], _DEVICES, LOCAL)
    parser.add_argument("--random", default="1", help="seeds of random strategies (default: %(default)s)")
    parser.add_argument("--points", type=int, default=_FRACTIONS, help="of the frontier (default: %(default)s)")
    flags = parser.parse_args(arguments)
    results = ModelRows(pathlib.Path(flags.output) / "memory", flags.machine, document)
    seeds = whole_numbers("random", flags.random) if flags.random else []
    for devices in whole_numbers("devices", flags.devices):
        machine = on_this_host(flags.machine, devices)
        for model in tqdm(flags.models.split(","), unit="model", desc=f"{devices} devices"):
            results.rows[model, devices] = _row(model, devices, machine, seeds, flags.points)
            results.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
