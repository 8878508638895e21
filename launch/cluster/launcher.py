"""Starts the processes of a run, watches them from outside, ends them all, and starts them again after a fault.

A process that waits for another in TensorFlow says nothing for minutes after that was killed, and for ever where it was
stopped: what finds it has to stand outside.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

import filelock

from pase_mtf.errors import ClusterError, PaseError, UsageError
from pase_mtf.files import take_lock
from pase_mtf.interrupts import LAST_WISH, ONE_WISH, Interrupts
from pase_mtf.launch.checkpoints.checkpoint import find_checkpoint, forget_half_written
from pase_mtf.launch.cluster.hosts import RemoteTask, is_cut_off, meet
from pase_mtf.launch.cluster.membership import Membership
from pase_mtf.launch.cluster.network import Network, own_network
from pase_mtf.launch.cluster.process import SAID_WHY, TaskProcess, Watched, end_all, start_worker
from pase_mtf.launch.options import ResolvedOptions
from pase_mtf.launch.plan import Plan
from pase_mtf.launch.resumption import contradiction
from pase_mtf.launch.run_folder import (
    AUTO,
    LOCK,
    METRICS,
    files_of_run,
    has_checkpoint,
    has_results,
    load_run_config,
    steps_done,
    went_well,
)

__all__ = ["Fault", "Outcome", "launch", "local_addresses", "options_after", "watch"]

_T = TypeVar("_T")

_LOOK_EVERY = 0.1
_TELLS_WITHIN = 3.0
"""Seconds in which the fault of a process shows after that of rank 0 has lost its connection to it."""

_RUN = ("-m", "pase_mtf.launch")


class Fault(NamedTuple):
    """What ended a run that was not to end.

    Attributes:
      rank: of the process.
      what: has become of it.
      told: whether the process has said so itself.
    """

    rank: int
    what: str
    told: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} {self.what}"


class Outcome(NamedTuple):
    """What became of the processes of a run: an exit code, or a fault.

    Attributes:
      exit_code: of rank 0, or of another that found what its user has to mend (other data, say); where a signal ended
        the run, what a shell expects.
      fault: that ended it; None where it ended by itself.
    """

    exit_code: int
    fault: Fault | None = None


def watch(processes: Sequence[Watched], interrupts: Interrupts, sleep: Callable[[float], object] = time.sleep,
          clock: Callable[[], float] = time.monotonic) -> Outcome:
    """Waits until rank 0 ends, or a fault of any process is found; passes signals on to rank 0.

    Args:
      processes: of the run, by rank.
      interrupts: of the launcher. The first wish is for rank 0 to end after the same step of all arms, the second to
        end with the step that it does, a third ends everything.
      sleep: between two looks.
      clock: seconds.
    """
    passed_on, last, main, lost = 0, -math.inf, processes[0], 0.0
    while True:
        wishes, ended_by = interrupts.wishes, interrupts.exit_code
        if wishes > LAST_WISH and ended_by is not None:
            return Outcome(ended_by)
        # Rank 0 looks at the time between signals, too, and takes each some time after it was sent.
        if passed_on < wishes and ended_by is not None and clock() - last >= 2.0 * ONE_WISH:
            main.send(ended_by - 128)
            passed_on, last = passed_on + 1, clock()
        for process in processes:
            what, ended = process.fault(), process.exit_code
            if what is None and process is not main and ended is not None:
                if ended in SAID_WHY:
                    return Outcome(ended)
                what = f"ended with exit code {ended}"
            if what is not None:
                return Outcome(ClusterError.exit_code, Fault(process.rank, what))
        code = main.exit_code
        if code == ClusterError.exit_code and not interrupts.asked:  # it has lost one: which, a look at that will tell
            if lost > _TELLS_WITHIN:
                return Outcome(code, Fault(0, "lost its connection to another", told=True))
            lost += _LOOK_EVERY
        elif code is not None:
            # As of any other rank; by a signal, whose number a shell expects above 128, it ends as it should.
            own = code == 0 or code in SAID_WHY or code > 128
            return Outcome(code) if own else Outcome(  # after a signal, too: `_with_restarts` says what is lost then
                ClusterError.exit_code, Fault(0, f"ended with exit code {code}"))
        sleep(_LOOK_EVERY)


def local_addresses(count: int) -> tuple[str, ...]:
    """So many addresses of this computer whose ports are free now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            # As TensorFlow does, which listens on all interfaces: free on one of them only would not do.
            one.bind(("", 0))
        return tuple(f"127.0.0.1:{one.getsockname()[1]}" for one in sockets)
    finally:
        for one in sockets:
            one.close()


