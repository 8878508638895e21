"""What a run leaves behind: the strategy's files before training, the numbers and the report after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.launch.checkpoint import save_checkpoint
from pase_mtf.launch.console import search_summary
from pase_mtf.launch.layout_text import layout_text
from pase_mtf.launch.measuring import MEMORY_METHOD
from pase_mtf.launch.report import report_html
from pase_mtf.launch.run_files import RunFiles
from pase_mtf.launch.settle import Plan
from pase_mtf.launch.summary import arm_rows, summary_json
from pase_mtf.launch.training import History
from pase_mtf.strategy.strategy import Strategy

__all__ = ["write_checkpoint", "write_outcome", "write_strategy"]


def write_strategy(files: RunFiles, graph: ComputationGraph, strategy: Strategy) -> None:
    """Writes strategy.json and layout.txt."""
    strategy.save(files.path("strategy.json"))
    files.write("layout.txt", _layout(graph, strategy))


def write_checkpoint(files: RunFiles, plan: Plan, graph: ComputationGraph, arms: Sequence[Any]) -> None:
    """Writes checkpoint/ of the arm of --strategy, the first."""
    if plan.options.checkpoint and arms:
        save_checkpoint(files.path("checkpoint"), arms[0].save, step=arms[0].steps_done, graph_hash=graph.hash)


def write_outcome(files: RunFiles, plan: Plan, facts: Mapping[str, str], graph: ComputationGraph,
                  strategies: Mapping[str, Strategy], same_as: Mapping[str, str] | None = None,
                  arms: Sequence[Any] = (), history: History | None = None) -> dict[str, dict[str, Any]]:
    """Writes summary.json and report.html.

    Args:
      files: of the run.
      plan: of the run.
      facts: its header.
      graph: its computation graph.
      strategies: arm -> strategy; the first is the one of --strategy.
      same_as: arm -> the arm with the same strategy that was trained in its stead.
      arms, history: what was trained; nothing with --search_only.

    Returns:
      arm -> its numbers, in the order of the table.
    """
    history = history or History(plan.first_step, {})
    measured = {arm.name: arm.measured_bytes for arm in arms}
    names = [arm.name for arm in plan.options.arms]
    rows = arm_rows(names, history, strategies, same_as or {}, measured, plan.options.batch)
    main = next(iter(strategies.values()))
    status = ("search only" if not history.records else "losses disagree" if history.disagreement
              else "diverged" if history.diverged is not None else "interrupted" if history.interrupted else "done")
    files.write("summary.json", summary_json(
        rows, search=_search(strategies), status=status, facts=facts,
        disagreement=str(history.disagreement) if history.disagreement else None,
        model=plan.options.model, preset=plan.options.preset, batch=plan.options.batch,
        devices=plan.devices.count, mesh=plan.options.mesh, first_step=plan.first_step,
        memory_method=MEMORY_METHOD, nodes={arm.name: arm.nodes for arm in arms},
        build_seconds={arm.name: arm.build_seconds for arm in arms}))
    notes = {"Search": search_summary(strategies.get("search", main), graph)}
    if history.disagreement:
        notes = {"Losses disagree": str(history.disagreement), **notes}
    if measured:
        notes["Measured memory"] = MEMORY_METHOD
    files.write("report.html", report_html(
        title=f"{plan.options.model} on {plan.devices.count} devices", facts={**facts, "status": status}, rows=rows,
        history=history, strategy_table=main.table(), layout=_layout(graph, main), notes=notes))
    return rows


def _search(strategies: Mapping[str, Strategy]) -> dict[str, Any] | None:
    """What the exact search says about itself; None where no arm used it."""
    if "search" not in strategies:
        return None
    found = strategies["search"].search
    return {"seconds": found.get("seconds"), "optimal": found.get("optimal"), "gap": found.get("gap"), **found}


def _layout(graph: ComputationGraph, strategy: Strategy) -> str:
    return layout_text(graph, strategy.configurations, strategy.devices, strategy.name)
