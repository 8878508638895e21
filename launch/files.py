"""The files of a run, in a folder that did not exist before: strategy, layout, metrics, summary, report, checkpoint."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence

import filelock
import numpy as np

from pase_mtf.calibration.speed import speed_note
from pase_mtf.errors import InfeasibleError, UsageError
from pase_mtf.files import take_lock, write_atomically
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.launch.arms.arm import Arm
from pase_mtf.launch.arms.chosen import Chosen
from pase_mtf.launch.arms.memory import MEMORY_METHOD
from pase_mtf.launch.checkpoints.checkpoint import forget_checkpoints_after, forget_half_written
from pase_mtf.launch.console import summarize_error
from pase_mtf.launch.events import Events
from pase_mtf.launch.flag_values import PIPELINE
from pase_mtf.launch.plan import Plan
from pase_mtf.launch.reports.fitting import Fitting
from pase_mtf.launch.reports.graph_picture import graph_picture
from pase_mtf.launch.reports.page import report_html
from pase_mtf.launch.reports.text import elsewhere_note, headline, orders_note, search_summary
from pase_mtf.launch.run_folder import LOCK, METRICS, NOT_KEPT
from pase_mtf.launch.summary import ArmRow, Summary, summary_json
from pase_mtf.launch.training import History, Record
from pase_mtf.machine.machine import Machine
from pase_mtf.pipeline.pipeline import Pipeline
from pase_mtf.search.frontier import FrontierPoint
from pase_mtf.simulator.schedule import LONGEST
from pase_mtf.simulator.timeline import Timeline
from pase_mtf.strategy.strategy import Strategy

__all__ = ["RunFiles", "write_outcome"]

_LONGEST_NAME = 255
"""Bytes of the name of a folder."""
_MOST_DRAWN = 16
"""Devices whose rows can be told apart in a picture."""


class RunFiles:
    """Writes into the output directory; every failure to write is one line for the user.

    A context: on its end all files are closed, and a run that failed before its first step takes its folder with it, so
    that the next try may have the name.

    Attributes:
      folder: the output directory.
    """

    def __init__(self, folder: str, batch: int = 0, goes_on_at: int | None = None):
        """Makes the folder.

        Args:
          folder: which must not exist, but where the run goes on.
          batch: examples per step, for the events; 0: they say nothing of examples.
          goes_on_at: the folder is that of a run which goes on at this step: `go_on` removes what it holds of later
            ones. None: a new run.

        Raises:
          UsageError: it exists, or cannot be made.
        """
        self.folder, self._batch = folder, batch
        self._writers: dict[str, Events] = {}
        self._keep, self._goes_on_at, self._gone_on = False, None, False
        self._lock = filelock.FileLock(self.path(LOCK), timeout=0)
        try:
            with contextlib.ExitStack() as failed:  # by a signal, too
                if goes_on_at is None or not os.path.lexists(folder):
                    os.makedirs(folder)
                    failed.callback(self._unmake)
                    self._hold()
                else:
                    self.keep()
                    self._hold()
                    self._goes_on_at = goes_on_at
                    forget_half_written(folder)
                self._metrics = self._opened_metrics()
                failed.pop_all()
        except FileExistsError as error:
            raise UsageError(f"--output_dir={folder}: exists and is never overwritten; name a new one") from error
        except OSError as error:
            raise UsageError(f"--output_dir={folder}: cannot be made ({error.strerror}); name another place") from error

    def path(self, name: str) -> str:
        """Where a file of that name lies."""
        return os.path.join(self.folder, name)

    def _hold(self) -> None:
        """Keeps other runs out of the folder; the system takes the lock from a process that dies. Where nothing can be
        locked, they stay out of themselves.

        Raises:
          UsageError: another run is in it, or may be.
        """
        try:
            take_lock(self._lock)
        except filelock.Timeout as error:
            raise UsageError(f"--output_dir={self.folder}: another run is writing there; wait for its end, or name "
                             "another") from error
        except OSError as error:
            raise UsageError(f"--output_dir={self.folder}: {LOCK} cannot be locked ({error.strerror}), so that another "
                             "run may be writing there; name another") from error

    def _unmake(self) -> None:
        """Takes away the folder that was made just now; not where another run has taken it meanwhile."""
        if self._lock.is_locked:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._lock.release()
        else:
            with contextlib.suppress(OSError):
                os.rmdir(self.folder)  # which goes where it is empty, and not otherwise

    def _opened_metrics(self) -> io.FileIO:
        return open(self.path(METRICS), "ab", buffering=0)  # closed on the end of this context

    def go_on(self, config: str) -> None:
        """Removes what the folder holds of the step at which the run goes on and of all later ones, which are made
        anew, and replaces config.json. To be called once the run has done a step, before that is recorded: if it fails
        before, all is as it was. Further calls do nothing.

        Args:
          config: the text of config.json.

        Raises:
          UsageError: it cannot be removed, or written.
        """
        if self._goes_on_at is not None and not self._gone_on:
            self._gone_on = True
            with self._plain_errors():
                self._metrics.close()
                self._forget_after(self._goes_on_at)
                self._metrics = self._opened_metrics()
                self.write("config.json", config)

    def keep(self) -> None:
        """From here on the folder stays, whatever happens."""
        self._keep = True

    def write(self, name: str, text: str) -> None:
        """Writes a whole file."""
        write_atomically(self.path(name), text)

    def metric(self, record: Record) -> None:
        """Appends a step to metrics.jsonl and to the arm's TensorBoard events."""
        self.keep()
        # JSON has no number that is not finite: other programs would refuse the line.
        loss = record.loss if math.isfinite(record.loss) else None
        line = {"step": record.step, "arm": record.arm, "loss": loss, "ms": record.seconds * 1e3, "timed": record.timed}
        with self._plain_errors():
            self._append((json.dumps(line) + "\n").encode())
            self._events(record)

    def _forget_after(self, step: int) -> None:
        """Removes the metrics of a step and of all later ones, and the checkpoints after it."""
        path = self.path(METRICS)
        if os.path.exists(path):
            with open(path, encoding="utf-8", errors="replace") as file:
                kept = [line for line in file if _step_of(line) < step]
            write_atomically(path, "".join(kept))
        forget_checkpoints_after(self.path("checkpoint"), step)

    def _append(self, line: bytes) -> None:
        """Adds a line to metrics.jsonl, whole or not at all: a disk may be full in the middle of it."""
        before, written = self._metrics.tell(), 0
        try:
            while written < len(line):
                written += self._metrics.write(line[written:])
        except OSError:
            with contextlib.suppress(OSError):
                self._metrics.truncate(before)
            raise

    def __enter__(self) -> RunFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, *unused: object) -> None:
        gone = self.folder
        if kind is not None and not self._keep:
            # Out of the way first, so that nobody takes it when the lock in it is released.
            with contextlib.suppress(OSError):  # some file systems rename no folder that holds something
                away = os.path.join(os.path.dirname(os.path.abspath(gone)), f".gone-{os.urandom(8).hex()}")
                os.rename(self.folder, away)
                gone = away
        # All are closed, whichever of them a full disk keeps from that.
        with self._plain_errors() if kind is None else contextlib.suppress(Exception), contextlib.ExitStack() as stack:
            for close in (self._lock.release, self._metrics.close, *(one.close for one in self._writers.values())):
                stack.callback(close)
        if kind is not None and not self._keep:
            shutil.rmtree(gone, ignore_errors=True)

    def _events(self, record: Record) -> None:
        values = {"loss": record.loss}
        if record.timed:
            values["step_ms"] = record.seconds * 1e3
            if self._batch and record.seconds > 0:
                values["examples_per_second"] = self._batch / record.seconds
        self._write_events(record.arm, record.step, values)

    def memory(self, arm: str, step: int, nbytes: int) -> None:
        """Adds to the arm's events what its fullest device held."""
        with self._plain_errors():
            self._write_events(arm, step, {"memory_bytes": float(nbytes)})

    def _write_events(self, arm: str, step: int, values: Mapping[str, float]) -> None:
        if arm not in self._writers:
            # Of two files of one name the second arm is called by its path.
            name = arm.replace(os.sep, "_")
            if len(name.encode()) > _LONGEST_NAME:
                name = f"{hashlib.sha256(name.encode()).hexdigest()[:16]}_{name[-50:]}"
            folder = self.path(os.path.join("events", name))
            self._writers[arm] = Events(folder, self._goes_on_at)
        self._writers[arm].add(step, values)

    @contextlib.contextmanager
    def _plain_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UsageError(f"cannot write into {self.folder}: {error.strerror}; free space or choose another "
                             "--output_dir") from error
        except Exception as error:
            if type(error).__module__.startswith("tensorflow"):
                raise UsageError(f"cannot write into {self.folder}: {summarize_error(error)}; free space or choose "
                                 "another --output_dir") from error
            raise