def launch(resolve: Callable[[], Plan], member: Membership, interrupts: Interrupts) -> int:
    """Runs a plan over processes: rank 0, which is started here, trains, the others serve their devices to it.

    After a fault all are ended, and started again from the last checkpoint, up to --max_restarts times.

    Args:
      resolve: finds out the plan of the run; that may take long, where a large checkpoint is to be checked.
      member: rank 0 of the run: with the addresses of the processes, each started by a launcher of its own; without,
        all are of this computer, and started here.
      interrupts: of this process, which only passes signals on.

    Returns:
      The exit code.

    Raises:
      ClusterError: a process is missing, or was lost, and no restart is left, or somebody wanted the run to end, which
        had not written its files by then.
      FormatError: see `options_after`.
      KeyboardInterrupt: somebody wants it to end before it has begun.
      PaseError: what `resolve` raises.
    """
    if member.tasks:  # those who come are to be told how it ends
        interrupts.hold()
    others, plan = _met(resolve, member, interrupts)
    if not member.tasks:
        interrupts.hold()
    if plan.done:
        for other in others:
            other.end(end=0)
        return 0
    with contextlib.nullcontext() if member.tasks else own_network() as network:
        if interrupts.asked and not member.tasks:  # meanwhile: a process that has just begun takes no signals yet
            raise KeyboardInterrupt
        if network is None:
            why = "" if member.tasks else "this system gives the processes no network of their own: "
            print(f"note: {why}TensorFlow's servers listen on all interfaces while the run lasts, without "
                  "authentication (docs/cluster.md#who-can-connect)", file=sys.stderr, flush=True)
        return _with_restarts(plan, member, others, interrupts, network)


def _met(find: Callable[[], _T], member: Membership, interrupts: Interrupts,
         aside: bool = False) -> tuple[list[RemoteTask], _T]:
    """The processes of other hosts, whose launchers come and wait meanwhile, and what was found out; aside, where
    signals are only remembered, so that they need not wait for a look at a large checkpoint.

    Raises:
      KeyboardInterrupt: somebody wants the run to end.
    """
    if not member.tasks and not aside:
        alone = find()
        if interrupts.asked:  # which was only remembered
            raise KeyboardInterrupt
        return [], alone
    found: Future[_T] = Future()

    def run() -> None:
        try:
            found.set_result(find())
        except BaseException as error:
            found.set_exception(error)
    threading.Thread(target=run, daemon=True).start()
    if member.tasks:
        return meet(member, interrupts, ready=found), found.result()
    while not found.done() and not interrupts.asked:
        time.sleep(_LOOK_EVERY)
    if interrupts.asked:
        raise KeyboardInterrupt
    return [], found.result()


def _with_restarts(plan: Plan, member: Membership, others: list[RemoteTask], interrupts: Interrupts,
                   network: Network | None) -> int:
    # Rank 0 takes up what lies there when it begins: that may be a later checkpoint than was found here.
    options, restarts = plan.asked or plan.options, 0
    while True:
        before = _last_summary(plan)
        outcome = _attempt(plan, options, member.tasks, others, interrupts, network,
                           last=restarts == plan.options.max_restarts)
        if outcome.fault is None or (outcome.fault.told and restarts == options.max_restarts):
            return outcome.exit_code
        if interrupts.asked:
            left = ("nothing was written after the last checkpoint" if _last_summary(plan) in (None, before) else
                    "summary.json tells what came of the run")
            raise ClusterError(f"{outcome.fault} when the run was to end; all processes were ended, and {left}")
        if restarts == options.max_restarts:
            raise ClusterError(f"{outcome.fault}; all processes were ended" + (
                f", after {restarts} restart{'s' * (restarts > 1)}" if restarts else
                "; --max_restarts=3 starts again from the last checkpoint"))
        restarts += 1
        again = functools.partial(_again, plan, str(outcome.fault), f"restart {restarts} of {options.max_restarts}")
        try:
            others, options = _met(again, member, interrupts, True)
        except KeyboardInterrupt:
            print("interrupted before the run was started again; nothing was written after its last checkpoint",
                  file=sys.stderr)
            return interrupts.answer()
        # Not before all are there: where no restart comes to be, what was measured stays.
        if options is plan.options and not options.in_place:
            _clear_up(options, anew=True)


