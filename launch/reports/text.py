"""What a run tells people on the console: its header, its search, the table at its end."""

from __future__ import annotations

import importlib.metadata
import itertools
import math
import os
import platform
from collections.abc import Mapping, Sequence

from tabulate import tabulate

from pase_mtf.amounts import bytes_text, gap_text
from pase_mtf.calibration.cache import PROCESSES
from pase_mtf.compat import tf
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.launch.arms.chosen import Chosen
from pase_mtf.launch.data import Data
from pase_mtf.launch.flag_values import ArmName, is_called
from pase_mtf.launch.plan import Plan
from pase_mtf.launch.possible import why_left_out
from pase_mtf.launch.summary import ArmRow
from pase_mtf.machine.machine import Machine
from pase_mtf.pipeline.pipeline import Pipeline, distance_text
from pase_mtf.strategy.devices import above_text, devices_text, is_below_bound
from pase_mtf.strategy.judged_text import judged_text, trial_text
from pase_mtf.strategy.kernels_text import kernels_text
from pase_mtf.strategy.strategy import Strategy

__all__ = ["describe_run", "elsewhere_note", "final_table", "headline", "orders_note", "search_summary"]


def describe_run(plan: Plan, data: Data, machine: Machine, graph: ComputationGraph,
                 arms: Sequence[ArmName]) -> dict[str, str]:
    """The header of a run: what it runs, on what, under which arms, and where its numbers come from."""
    options = plan.options
    rate = "its own schedule" if options.learning_rate is None else f"{options.learning_rate:g}"
    in_pieces = f" in {plan.microbatches} microbatches" if plan.microbatches > 1 else ""
    between_processes = PROCESSES in machine.measured.get("on", {})
    facts = {
        "versions": f"pase_mtf {_version('pase_mtf')}, TensorFlow {tf.__version__}, Mesh-TensorFlow "
                    f"{_version('mesh-tensorflow')}, Python {platform.python_version()}",
        "devices": str(plan.devices),
        "machine": f"{machine.name}: {machine.source}" + (
            "; NOT the devices of this run" if plan.elsewhere else
            "; measured in one process: what moves between processes takes longer than predicted, and more memory"
            if len(plan.devices.tasks) > 1 and not between_processes else ""),
        "model": f"{options.model}, preset {options.preset}, {graph.parameters:,} parameters, "
                 f"{graph.flops / 1e9:.2f} GFLOP a step",
        "training": f"batch {options.batch}{in_pieces}, {options.optimizer}, learning rate {rate}, {options.dtype}, "
                    f"seed {options.seed}, {options.warmup} warm-up + {options.steps} steps",
        "data": data.describe(),
        "arms": ", ".join(arm.name for arm in arms if not why_left_out(arm, options, plan.config)),
        "output": os.path.abspath(options.output_dir),
    }
    if plan.recomputed:
        facts["computed again"] = f"in the backward pass: {', '.join(plan.recomputed)}"
    if options.uneven:
        facts["data parallelism"] = options.uneven
    for arm in arms:
        if arm.method == "expert" and arm.argument:
            idle = plan.devices.count - int(arm.argument)
            facts["expert"] = (
                f"has no strategy for {plan.devices.count} devices: over {arm.argument} of them, {idle} idle" if idle
                else f"has no strategy on the axes of --mesh={options.mesh}: on a mesh of its own over all devices")
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
    if found.get("simpler") and "shortest_simulated_seconds" in found:
        proof = f"data parallelism{_over(strategy)}: as good, as far as simulated steps tell, and simpler"
    elif found.get("simpler"):
        above = f"predicted {gap_text(found['gap'])}" if found["gap"] > 0 else "predicted to be optimal"
        if is_below_bound(found, strategy.seconds):
            above = above_text(found, strategy.seconds)
        proof = f"data parallelism{_over(strategy)}, {above}: as good, as far as predictions tell, and simpler"
    elif found.get("optimal"):
        proof = f"optimal (proven{', by the kernels that were timed' * bool(found.get('kernels'))})"
    elif found.get("gap") is not None:
        proof = above_text(found, strategy.seconds)
    else:
        proof = "no bound"
    useful = devices_text(strategy.devices, found.get("useful_devices", strategy.devices),
                          found.get("suggested_devices"))
    proof += f"; {useful}" if useful else ""
    if judged := judged_text(found):
        proof += f"\nsteps: {judged}"
    if kernels := kernels_text(found):
        proof += f"\nprices: {kernels}"
    if trial := trial_text(found):
        proof += f"\ntrial: {trial}"
    parts = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in strategy.parts.items())
    return (f"search: {len(graph.layers)} layers, {len(graph.edges)} edges, {found.get('configurations', 0)} "
            f"configurations, {found.get('seconds', 0.0):.2f} s, {proof}\n"
            f"predicted step: {1e3 * strategy.seconds:.2f} ms ({parts})")


def _over(strategy: Strategy) -> str:
    """Over how many devices a strategy is, where the others idle."""
    used = max((configuration.devices for configuration in strategy.configurations), default=strategy.devices)
    return f" over {used} devices" if used < strategy.devices else ""