def _step_of(line: str) -> float:
    """The step that a line of metrics.jsonl is of; one that a kill cut off, or that tells none, is of none that was."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return math.inf


def _notes(plan: Plan, machine: Machine, graph: ComputationGraph, chosen: Mapping[str, Chosen], history: History,
           rows: Mapping[str, ArmRow], fitting: Fitting | None) -> dict[str, str]:
    """What report.html says below its pictures: heading -> text."""
    main = next(iter(chosen.values()))
    searched = chosen.get("search", main)
    notes = {"Search": search_summary(searched, graph)} if isinstance(searched, Strategy) else {}
    if fitting:
        notes["Memory"] = fitting.text()
    if history.disagreement:
        notes = {"Losses disagree": history.disagreement, **notes}
    elif history.note:
        notes = {"Losses": history.note, **notes}
    if note := speed_note(history.slowness):
        notes["Speed of the machine"] = f"{note[0].upper()}{note[1:]}."
    if history.records and (note := elsewhere_note(plan, machine)):
        notes["Predicted times"] = note
    if note := orders_note(rows):
        notes["Simulated steps"] = note
    # The names of files may be those of other headings.
    notes.update({"Pipeline" if name == PIPELINE else f"Pipeline {name}": pipeline.table()
                  for name, pipeline in chosen.items() if isinstance(pipeline, Pipeline) and pipeline is not main})
    if history.records:
        notes["Measured memory"] = MEMORY_METHOD
    return notes


def write_outcome(files: RunFiles, plan: Plan, machine: Machine, facts: Mapping[str, str],
                  graph: ComputationGraph, rows: Mapping[str, ArmRow], chosen: Mapping[str, Chosen],
                  left_out: Mapping[str, str], layout: str,
                  arms: Sequence[Arm] = (), history: History | None = None,
                  fitting: Fitting | None = None, spent: Mapping[str, float] | None = None) -> None:
    """Writes report.html and summary.json.

    Args:
      files: of the run.
      plan: of the run.
      machine: whose numbers the predictions are.
      facts: its header.
      graph: its computation graph.
      rows: arm -> its numbers, in the order of the table, without those left out.
      chosen: arm -> strategy or pipeline; the first is that of --strategy.
      left_out: arm -> why there is none.
      layout: the text of layout.txt.
      arms, history: what was trained; nothing with --search_only.
      fitting: what was chosen so that the memory suffices; None: nothing was left open.
      spent: seconds before the first step, by what they went to.

    Raises:
      UsageError: a file cannot be written.
    """
    history = history or History(plan.first_step, {})
    strategies = {name: strategy for name, strategy in chosen.items() if isinstance(strategy, Strategy)}
    main = next(iter(chosen.values()))
    status = ("search only" if not history.records else "losses disagree" if history.disagreement
              else "diverged" if history.diverged is not None else NOT_KEPT if history.unwritten
              else "interrupted" if history.interrupted else "done")
    for arm in arms:
        if arm.measured_bytes is not None and history.records.get(arm.name):
            files.memory(arm.name, history.records[arm.name][-1].step, arm.measured_bytes)
    notes = _notes(plan, machine, graph, chosen, history, rows, fitting)
    # Who interrupts a run does not want to wait for it; the layers of a pipeline are split stage by stage.
    pictured = main if isinstance(main, Strategy) and not history.interrupted else None
    timeline, traced = (None, None) if history.interrupted else _timelines(main, arms)
    for kind, step in (("predicted", timeline), ("measured", traced)):
        path = files.path(f"timeline-{kind}.json")
        if step is not None:
            step.save(path)
        else:  # that of a run before in this folder is of other steps, perhaps of other devices
            with contextlib.suppress(OSError):
                os.unlink(path)
    files.write("report.html", report_html(
        title=f"{plan.options.model} on {plan.devices.count} devices", facts={**facts, "status": status}, rows=rows,
        history=history, strategy_table=main.table(), layout=layout, notes=notes,
        frontier=_frontier(pictured) if pictured else (), memory_limit=plan.options.bytes_per_device(machine),
        others=fitting.frontiers() if fitting and not history.interrupted else {},
        # What computes something else is none the better for being fast.
        headline="" if history.disagreement else headline(rows, main, plan.elsewhere),
        parts={name: strategy.parts for name, strategy in strategies.items()},
        traced_parts={arm.name: arm.timeline.seconds_by_kind for arm in arms if arm.timeline},
        timeline=timeline, traced=traced,
        graph=graph_picture(graph, pictured) if pictured else "", elsewhere=plan.elsewhere))
    # The last of all: it says that the run has come to its end.
    files.write("summary.json", summary_json(Summary(
        status=status, model=plan.options.model, preset=plan.options.preset, batch=plan.options.batch,
        mesh=plan.options.mesh, devices=plan.devices.count, first_step=plan.first_step, arms=dict(rows),
        steps_done=plan.first_step + min(map(len, history.records.values()), default=0),
        left_out=dict(left_out), disagreement=history.disagreement, note=history.note,
        slowness=float(np.median(history.slowness)) if history.slowness else None, search=_search(strategies),
        nodes={arm.name: arm.nodes for arm in arms}, build_seconds={arm.name: arm.build_seconds for arm in arms},
        memory_method=MEMORY_METHOD, facts=dict(facts),
        fitting=fitting.to_json() if fitting else None, spent=dict(spent or {}))))


def _timelines(main: Chosen, arms: Sequence[Arm]) -> tuple[Timeline | None, Timeline | None]:
    """The step of the first arm as it is predicted, and as it was traced."""
    if main.devices > _MOST_DRAWN or main.seconds > LONGEST:
        return None, None
    return main.timeline(), arms[0].timeline if arms else None


def _frontier(strategy: Strategy) -> tuple[FrontierPoint, ...]:
    """What memory buys where the strategy was found; empty where that cannot be told in a few seconds."""
    try:
        return strategy.memory_frontier()
    except InfeasibleError:
        return ()


def _search(strategies: Mapping[str, Strategy]) -> dict[str, object] | None:
    """What the exact search says about itself; None where no arm used it."""
    if "search" not in strategies:
        return None
    found = strategies["search"].search
    return {"seconds": found.get("seconds"), "optimal": found.get("optimal"), "gap": found.get("gap"), **found}