def _again(plan: Plan, fault: str, which: str) -> ResolvedOptions:
    """The options that take a run up again after a fault; a line says from where."""
    try:
        options = options_after(plan)
    except PaseError as error:  # else nobody would learn what has ended the run
        raise type(error)(f"{fault}; {error}") from error
    where = f"the checkpoint in {options.resume}" if options.resume not in (None, AUTO) else "the first step"
    print(f"{fault}; starting again from {where} ({which})", file=sys.stderr, flush=True)
    return options


def _attempt(plan: Plan, options: ResolvedOptions, tasks: tuple[str, ...], others: list[RemoteTask],
             interrupts: Interrupts, network: Network | None, *, last: bool) -> Outcome:
    """Starts all processes, watches them, and ends them; where it is not the last, those of other hosts begin anew."""
    told: dict[str, object] = {"end": ClusterError.exit_code, "error": "rank 0: its launcher has failed"}
    addresses = tasks or local_addresses(len(plan.devices.tasks))
    here, before = list[TaskProcess](), _last_summary(plan)
    try:
        for rank in range(1 if tasks else len(addresses)):
            membership, first = _membership(plan, addresses, rank), plan.asked or plan.options
            if options is not first:  # a restart does what is left; config.json is to tell what was asked for
                membership = dataclasses.replace(membership, asked=(first.warmup, first.steps))
            here.append(start_worker(membership, network) if rank else TaskProcess(
                0, [sys.executable, *_RUN, *options.to_arguments()], membership.environment, own_output=True,
                network=network))
        outcome = watch([*here, *others], interrupts)
        if outcome.fault is not None and _is_done(plan, before):
            outcome = Outcome(0)
        elif outcome.fault is not None and interrupts.asked and _last_summary(plan) not in (None, before) and (
                went_well(plan.options.output_dir)):
            outcome = Outcome(interrupts.answer())  # the last file is written, so is all else
        elif outcome.fault is not None and is_cut_off(others):
            outcome = outcome._replace(fault=Fault(0, f"({tasks[0]}) hears nothing of any other host: it is cut off"))
        elif outcome.fault is not None and _is_wanted(outcome.fault, interrupts):
            outcome = Outcome(interrupts.answer())
        told = {"end": outcome.exit_code}
        found = [other for other in others if outcome.fault is None and other.exit_code == outcome.exit_code]
        if outcome.fault is not None:
            told |= {"error": str(outcome.fault), "again": not last and not interrupts.asked}
        elif found and outcome.exit_code:  # its own host alone has its line: elsewhere the run would end without a word
            told["error"] = (f"rank {found[0].rank} ({tasks[found[0].rank]}) has found what is to be mended, and says "
                             f"it on its own host (exit code {outcome.exit_code})")
            print(f"error: {told['error']}", file=sys.stderr, flush=True)
        elif others and outcome.exit_code in SAID_WHY:  # as above, the other way round
            told["error"] = (f"rank 0 ({tasks[0]}) has found what is to be mended, and says it on its own host (exit "
                             f"code {outcome.exit_code})")
        return outcome
    finally:
        for other in others:
            other.end(**told)
        cut_short = bool(here) and here[0].exit_code is None
        end_all(here)
        if cut_short:
            _clear_up(options)


def _last_summary(plan: Plan) -> tuple[int, int] | None:
    """What tells the summary in the folder of a run from a later one; None: there is none."""
    folder = plan.options.output_dir
    try:
        found = os.stat(files_of_run(folder)[0]) if folder else None
    except OSError:
        return None
    return (found.st_ino, found.st_mtime_ns) if found else None