def final_table(rows: Mapping[str, ArmRow]) -> str:
    """The table a run ends with."""
    simulated = any(row.get("simulated_ms") is not None for row in rows.values())
    head = ["arm", "predicted ms", *(["simulated ms"] if simulated else []), "measured ms", "examples/s", "over stock",
            "over data par.", "predicted memory", "measured memory"]
    lines = []
    for name, row in rows.items():
        spread = f" ± {row['measured_ms_spread']:.1f}" if row["measured_ms"] is not None else ""
        lines.append([
            f"{name} (= {row['same_as']})" if row["same_as"] else name, number(row["predicted_ms"], ".1f"),
            *([number(row.get("simulated_ms"), ".1f")] if simulated else []),
            number(row["measured_ms"], ".1f") + spread, number(row["examples_per_second"], ".1f"),
            number(row["speedup_over_stock"], ".2f", "×"), number(row["speedup_over_data_parallel"], ".2f", "×"),
            size(row["predicted_bytes"]), size(row["measured_bytes"])])
    return tabulate(lines, head, disable_numparse=True, colalign=("left", *["right"] * (len(head) - 1)))


def elsewhere_note(plan: Plan, machine: Machine) -> str:
    """That predicted times are of other devices than measured ones; empty where they are of the same."""
    return (f"predicted for {plan.devices.count} devices of {machine.name}, measured on {plan.devices}: predicted and "
            "measured times do not compare" if plan.elsewhere else "")


def orders_note(rows: Mapping[str, ArmRow]) -> str:
    """Which arms simulated steps order otherwise than sums of costs do; empty where none.

    Args:
      rows: the numbers of every arm.
    """
    known = {name: (row["predicted_ms"], simulated) for name, row in rows.items()
             if row["predicted_ms"] is not None and (simulated := row.get("simulated_ms")) is not None
             and row.get("stages") is None}  # of a pipeline no sum is known
    said = [f"{one} before {other} by the sum of costs ({known[one][0]:.2f}, {known[other][0]:.2f} ms), after it by "
            f"simulated steps ({known[one][1]:.2f}, {known[other][1]:.2f} ms)"
            for one, other in itertools.permutations(known, 2)
            if known[one][0] < known[other][0] and known[one][1] > known[other][1]]
    return "; ".join(said)


def number(value: float | None, form: str, unit: str = "") -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else f"{value:{form}}{unit}"


def size(value: float | None) -> str:
    """Bytes for people, or a dash."""
    return "-" if value is None else bytes_text(value)


def _predicted_ratio(other: ArmRow, row: ArmRow) -> float | None:
    """How many times as long the step of another arm is predicted to take: by simulated steps where there are any, for
    no sum of costs is known of a pipeline; None where nothing is known of both."""
    pairs = ((other.get("simulated_ms"), row.get("simulated_ms")), (other["predicted_ms"], row["predicted_ms"]))
    return next((theirs / mine for theirs, mine in pairs if theirs and mine), None)


def headline(rows: Mapping[str, ArmRow], chosen: Chosen, elsewhere: bool = False) -> str:
    """What a run found, in one line: how much faster than data parallelism, whether proven, how well predicted.

    Args:
      rows: the numbers of every arm; the first is that of the strategy.
      chosen: the strategy of the first arm, or its pipeline.
      elsewhere: whether predicted times are of other devices than measured ones.
    """
    row = next(iter(rows.values()))
    called = next((name for name in rows if is_called(name, "data_parallel")), "data_parallel")
    # Where the batch does not split over all devices the name says over how many it does, while the others idle.
    over = called.removeprefix("data_parallel").replace("_", " over ")
    parallel, base, said = rows.get(called), "data parallelism" + (f"{over} devices" if over else ""), []
    if row["speedup_over_data_parallel"] is not None:
        said.append(f"{row['speedup_over_data_parallel']:.2f}× {base}, measured")
    elif parallel is not None and (ratio := _predicted_ratio(parallel, row)) is not None:
        said.append(f"{ratio:.2f}× {base}, predicted")
    if isinstance(chosen, Pipeline):
        if chosen.search["pairs"]:
            simulated = f"{chosen.search['simulated']} pipelines simulated"
            said.append(f"{simulated}{distance_text(chosen.search)}" if chosen.search.get("gap", 0.0) > 0.0
                        else f"the shortest step of {simulated}")
    elif chosen.search.get("optimal"):
        judged = chosen.search.get("simulated")
        best = "within a thousandth of " * ("shortest_simulated_seconds" in chosen.search) + "the best"
        said.append("proven optimal" + " by the kernels that were timed" * bool(chosen.search.get("kernels"))
                    + f" by the sum of costs, of {judged} simulated steps {best}" * bool(judged))
    elif chosen.search.get("simulated"):
        shortest = f"the shortest simulated step of {chosen.search['simulated']}"
        # Of steps that are as good the simpler or the cheaper one was taken.
        own = chosen.search.get("simulated_seconds", 0.0)
        least = chosen.search.get("shortest_simulated_seconds", 0.0)
        said.append(gap_text(own / least - 1.0, shortest) if 0.0 < least < own else shortest)
    elif chosen.search.get("gap") is not None and math.isfinite(chosen.search["gap"]):
        said.append(above_text(chosen.search, 1e-3 * (row["predicted_ms"] or math.inf)))
    predicted = row.get("simulated_ms") or row["predicted_ms"]  # where steps are simulated, these judge
    if row["measured_ms"] and predicted and not elsewhere:
        off = 100 * abs(predicted / row["measured_ms"] - 1)
        said.append(f"predicted within {math.ceil(off - 1e-6)} %")  # 5.4 % off is not within 5 %
    text = ", ".join(said)
    return text[:1].upper() + text[1:]
