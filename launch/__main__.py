"""The command line of pase_mtf: find a strategy, train with it, show the measured speedup over data parallelism.

python -m pase_mtf.launch --model=transformer --mesh=8
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Sequence

from pase_mtf.errors import ClusterError, UsageError
from pase_mtf.launch.cluster.membership import Membership, end_with_launcher
from pase_mtf.launch.console import INTERRUPTED, LOSSES_DISAGREE, exit_code_of
from pase_mtf.launch.interrupts import Interrupts
from pase_mtf.launch.options import Options, parse_command_line
from pase_mtf.launch.plan import Plan, check_packages, member_of, resolve
from pase_mtf.launch.training import History, train

__all__ = ["main"]


def run(options: Options, interrupts: Interrupts) -> int:
    """One run, from its options to its exit code.

    Raises:
      PaseError: what a user can cause; its exit code says of which kind.
      KeyboardInterrupt: interrupted before anything was measured.
    """
    if options.print_config:
        print(resolve(options).config_json(), end="")
        return 0
    check_packages()
    if options.cluster is None or options.searches_alone or Membership.of_environment() is not None:
        return execute(resolve(options), interrupts)
    return _over_processes(options, interrupts)


def _over_processes(options: Options, interrupts: Interrupts) -> int:
    from pase_mtf.launch.cluster.hosts import join_run
    from pase_mtf.launch.cluster.launcher import launch
    member = member_of(options)
    if member.rank == 0:
        return launch(resolve(options), member.tasks, interrupts)
    interrupts.hold()
    return join_run(member, options.max_restarts, interrupts)


def execute(plan: Plan, interrupts: Interrupts) -> int:
    """Finds the strategies of a plan, trains with them, and writes down what came of it.

    Returns:
      The exit code.

    Raises:
      PaseError, KeyboardInterrupt: as in `run`.
    """
    # TensorFlow is loaded here and not before: what words and files can answer is answered in a fraction of a second.
    from pase_mtf import models
    from pase_mtf.calibration.speed import speed_note
    from pase_mtf.launch.arms.arm import build_arms, rows_of
    from pase_mtf.launch.arms.memory import check_memory
    from pase_mtf.launch.arms.program import export_with_program
    from pase_mtf.launch.checkpoints.keeping import Keeper
    from pase_mtf.launch.cluster.follower import tell_run
    from pase_mtf.launch.cluster.server import join
    from pase_mtf.launch.console import Progress, print_header
    from pase_mtf.launch.data import open_data
    from pase_mtf.launch.files import RunFiles, write_outcome
    from pase_mtf.launch.judging.judge import Judge
    from pase_mtf.launch.reports.text import describe_run, final_table, orders_note, search_summary
    from pase_mtf.launch.strategies.finding import duplicates, find_strategies, possible_arms
    from pase_mtf.launch.strategies.layout_file import layout_of_run
    from pase_mtf.launch.strategies.pricing import machine_of, prices_of, tell_untraced, watch_of
    from pase_mtf.launch.strategies.trying import choose_by_steps
    from pase_mtf.strategy.judged_text import trial_text

    options = plan.options
    data = open_data(options.data, models.get(options.model), plan.config, options.batch, options.seed)
    with contextlib.ExitStack() as stack, RunFiles(
            options.output_dir, options.batch, plan.first_step if options.in_place else None) as files:
        files.write("config.json", plan.config_json())
        joined = None if options.searches_alone else join(plan.devices)
        if joined:
            stack.callback(joined.close)
        # A machine that has to be measured is so before anything that would keep memory or cores busy.
        machine = machine_of(plan, None, joined=joined is not None) if options.prices == "roofline" else None
        graph, program = export_with_program(plan)
        prices = prices_of(plan, graph, program)
        machine = machine or machine_of(plan, prices)
        graph.save(files.path("graph.json"))
        wanted = possible_arms(plan, graph)
        facts = describe_run(plan, data, machine, graph, wanted)
        print_header(facts)

        strategies, left_out = find_strategies(plan, graph, machine, prices)
        tell_untraced(strategies.values())
        for name, reason in left_out.items():
            print(f"{name} is left out: {reason}")
        arm_names = [arm.name for arm in wanted if arm.name not in left_out]
        chosen = strategies[options.arms[0].name]
        chosen.save(files.path("strategy.json"))
        layout = layout_of_run(plan, graph, machine, chosen, prices)
        files.write("layout.txt", layout)
        print(search_summary(strategies.get("search", chosen), graph))
        if options.search_only:
            print(chosen.table())
            rows = write_outcome(files, plan, machine, facts, graph, arm_names, strategies, left_out, layout)
            if note := orders_note(rows):
                print(f"note: {note}")
            files.keep()
            return 0

        same = duplicates(strategies)
        trained = [name for name in arm_names if name not in same]
        check_memory(plan, strategies, trained, machine)
        board = joined.board if joined else None
        if board:
            tell_run(board, plan, data)
        arms = build_arms(plan, graph, strategies, trained, board)
        fed = dataclasses.replace(data, rows=rows_of(arms))
        if tried := choose_by_steps(plan, arm_names, strategies, arms, fed, prices):
            strategies, same, arms = tried
            print(f"trial: {trial_text(strategies['search'].search)}")
            before, chosen = chosen, strategies[options.arms[0].name]
            chosen.save(files.path("strategy.json"))
            if chosen.configurations != before.configurations:
                files.write("layout.txt", layout := layout_of_run(plan, graph, machine, chosen, prices))
        keeper = Keeper(files.path("checkpoint"), arms[0], fed, graph.hash, first_step=plan.first_step,
                        every=options.checkpoint_every)
        judge = Judge(plan, strategies, arms, data, board)
        watch = stack.enter_context(contextlib.closing(watch_of(prices)))
        interrupts.hold()  # what is measured from here on is written down whatever happens
        with Progress(options, len(arms), plan.first_step) as progress:
            history = train(
                arms, fed.batches(plan.first_step), warmup=options.warmup, steps=options.steps,
                first_step=plan.first_step, asked=lambda: interrupts.asked, check=judge.check,
                look=watch.look,
                watchers=(files.metric, progress.step, *([keeper.watch] if options.checkpoint else ())))
        if not history.measured:
            raise KeyboardInterrupt
        history.note, unwritten = judge.note, None
        if options.checkpoint and not history.disagreement and history.diverged is None:
            unwritten = keeper.finish()
        rows = write_outcome(files, plan, machine, facts, graph, arm_names, strategies, left_out, layout, same, arms,
                             history)
        print("", final_table(rows), "", f"files: {options.output_dir}", sep="\n")
        if note := orders_note(rows):
            print(f"note: {note}")
        if slower := speed_note(history.slowness):
            print(f"note: {slower}")
        for arm in arms:
            if arm.fallen:
                print(f"note: {arm.name} ran {', '.join(arm.fallen)} on the CPU, which its GPUs have no kernel for")
        for arm in arms:
            arm.close()
    if unwritten:
        raise unwritten
    return _exit_code(history, options, interrupts)


def _exit_code(history: History, options: Options, interrupts: Interrupts) -> int:
    if history.disagreement:
        print(f"error: {history.disagreement}", file=sys.stderr)
        return LOSSES_DISAGREE
    if history.diverged is not None:
        raise UsageError(f"--learning_rate={options.learning_rate}: the loss of {options.arms[0].name} is not finite "
                         f"at step {history.diverged}; take a smaller one")
    return (interrupts.exit_code or INTERRUPTED) if history.interrupted else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code: every error a user can cause is one line on stderr."""
    if Membership.of_environment() is not None:
        end_with_launcher(lambda: os._exit(ClusterError.exit_code))
    with Interrupts() as interrupts:
        return exit_code_of(
            lambda: run(parse_command_line(sys.argv[1:] if arguments is None else arguments), interrupts), interrupts)


if __name__ == "__main__":
    sys.exit(main())