def _is_done(plan: Plan, before: tuple[int, int] | None) -> bool:
    """Whether rank 0 has written all: the summary, its last file, tells of the step where the run was to end. That of
    a run before (`_last_summary`) stays until then, and may tell of more than its last whole checkpoint holds."""
    folder, options = plan.options.output_dir, plan.options
    done = steps_done(folder) if folder and _last_summary(plan) != before else 0
    return done > 0 and done >= plan.first_step + options.warmup + options.steps


def _is_wanted(fault: Fault, interrupts: Interrupts) -> bool:
    """Whether a fault is what somebody wanted: the third signal of another host, or the first, which ends a process
    that has not begun to take signals."""
    number = (interrupts.exit_code or 128) - 128
    return interrupts.wishes > LAST_WISH or (
        number > 0 and fault.what.endswith(f"was killed by {signal.Signals(number).name}"))


def _clear_up(options: ResolvedOptions, *, anew: bool = False) -> None:
    """Takes away what rank 0 takes away where it ends by itself: the folder of a run that was ended before its first
    step, and what it was writing. What cannot be removed now is when the run goes on. A folder that another run has
    taken, before rank 0 did or after, stays as it is.

    Args:
      options: of the run.
      anew: whether the run begins anew, so that steps it has done without a checkpoint go, too.
    """
    folder = options.output_dir
    metrics, lock = os.path.join(folder, METRICS), filelock.FileLock(os.path.join(folder, LOCK), timeout=0)
    if not os.path.isdir(folder):  # which a lock would make
        return
    # Out of the way first, so that nobody takes it meanwhile, and removed when the lock in it is closed: NFS keeps a
    # file that is open, and its folder with it.
    gone = os.path.join(os.path.dirname(os.path.abspath(folder)), f".gone-{os.urandom(8).hex()}")
    with contextlib.suppress(OSError, PaseError):  # filelock.Timeout is an OSError
        take_lock(lock)
        try:
            ended = os.path.exists(files_of_run(folder)[0])  # somebody's run: a summary is the last that one writes
            # Rank 0 makes these two before all else: a folder that holds others alone is somebody's, and is refused.
            ours = os.path.exists(metrics) or set(os.listdir(folder)) <= {LOCK}
            if ours and not ended and (anew or (not options.in_place and os.path.exists(metrics)
                                                and not os.path.getsize(metrics))):
                try:
                    os.rename(folder, gone)
                except OSError:  # some file systems rename no folder that holds something
                    shutil.rmtree(folder, ignore_errors=True)
            forget_half_written(folder)
        finally:
            lock.release()
    shutil.rmtree(gone, ignore_errors=True)


def _membership(plan: Plan, tasks: tuple[str, ...], rank: int) -> Membership:
    return Membership(tasks, rank, plan.devices.count, plan.devices.kind, plan.options.clients)


def options_after(plan: Plan) -> ResolvedOptions:
    """The options that take a run up again after a fault, in its own folder, to the step where it was to end.

    From the first step where there is no checkpoint yet.

    Args:
      plan: of the run as it was started.

    Raises:
      FormatError: checkpoints were written, and none is whole any more, or none can be read now: they stay as they are.
      ClusterError: a run has ended in the folder.
      UsageError: it would begin anew as another training.
    """
    options = plan.options
    if (options.resume == AUTO or not options.in_place) and not has_checkpoint(options.output_dir):
        if not options.in_place and os.path.exists(files_of_run(options.output_dir)[0]):
            raise ClusterError(f"--output_dir={options.output_dir}: a run has ended there, and summary.json tells "
                               "what came of it; none is begun anew")
        # The file of a preset may have been edited since: begun anew, it would be another training of the same name.
        if not options.in_place and has_results(options.output_dir) and (
                other := contradiction(options, load_run_config(options.output_dir))):
            raise UsageError(f"--output_dir={options.output_dir}: the run there has no checkpoint to go on from, and "
                             f"was started with {other}; put that back, or start anew in another folder")
        return options
    checkpoint = find_checkpoint(options.output_dir)
    return options.going_on(options.output_dir, plan.first_step + options.warmup + options.steps - checkpoint.step)
