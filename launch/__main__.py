"""The command line of pase_mtf: find a strategy, train with it, show the measured speedup over data parallelism.

python -m pase_mtf.launch --model=transformer --mesh=8
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence

from pase_mtf.errors import ClusterError
from pase_mtf.exit_codes import exit_code_of
from pase_mtf.interrupts import Interrupts
from pase_mtf.launch.cluster.hosts import join_run
from pase_mtf.launch.cluster.launcher import launch
from pase_mtf.launch.cluster.membership import Membership, end_with_launcher
from pase_mtf.launch.command_line import parse_command_line, shared_flags
from pase_mtf.launch.console import SMALLER
from pase_mtf.launch.options import Options
from pase_mtf.launch.plan import Plan, check_packages, member_of, resolve
from pase_mtf.launch.run_folder import check_can_be_written

__all__ = ["main"]


def run(arguments: Sequence[str], interrupts: Interrupts) -> int:
    """One run, from its command line to its exit code.

    Args:
      arguments: without the program's name.
      interrupts: of this process.

    Raises:
      HelpRequested: --help; holds the text.
      PaseError: what a user can cause; its exit code says of which kind.
      KeyboardInterrupt: interrupted before anything was measured.
    """
    # A launcher tells its process all options of the run.
    options = parse_command_line(arguments, complete=Membership.of_environment() is not None)
    if options.print_config:
        print(resolve(options).config_json(), end="")
        return 0
    check_packages()
    if options.searches_alone and options.cluster_flag and options.cluster_flag.rank:
        print(f"process {options.cluster_flag.rank} has nothing to do: process 0 searches")
        return 0
    if options.cluster is None or options.searches_alone or Membership.of_environment() is not None:
        plan = _resolved(options)
        if plan.done:
            return 0
        # TensorFlow is loaded here and not before: what words and files can answer is answered in a fraction of a
        # second.
        from pase_mtf.launch.execution import execute
        return execute(plan, interrupts)
    return _over_processes(options, shared_flags(arguments), interrupts)


def _resolved(options: Options) -> Plan:
    """What a run is to do; a line tells where that is nothing."""
    plan = resolve(options)
    if plan.options.in_place and not plan.done:
        check_can_be_written(plan.options.output_dir)
    if plan.done:
        print(f"the run in {plan.options.output_dir} has done its {plan.done} steps"
              + ("; more --steps go on with it" if plan.checkpoint else ""))
    return plan


def _over_processes(options: Options, flags: Mapping[str, object], interrupts: Interrupts) -> int:
    member = dataclasses.replace(member_of(options), flags=flags)
    if member.rank == 0:
        return launch(lambda: _resolved(options), member, interrupts)
    interrupts.hold()
    return join_run(member, options.max_restarts, interrupts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code: every error a user can cause is one line on stderr."""
    if Membership.of_environment() is not None:
        end_with_launcher(lambda: os._exit(ClusterError.exit_code))
    with Interrupts(at_once=False) as interrupts:
        return exit_code_of(
            lambda: run(sys.argv[1:] if arguments is None else arguments, interrupts), interrupts, smaller=SMALLER)


if __name__ == "__main__":
    sys.exit(main())
