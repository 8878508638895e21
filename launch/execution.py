"""One run in this process: its strategies are found, its arms trained, and what came of it is written down."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence

from pase_mtf import models
from pase_mtf.calibration.speed import speed_note
from pase_mtf.errors import DataError, PaseError, UsageError
from pase_mtf.exit_codes import Output
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.interrupts import Interrupts
from pase_mtf.launch.arms.arm import Arm, build_arms, rows_of
from pase_mtf.launch.arms.chosen import Chosen
from pase_mtf.launch.arms.memory import check_memory, master_bytes
from pase_mtf.launch.arms.program import export_with_program
from pase_mtf.launch.checkpoints.keeping import Keeper
from pase_mtf.launch.cluster.board import Board
from pase_mtf.launch.cluster.follower import tell_run
from pase_mtf.launch.cluster.server import join
from pase_mtf.launch.console import LOSSES_DISAGREE, Progress, output_that_may_go, print_header
from pase_mtf.launch.data import Data, open_data
from pase_mtf.launch.files import RunFiles, write_outcome
from pase_mtf.launch.flag_values import PIPELINE, ArmName
from pase_mtf.launch.judging.judge import Judge
from pase_mtf.launch.plan import Plan
from pase_mtf.launch.possible import why_left_out
from pase_mtf.launch.reports.fitting import Fitting
from pase_mtf.launch.reports.text import describe_run, elsewhere_note, final_table, orders_note, search_summary
from pase_mtf.launch.resumption import contradiction
from pase_mtf.launch.run_folder import has_ended, has_results, load_run_config, newest_checkpoint
from pase_mtf.launch.spent import Spent
from pase_mtf.launch.strategies.finding import (
    MAIN_SHARE,
    as_stock,
    check_files,
    duplicates,
    find_strategies,
    possible_arms,
)
from pase_mtf.launch.strategies.fitting import fitting_program
from pase_mtf.launch.strategies.layout_file import layout_of_run, pipeline_text
from pase_mtf.launch.strategies.pipelining import check_pipelines, find_pipelines
from pase_mtf.launch.strategies.pricing import machine_of, prices_of, tell_untraced, watch_of
from pase_mtf.launch.strategies.trying import choose_by_steps
from pase_mtf.launch.summary import arm_rows
from pase_mtf.launch.training import BLOCK, History, train
from pase_mtf.machine.machine import Machine
from pase_mtf.pipeline.pipeline import Pipeline
from pase_mtf.strategy.by_kernels import Telling
from pase_mtf.strategy.judged_text import trial_text
from pase_mtf.strategy.measured import MeasuredPrices
from pase_mtf.strategy.strategy import Strategy
from pase_mtf.strategy.warm import ready

__all__ = ["execute"]


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """What a run knows before it looks for strategies.

    Attributes:
      board: on which the ranks tell each other what they do; None: there are no others with a graph of their own.
      machine: whose numbers count.
      prices: those of measured kernels, which count in their stead.
      arms: as they are asked for, as far as the graph allows them.
      facts: the header.
      fitting: what was chosen so that the memory suffices; None: nothing was left open.
      spent: what planning has taken so far.
    """

    plan: Plan
    data: Data
    files: RunFiles
    board: Board | None
    machine: Machine
    graph: ComputationGraph
    prices: MeasuredPrices | None
    arms: tuple[ArmName, ...]
    facts: Mapping[str, str]
    fitting: Fitting | None
    spent: Spent


@dataclasses.dataclass(frozen=True)
class _Found:
    """The strategies of a run, whose files are written.

    Attributes:
      strategies: arm -> strategy; stock Mesh-TensorFlow has none.
      pipelines: arm -> pipeline, of an arm that is one.
      left_out: arm -> why there is none to compare with.
      names: of the arms, in the order of the table, without those left out.
      layout: the text of layout.txt.
    """

    strategies: Mapping[str, Strategy]
    pipelines: Mapping[str, Pipeline]
    left_out: Mapping[str, str]
    names: Sequence[str]
    layout: str

    @property
    def chosen(self) -> dict[str, Chosen]:
        """Arm -> what it trains with, in the order of the table."""
        both: dict[str, Chosen] = {**self.strategies, **self.pipelines}
        return {name: both[name] for name in self.names if name in both}


@dataclasses.dataclass(frozen=True)
class _Built:
    """The arms of a run, lowered.

    Attributes:
      same: arm -> the arm with the same strategy that is trained in its stead.
      data: what this process reads of it.
    """

    arms: Sequence[Arm]
    same: Mapping[str, str]
    data: Data


def execute(plan: Plan, interrupts: Interrupts) -> int:
    """Finds the strategies of a plan, trains with them, and writes down what came of it.

    Args:
      plan: of the run.
      interrupts: held as soon as there is something to write down.

    Returns:
      The exit code.

    Raises:
      PaseError: what a user can cause; its exit code says of which kind.
      KeyboardInterrupt: interrupted before anything was measured.
      OSError: what it prints cannot be written any more; once there is something measured, it ends as with a signal
        before.
    """
    options = plan.options
    data = open_data(options.data, models.get(options.model), plan.config, options.batch, options.seed)
    with contextlib.ExitStack() as stack, RunFiles(
            options.output_dir, options.batch, plan.first_step if options.in_place else None) as files:
        _check_untouched(plan)
        run = _prepare(plan, data, files, stack)
        plan, found = run.plan, _find(run)
        if options.search_only:
            files.write("config.json", plan.config_json())
            _report_search(run, found)
            files.keep()
            return 0
        built, found = _build(run, found)
        with output_that_may_go() as output:
            history = _train(run, found, built, interrupts, output)
            try:
                _report(run, found, built, history)
            except PaseError as error:
                if not history.disagreement:
                    raise
                print(f"warning: {error}", file=sys.stderr)  # that an arm is wrong weighs more
        for arm in built.arms:
            arm.close()
    if problem := history.stopped or history.unwritten:
        raise problem
    return _exit_code(plan, history, interrupts, output)


def _check_untouched(plan: Plan) -> None:
    """Raises UsageError where another run has written a checkpoint since this one looked for the last, has ended, or
    has left another training: a run that was asked to end does so while the next is loading TensorFlow. To be called
    while the folder is held."""
    options = plan.options
    now = newest_checkpoint(options.output_dir) if options.in_place else None
    if now is not None and now != plan.newest:
        raise UsageError(f"--output_dir={options.output_dir}: another run has written step-{now} there since this one "
                         "was started; give the same command again to go on from it")
    if options.in_place and plan.checkpoint is None and (  # `resolve` found none
            has_ended(options.output_dir) or _holds_another(plan)):
        found = "has ended" if has_ended(options.output_dir) else "has left another training"
        raise UsageError(f"--output_dir={options.output_dir}: another run {found} there since this one was started; "
                         "give the same command again")


def _holds_another(plan: Plan) -> bool:
    """Whether another training lies in the folder of a run, as `resolve` asks before."""
    folder = plan.options.output_dir
    return has_results(folder) and contradiction(plan.options, load_run_config(folder)) is not None


def _prepare(plan: Plan, data: Data, files: RunFiles, stack: contextlib.ExitStack) -> _Prepared:
    """Joins the other processes, exports the graph and loads the machine; what is to be closed goes onto the stack."""
    options = plan.options
    # In the folder of an earlier run its own options stay until this one has done a step (`RunFiles.go_on`).
    fresh = not (options.in_place and os.path.exists(files.path("config.json")))
    if fresh:
        files.write("config.json", plan.config_json())
    joined = None if options.searches_alone else join(plan.devices)
    if joined:
        stack.callback(joined.close)
    # A machine that has to be measured is so before anything that would keep memory or cores busy.
    spent = Spent()
    with spent.on("reference_kernels"):
        machine = machine_of(plan, None, joined=joined is not None) if options.prices == "roofline" else None
    with spent.on("compiling"):  # whatever the prices: what a search compiles at its first call is no searching
        ready(Telling())
    graph, program = export_with_program(plan)
    with spent.on("reference_kernels"):
        prices = prices_of(plan, graph, program)
        machine = machine or machine_of(plan, prices)
    before = plan.microbatches, plan.recomputed
    with spent.on("search"):
        plan, fitting = _within_memory(plan, machine)
    if fresh:
        files.write("config.json", plan.config_json())
    if (plan.microbatches, plan.recomputed) != before:
        graph, program = export_with_program(plan)
        with spent.on("reference_kernels"):
            # The devices are the same: --recalibrate would begin anew with what it has just timed.
            prices = prices_of(plan, graph, program, prices.meter if prices else None)
    graph.save(files.path("graph.json"))
    check_files(plan, graph)
    check_pipelines(plan)
    arms = possible_arms(plan, graph)
    facts = describe_run(plan, data, machine, graph, arms)
    print_header(facts)
    if fitting:
        print(fitting.text())
    return _Prepared(plan, data, files, joined.board if joined else None, machine, graph, prices, arms, facts,
                     fitting, spent)


def _within_memory(plan: Plan, machine: Machine) -> tuple[Plan, Fitting | None]:
    """The run with what the memory decides: in how many microbatches, and which blocks are computed again."""
    if plan.options.microbatch_count is None and math.isinf(plan.options.bytes_per_device(machine)):
        plan = plan.in_microbatches(1)  # more never make a step faster
    if plan.options.microbatch_count is not None and plan.options.recomputed is not None:
        return plan, None
    found = fitting_program(plan, machine)
    return plan.in_microbatches(found.choice.microbatches).recomputing(found.choice.blocks), found


def _trained(run: _Prepared, chosen: Mapping[str, Chosen]) -> Chosen:
    """That of --strategy."""
    return chosen[run.plan.options.arms[0].name]


def _write_trained(run: _Prepared, chosen: Chosen) -> str:
    """Writes what is trained, and its layout, which is returned."""
    if isinstance(chosen, Pipeline):  # whose own file is written for every arm that is one
        layout = pipeline_text(chosen)
    else:
        chosen.save(run.files.path("strategy.json"))
        layout = layout_of_run(run.plan, run.graph, run.machine, chosen, run.prices)
    run.files.write("layout.txt", layout)
    return layout


def _search(run: _Prepared) -> tuple[dict[str, Pipeline], dict[str, Strategy], dict[str, str]]:
    """The pipelines and the strategies of a run, and why there are no others: what is trained first, which gets the
    most of the time for measuring kernels."""
    plan, begin = run.plan, time.monotonic()
    kinds = {arm.method == PIPELINE for arm in run.arms  # what is left out needs no time
             if arm.method != "stock" and not why_left_out(arm, plan.options, plan.config)}
    share = MAIN_SHARE * plan.options.measure_seconds if len(kinds) > 1 else plan.options.measure_seconds
    staged = functools.partial(find_pipelines, plan, run.arms, run.machine, run.prices)
    whole = functools.partial(find_strategies, plan, run.graph, run.machine, run.prices,
                              known=run.fitting.configurations if run.fitting else None)

    def left() -> float:
        return max(0.0, begin + plan.options.measure_seconds - time.monotonic())

    if run.arms[0].method == PIPELINE:
        pipelines, not_piped = staged(share)
        found = whole(left())
    else:
        found = whole(share)
        pipelines, not_piped = staged(left())
    return pipelines, found.strategies, {**found.left_out, **not_piped}


def _find(run: _Prepared) -> _Found:
    """The strategy of every arm; writes down the one of --strategy."""
    measured = run.prices.meter.spent if run.prices else 0.0
    with run.spent.on("search"):
        pipelines, strategies, left_out = _search(run)
    if run.prices:
        run.spent.of("kernels", run.prices.meter.spent - measured, out_of="search")
    tell_untraced([*strategies.values(), *pipelines.values()])
    for name, reason in left_out.items():
        print(f"{name} is left out: {reason}")
    names = [arm.name for arm in run.arms if arm.name not in left_out]
    chosen = _trained(run, {**strategies, **pipelines})
    layout = _write_trained(run, chosen)
    if told := strategies.get("search", chosen if isinstance(chosen, Strategy) else None):
        print(search_summary(told, run.graph))
    for arm in (arm for arm in run.arms if arm.name in pipelines):
        if not arm.argument or arm == run.arms[0]:  # a file to compare with is kept where it is
            pipelines[arm.name].save(run.files.path(run.plan.options.pipeline_file(arm)))
        print(pipelines[arm.name].table())
    return _Found(strategies, pipelines, left_out, names, layout)


def _report_search(run: _Prepared, found: _Found) -> None:
    chosen = _trained(run, found.chosen)
    if not isinstance(chosen, Pipeline):  # which is told where it is found
        print(chosen.table())
    rows = arm_rows(found.names, History(run.plan.first_step, {}), found.chosen, {}, {}, run.plan.options.batch)
    write_outcome(run.files, run.plan, run.machine, run.facts, run.graph, rows, found.chosen, found.left_out,
                  found.layout, fitting=run.fitting, spent=run.spent.seconds)
    print(run.spent.text())
    if note := orders_note(rows):
        print(f"note: {note}")


def _build(run: _Prepared, found: _Found) -> tuple[_Built, _Found]:
    """Lowers every strategy once, and tries a few steps where predictions do not tell which is the fastest."""
    plan, same = run.plan, duplicates(found.strategies)
    trained = [name for name in found.names if name not in same]
    stock = {arm.name: as_stock(arm, plan, run.graph, run.machine, found.strategies) for arm in run.arms
             if arm.method == "stock" and arm.name in trained}
    check_memory(plan, {**found.chosen, **stock}, trained, run.machine, master_bytes(run.graph))
    if run.board:
        tell_run(run.board, plan, run.data)
    arms = build_arms(plan, run.graph, found.chosen, trained, run.board)
    fed = dataclasses.replace(run.data, rows=rows_of(arms))
    with run.spent.on("trial_steps"):
        tried = choose_by_steps(plan, run.graph, found.names, found.strategies, arms, fed, run.prices)
    print(run.spent.text())
    if tried is None:
        return _Built(arms, same, fed), found
    print(f"trial: {trial_text(tried.strategies['search'].search)}")
    after = dataclasses.replace(found, strategies=tried.strategies)
    before, chosen = _trained(run, found.chosen), _trained(run, after.chosen)
    if isinstance(chosen, Strategy):  # the trial is told in its file
        chosen.save(run.files.path("strategy.json"))
    layout = found.layout if chosen.configurations == before.configurations else _write_trained(run, chosen)
    left = dataclasses.replace(run.data, rows=rows_of(tried.arms))  # of what was closed nothing is read any more
    return _Built(tried.arms, tried.same, left), dataclasses.replace(after, layout=layout)


def _train(run: _Prepared, found: _Found, built: _Built, interrupts: Interrupts, output: Output) -> History:
    """Trains the arms side by side, and writes the checkpoints; returns what was measured."""
    plan, options, arms, alone = run.plan, run.plan.options, built.arms, run.board is None
    config = plan.config_json()
    keeper = Keeper(run.files.path("checkpoint"), arms[0], built.data, run.graph.hash, microbatches=plan.microbatches,
                    recompute=plan.recomputed, first_step=plan.first_step, every=options.checkpoint_every)
    judge = Judge(plan, found.chosen, arms, run.data, run.board)
    with contextlib.closing(watch_of(run.prices, found.chosen.values())) as watch:
        interrupts.hold()  # what is measured from here on is written down whatever happens
        with Progress(options, len(arms), plan.first_step) as progress:
            # What arms take in one turn is read while they take the turn before.
            batches = built.data.batches(plan.first_step, ahead=BLOCK)
            history = train(
                arms, batches, warmup=options.warmup, steps=options.steps,
                first_step=plan.first_step, asked=lambda: interrupts.asked or output.lost is not None,
                insisted=lambda: interrupts.insisted,
                check=judge.check, look=watch.look,
                # In a process among several the others would wait for it.
                ends_with=(DataError,) if alone else (),
                watchers=(lambda _: run.files.go_on(config), run.files.metric, progress.step,
                          *([keeper.watch] if options.checkpoint else ())))
        if not history.measured:
            raise history.stopped or (None if interrupts.asked else output.lost) or KeyboardInterrupt
        history.note = judge.note
        if options.checkpoint and not history.disagreement and history.diverged is None:
            keeper.finish(history)
        return history


def _report(run: _Prepared, found: _Found, built: _Built, history: History) -> None:
    """Writes summary and report, and shows the table."""
    rows = arm_rows(found.names, history, found.chosen, built.same,
                    {arm.name: arm.measured_bytes for arm in built.arms}, run.plan.options.batch)
    try:
        write_outcome(run.files, run.plan, run.machine, run.facts, run.graph, rows, found.chosen, found.left_out,
                      found.layout, built.arms, history, run.fitting, run.spent.seconds)
    finally:  # what was measured is there though it cannot be written
        print("", final_table(rows), "", f"files: {run.plan.options.output_dir}", sep="\n")
    if note := elsewhere_note(run.plan, run.machine):
        print(f"note: {note}")
    if note := orders_note(rows):
        print(f"note: {note}")
    if slower := speed_note(history.slowness):
        print(f"note: {slower}")
    for arm in built.arms:
        if arm.fallen:
            print(f"note: {arm.name} ran {', '.join(arm.fallen)} on the CPU, which its GPUs have no kernel for")


def _exit_code(plan: Plan, history: History, interrupts: Interrupts, output: Output) -> int:
    if history.disagreement:
        print(f"error: {history.disagreement}", file=sys.stderr)
        return LOSSES_DISAGREE
    if history.diverged is not None:
        rate, what = plan.options.learning_rate, f"the loss of {plan.options.arms[0].name} is not finite"
        if rate is None:
            raise UsageError(f"{what} at step {history.diverged} with the rates of {plan.options.optimizer} itself; "
                             f"{'start anew with' if plan.checkpoint else 'give'} a --learning_rate, a small one, or "
                             "another --optimizer")
        raise UsageError(f"--learning_rate={rate}: {what} at step {history.diverged}; "
                         f"{'start anew with' if plan.checkpoint else 'take'} a smaller one")
    if history.interrupted and interrupts.asked:
        return interrupts.answer()
    if output.lost is not None:
        raise output.lost
    return 0
