"""python -m pase_mtf.calibration: measures the kernels that given programs run, ahead of time, and keeps them.

  python -m pase_mtf.calibration --model=transformer --mesh=8 --seconds=300     measures what a launcher would
  python -m pase_mtf.calibration --graph=my_project.train:build_graph --mesh=4  those of your own program
  python -m pase_mtf.calibration --mesh=8 --save=mine.json                      takes what is kept to another machine
  python -m pase_mtf.calibration --list                                         what is kept

Of every program the cheapest strategy is searched and measured until it consists of measured kernels, then data
parallelism, the expert's strategy and, with --sharded_updates, zero. What is measured is kept at once: interrupted, the
same command goes on where it was. A search with --machine=mine.json, or machine="mine.json" of find_strategy, prices by
these kernels anywhere.

Exit codes: 0 done; 2 bad usage; 3 no feasible strategy; 4 out of memory; 130 (Ctrl-C), 143 (SIGTERM), 129 (SIGHUP)
and 141 (nobody reads the output) interrupted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from absl import flags
from tabulate import tabulate

from pase_mtf import models
from pase_mtf.calibration.cache import fingerprint_of_kernels, kernel_tables, kernels_path
from pase_mtf.errors import InfeasibleError, UsageError
from pase_mtf.exit_codes import exit_code_of
from pase_mtf.files import check_outputs
from pase_mtf.flag_text import check_not_empty
from pase_mtf.interrupts import Interrupts
from pase_mtf.launch.command_line import read_flags
from pase_mtf.launch.flag_values import MeshFlag, parse_mesh
from pase_mtf.launch.options import Options
from pase_mtf.launch.plan import Plan, resolve
from pase_mtf.machine.kernel_file import load_times
from pase_mtf.machine.kernel_table import check_target, save_tables
from pase_mtf.machine.kernel_times import KernelTimes
from pase_mtf.machine.kernels import Timing
from pase_mtf.machine.references import REFERENCES
from pase_mtf.runtime import MAX_DEVICES

if TYPE_CHECKING:
    from pase_mtf.calibration.meter import KernelMeter
    from pase_mtf.compat import mtf
    from pase_mtf.graph.computation_graph import ComputationGraph
    from pase_mtf.strategy.by_kernels import Telling
    from pase_mtf.strategy.measured import MeasuredPrices
    from pase_mtf.strategy.strategy import Strategy

__all__ = ["main", "parse"]

_MOST_SECONDS = 1e7
_REFERENCE_SECONDS = 10.0  # that they have in any case; of eight devices they take one or two
_OF_MODELS = ("preset", "batch", "optimizer", "dtype", "microbatches", "recompute", "sharded_updates")
_OF_MEASURING = (*_OF_MODELS, "seconds", "prove", "recalibrate")
"""Flags that count where something is measured."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What is to be measured, listed and saved.

    Attributes:
      models, graphs: names of models, and functions that build a graph, as they were written.
      meshes: for how many devices each; empty: none was named.
      program: what is said of the models' programs, by the names of the launcher's flags (`_OF_MODELS`).
      seconds: how long all of it may take.
      prove: measure until the cheapest strategies are proven to be.
      recalibrate: measure again what is kept.
      save: the file that all that is known goes to.
      listing: whether to say what is kept.
    """

    models: tuple[str, ...]
    graphs: tuple[str, ...]
    meshes: tuple[MeshFlag, ...]
    program: Mapping[str, Any]
    seconds: float
    prove: bool
    recalibrate: bool
    save: str | None
    listing: bool

    def plans(self) -> list[Plan]:
        """What the launcher would do of every model, checked before TensorFlow is loaded.

        Raises:
          PaseError: as the launcher does.
        """
        found = []
        for mesh in self.meshes:
            for model in self.models:
                options = Options(model=model, mesh=mesh.text, devices="cpu", prices="measured", **self.program)
                options.check_values()
                for name, value in (("microbatches", options.microbatch_count), ("recompute", options.recomputed)):
                    if value is None:  # a run chooses by its memory, of which nothing is known here
                        raise UsageError(f"--{name}=auto: is for a run; give what it chose")
                found.append(resolve(options))
        return found


def _flag_values() -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_list("model", [], f"Models, separated by commas: {', '.join(models.names())}.", flag_values=values)
    flags.DEFINE_multi_string("graph", [], "module:function (or path/to/file.py:function) that builds a program, as of "
                              "python -m pase_mtf.layout (may be repeated).", flag_values=values)
    flags.DEFINE_list("mesh", None, "Numbers of devices, separated by commas; default: 8.", flag_values=values)
    flags.DEFINE_string("preset", None, "Sizes of the models, as of the launcher.", flag_values=values)
    flags.DEFINE_integer("batch", None, "Examples per step; default: the preset's.", flag_values=values)
    flags.DEFINE_string("optimizer", None, "As of the launcher; default: the preset's.", flag_values=values)
    flags.DEFINE_string("dtype", None, "Of activations, as of the launcher; default: the preset's.", flag_values=values)
    flags.DEFINE_string("microbatches", None, "In how many pieces a batch is computed, as of the launcher.",
                        flag_values=values)
    flags.DEFINE_string("recompute", None, "Which blocks are computed again: none, all, or names separated by commas.",
                        flag_values=values)
    flags.DEFINE_boolean("sharded_updates", False, "Updates as layers of their own, as of the launcher.",
                         flag_values=values)
    flags.DEFINE_float("seconds", None, "How long all of it may take, but that the reference kernels of every number "
                       f"of devices, by which others are estimated, have {_REFERENCE_SECONDS:.0f}; default: until it "
                       "is done. What is not measured then is the next run's.", flag_values=values)
    flags.DEFINE_boolean("prove", False, "Go on until no other strategy can be cheaper: most kernels of most "
                         "configurations, which takes long.", flag_values=values)
    flags.DEFINE_boolean("recalibrate", False, "Measure again what is kept for these numbers of devices.",
                         flag_values=values)
    flags.DEFINE_string("save", None, "Write all kernel times of these numbers of devices (where nothing is "
                        "measured and no --mesh is given: of all) to this file, for --machine elsewhere.",
                        flag_values=values)
    flags.DEFINE_boolean("list", False, "Say what is kept.", flag_values=values)
    flags.DEFINE_boolean("help", False, "Show this.", short_name="h", flag_values=values)
    return values


def parse(arguments: Sequence[str]) -> Request:
    """Reads the flags.

    Args:
      arguments: without the program's name.

    Raises:
      UsageError: of `read_flags`; or a value that cannot be meant.
      HelpRequested: --help; holds the text.
    """
    values = _flag_values()
    read_flags(values, "pase_mtf.calibration", __doc__ or "", arguments)
    chosen: dict[str, Any] = {name: values[name].value for name in values}
    chosen["graph"] = list(map(os.path.expanduser, chosen["graph"]))  # as python -m pase_mtf.layout does
    named, graphs = (tuple(dict.fromkeys(chosen[name])) for name in ("model", "graph"))
    seconds = chosen["seconds"]
    if seconds is not None and not 0.0 < seconds <= _MOST_SECONDS:
        raise UsageError(f"--seconds={seconds:g}: give seconds, such as 300")
    for name in ("model", "mesh"):
        if values[name].present:
            check_not_empty(f"--{name}", ",".join(chosen[name]), "name some")
    check_not_empty("--save", chosen["save"], "name a file")
    for name in ("preset", "save"):
        if chosen[name] is not None:
            chosen[name] = os.path.expanduser(chosen[name])  # as the launcher does: no shell does behind "="
    _check_axes(chosen["mesh"] or [])
    texts = chosen["mesh"] or (["8"] if named or graphs else [])
    program = {name: chosen[name] for name in _OF_MODELS if _is_said(chosen[name])}
    request = Request(named, graphs, tuple(map(parse_mesh, dict.fromkeys(texts))), program,
                      math.inf if seconds is None else seconds, chosen["prove"], chosen["recalibrate"], chosen["save"],
                      chosen["list"])
    if not (named or graphs or request.save or request.listing):
        raise UsageError("nothing to measure; name --model or --graph, or say --list or --save (--help lists the "
                         "flags)")
    for name in () if named or graphs else _OF_MEASURING:
        if _is_said(chosen[name]):
            raise UsageError(f"--{name}: names nothing to measure; add --model or --graph")
    for name in () if named else _OF_MODELS:
        if _is_said(chosen[name]):
            raise UsageError(f"--{name} is of models, and a --graph is built as it is; add --model, or leave it out")
    return request


def _is_said(value: object) -> bool:
    """Whether a flag was given: 0 is, a switch that is off says nothing."""
    return value is not None and value is not False


def _check_axes(meshes: Sequence[str]) -> None:
    """Raises UsageError where several meshes seem to be meant as one: the launcher takes commas between axes."""
    for one, other in itertools.pairwise(meshes):
        if ":" in one and ":" in other and ";" not in one + other:
            raise UsageError(f"--mesh={','.join(meshes)}: a comma begins another mesh; write '{one};{other}' for one "
                             "with both axes, or numbers of devices for several")


def run(request: Request, interrupts: Interrupts) -> int:
    """Measures, lists and saves what is asked for; returns the exit code.

    Raises:
      PaseError: what a user can cause.
    """
    read = [("--preset", request.program.get("preset")),
            *(("--graph", graph.rpartition(":")[0]) for graph in request.graphs)]
    check_outputs({"--save": request.save}, read, may_replace=lambda path: True)  # or refused by `check_target`
    if request.save is not None:
        check_target(request.save, fingerprint_of_kernels(1))
    plans, code, whole = request.plans(), 0, True
    meters: dict[int, KernelMeter] = {}
    if plans or request.graphs:
        try:
            whole = _measure(request, plans, meters)
        except KeyboardInterrupt:
            code, whole = interrupts.answer(), False
            measured, lost = (sum(getattr(meter, name) for meter in meters.values()) for name in ("measured", "unkept"))
            print("interrupted before anything was measured" if not measured else
                  f"interrupted; {lost} kernels that were measured are not kept" if lost else
                  "interrupted; what was measured is kept, and the same command"
                  f"{' without --recalibrate' * request.recalibrate} goes on from there", file=sys.stderr)
    if request.listing:
        _list(request)
    if request.save is not None:
        _save(request, meters, whole, interrupted=code != 0)
    return code


# -- measuring --------------------------------------------------------------------------------------------------------
def _measure(request: Request, plans: Sequence[Plan], meters: dict[int, KernelMeter]) -> bool:
    """Measures; the meter of every number of devices is put among these as soon as it is there.

    Returns:
      Whether no program's seconds were over before all of it was measured.
    """
    # It loads numba.
    from pase_mtf.strategy.by_kernels import Telling, prices_by_kernels
    from pase_mtf.strategy.warm import ready
    builders = [(text, _builder(text)) for text in request.graphs]  # what is mistyped does not wait for that
    ready(Telling())  # or the seconds of a first run were over before anything is measured
    end = time.monotonic() + request.seconds
    share = end

    def left() -> float:
        return max(0.0, share - time.monotonic())

    total, number, whole = len(request.meshes) * (len(request.models) + len(request.graphs)), 0, True
    for mesh in request.meshes:
        programs: list[tuple[str, _Export]] = [(plan.options.model, _exporter(plan)) for plan in plans
                                               if plan.options.mesh == mesh.text]
        programs += [(text, functools.partial(build, mesh.devices)) for text, build in builders]
        for name, export in programs:
            now, number = time.monotonic(), number + 1
            share = now + (end - now) / (total - number + 1)  # so that every program has some
            tell = Telling(f"{name} on {mesh.devices} devices ({number} of {total})")
            tell("export: the program is built")
            with export() as (program, graph):
                if not _references(request, mesh.devices, meters, left):
                    print(f"{name} on {mesh.devices} devices: not searched, as the time was over when "
                          f"{len(meters[mesh.devices].times)} kernels were timed, and not all reference kernels; give "
                          "more --seconds, or take fewer devices", flush=True)
                    whole = False
                    continue
                prices = prices_by_kernels(program, graph, meters[mesh.devices], tell)
                for line in _fill(prices, graph, mesh, left, request.prove, tell):
                    print(f"{name} on {mesh.devices} devices: {line}", flush=True)
                whole = whole and left() > 0.0
        print(_kept_text(meters[mesh.devices]), flush=True)
    return whole


def _references(request: Request, devices: int, meters: dict[int, KernelMeter], left: Callable[[], float]) -> bool:
    """Times the reference kernels of a number of devices, unless that was done for another program.

    Returns:
      Whether all are known that can be: without them nothing can be said of other kernels.
    """
    # They load numba.
    from pase_mtf.calibration.meter import KernelMeter
    from pase_mtf.strategy.by_kernels import Telling, time_references
    tell, seconds = Telling(f"{devices} devices"), left()
    if devices not in meters:  # once, however many meshes: --recalibrate begins anew with each
        meters[devices] = KernelMeter(devices, again=request.recalibrate, note=tell.note)
        seconds = max(seconds, _REFERENCE_SECONDS)
    elif not meters[devices].missing(REFERENCES):
        return True
    return time_references(meters[devices], tell, seconds)


def _kept_text(meter: KernelMeter) -> str:
    """What is known now, and where."""
    if not len(meter.times):
        return f"no kernels of {meter.devices} devices are known"
    known = f"{len(meter.times)} kernels of {meter.devices} devices are"
    return f"{known} known, {meter.unkept} of them not kept" if meter.unkept else f"{known} kept in {meter.path}"


_Export = Callable[[], contextlib.AbstractContextManager[tuple["mtf.Graph", "ComputationGraph"]]]


def _exporter(plan: Plan) -> _Export:
    """Exports the program of a model."""
    @contextlib.contextmanager
    def export() -> Iterator[tuple[mtf.Graph, ComputationGraph]]:
        from pase_mtf.launch.arms.program import export_with_program  # TensorFlow takes seconds to import
        with contextlib.redirect_stdout(sys.stderr):  # how long that took is not the answer
            graph, program = export_with_program(plan)
        yield program, graph
    return export


def _builder(text: str) -> Callable[[int], contextlib.AbstractContextManager[tuple[mtf.Graph, ComputationGraph]]]:
    """Builds and exports the program that a function names."""
    from pase_mtf.layout.named import named_function  # TensorFlow takes seconds to import
    build = named_function(text)

    @contextlib.contextmanager
    def export(devices: int) -> Iterator[tuple[mtf.Graph, ComputationGraph]]:
        # TensorFlow takes seconds to import.
        from pase_mtf.export.exporter import export_graph
        from pase_mtf.layout.program import Program
        with contextlib.redirect_stdout(sys.stderr):  # what the program itself prints
            built, tf_graph = Program(build).build_first(None, devices)
        with tf_graph.as_default():
            yield built.graph, export_graph(built.graph, name=text)
    return export


def _fill(prices: MeasuredPrices, graph: ComputationGraph, mesh: MeshFlag, left: Callable[[], float], prove: bool,
          tell: Telling) -> Iterator[str]:
    """Measures what strategies of a program run; what that showed, a line per strategy."""
    # They load numba.
    from pase_mtf.strategy.experts import BY_HAND, by_hand, expert_axes
    from pase_mtf.strategy.kernels_text import untraced_text
    found = prices.find(seconds=left(), prove=prove)
    yield _line("search", found)
    for name in BY_HAND:
        try:
            configurations = by_hand(graph, mesh.devices, name,
                                     expert_axes(graph, mesh.axes) if name == "expert" else None)
        except InfeasibleError:  # as zero is where updates are no layers
            continue
        yield _line(name, prices.evaluate(configurations, name, seconds=left()))
    if note := untraced_text(found.search):
        tell.note(note)


def _line(name: str, strategy: Strategy) -> str:
    kernels = strategy.search["kernels"]
    proof = strategy.verdict if name == "search" else (
        f"{kernels['measured_of_strategy']} of {kernels['of_strategy']} kernels of it measured")
    return f"{name} {1e3 * strategy.seconds:.1f} ms a step, {proof}"


# -- what is kept -----------------------------------------------------------------------------------------------------
def _kept(request: Request) -> list[tuple[str, KernelTimes]]:
    """The tables of the machine at hand that are meant: (file, times)."""
    if request.meshes:
        counts = dict.fromkeys(mesh.devices for mesh in request.meshes)
        return [(str(path), load_times(path, fingerprint_of_kernels(devices)))
                for devices in counts for path in [kernels_path(devices)]]
    found = [(str(path), load_times(path)) for path in kernel_tables()]
    return [(path, times) for path, times in found if _of_today(times)]


def _of_today(times: KernelTimes) -> bool:
    devices, kind = times.on.get("devices"), times.on.get("kind")
    return (type(devices) is int and 0 < devices <= MAX_DEVICES and kind == "cpu"
            and times.on == fingerprint_of_kernels(devices, kind))


def _save(request: Request, meters: Mapping[int, KernelMeter], whole: bool, *, interrupted: bool) -> None:
    """Saves what is kept and what was measured now, which there may have been no place to keep for; unless the file
    holds what would be lost, as not the whole was measured."""
    known = {str(meter.path): meter.times_to_save() for meter in meters.values() if meter.measured}
    tables = [found for path, times in _kept(request) if len(found := known.get(path, times))]
    if not tables and interrupted:
        return  # as was said
    if not tables:
        counts = ",".join(str(mesh.devices) for mesh in request.meshes) or "8"
        raise UsageError(f"--save={request.save}: no kernels are kept of this machine for {counts} devices; measure "
                         f"some first (--model=transformer --mesh={counts})")
    # Measured anew, all of it, what was there counts no more; else it may be kept nowhere but there.
    alone = {} if whole and request.recalibrate else _in_it_alone(str(request.save), tables)
    if alone:
        told = ", ".join(f"{count} kernels of {devices} devices" for devices, count in alone.items())
        if whole:
            lost = "what was measured now could be kept nowhere; " * any(meter.unkept for meter in meters.values())
            print(f"{request.save}: left as it is, as it holds {told} that are not kept here; {lost}choose another "
                  "name", file=sys.stderr)
            return
        print(f"{request.save}: left as it is, as not all was measured{' again' * request.recalibrate}, and it holds "
              f"{told} that were not; " + (
                  "what was measured now could be kept nowhere" if any(meter.unkept for meter in meters.values()) else
                  f"the same command{' without --recalibrate' * request.recalibrate} goes on from there"),
              file=sys.stderr)
        return
    save_tables(str(request.save), tables)
    told = ", ".join(f"{len(times)} kernels of {times.on['devices']} devices" for times in tables)
    print(f"saved in {request.save}: {told}; search by them with --machine={request.save}", flush=True)


def _in_it_alone(path: str, tables: Sequence[KernelTimes]) -> dict[int, int]:
    """Number of devices -> how many kernels of a file would be lost if these tables took the place of its own."""
    new = {times.on["devices"]: times for times in tables}
    found = {times.on["devices"]: sum(kernel not in new[times.on["devices"]] for kernel, _ in times.items())
             for times in check_target(path, tables[0].on) if times.on["devices"] in new}
    return {devices: count for devices, count in found.items() if count}


def _list(request: Request) -> None:
    kept = [(path, times) for path, times in _kept(request) if os.path.exists(path)]
    for path, times in kept:
        on = times.on
        print(f"{on['devices']} {on['kind']} devices on {on['cores']:g} cores of {on['processor']}, TensorFlow "
              f"{on['tensorflow']}: {len(times)} kernels in {path}"
              + (f", {times.damaged} damaged lines" if times.damaged else ""))
        if len(times):
            print(_operations(times), end="\n\n")
    others = [path for path in map(str, kernel_tables()) if path not in dict(kept)] if not request.meshes else []
    for path in others:
        times = load_times(path)
        told: Mapping[str, object] = times.on
        where = " ".join(str(told[name]) for name in ("devices", "kind", "processor", "host", "tensorflow")
                      if name in told) or "of an earlier version"
        print(f"not read here, measured under other circumstances ({where}): {len(times)} kernels in {path}")
    known = {times.on["devices"] for _, times in kept}
    for devices in dict.fromkeys(mesh.devices for mesh in request.meshes):
        if devices not in known:
            print(f"no kernel times of {devices} devices are kept")
    if not (kept or others or request.meshes):
        print("no kernel times are kept")


def _operations(times: KernelTimes) -> str:
    """What is known of each operation, a row each; the most expensive ones first."""
    found: dict[str, list[Timing]] = {}
    for kernel, timing in times.items():
        found.setdefault(kernel.operation, []).append(timing)
    rows: list[Any] = []
    for name, timings in sorted(found.items(), key=lambda item: -sum(timing.seconds for timing in item[1])):
        seconds = [timing.seconds for timing in timings]
        rows.append([name, len(timings), *(f"{1e6 * value:.1f}" for value in (
            min(seconds), statistics.median(seconds), max(seconds))),
            f"{100 * statistics.median(timing.spread for timing in timings):.0f} %"])
    return tabulate(rows, ["operation", "kernels", "shortest, us", "median, us", "longest, us", "spread"],
                    disable_numparse=True, colalign=("left", *["right"] * 5))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code: every error a user can cause is one line on stderr."""
    with Interrupts(at_once=False) as interrupts:
        return exit_code_of(lambda: run(parse(sys.argv[1:] if arguments is None else arguments), interrupts),
                            interrupts, smaller="take a smaller --batch or --preset")
