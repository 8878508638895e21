"""Finds one mesh shape and one global map from dim names to mesh axes, for programs that call mtf.Lowering themselves.

    layout = pase_mtf.find_layout(mtf_graph, devices=8, outputs=[loss], machine="h100")
    layout.mesh_shape, layout.layout_rules     # "rows:2;cols:4", "batch:rows;d_ff:cols"

The command line is `python -m pase_mtf.layout --graph=my_project.train:build_graph --mesh=8`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from pase_mtf.amounts import parse_bytes
from pase_mtf.arguments import as_float, checked_arguments
from pase_mtf.calibration.load import GivenMachine, are_measured, load_machine
from pase_mtf.compat import mtf, tf
from pase_mtf.errors import InfeasibleError, MismatchError, UsageError, shortened
from pase_mtf.export.exporter import is_export_of
from pase_mtf.garbage import uncollected
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.layout.by_kernels import check_program, find_layout_by_kernels, machine_of_kernels
from pase_mtf.layout.capture import own_layout_of
from pase_mtf.layout.exports import Exports
from pase_mtf.layout.graph import GraphSearch
from pase_mtf.layout.layout import NOT_BY_KERNELS, Layout, check_explained, gap_above
from pase_mtf.layout.program import BuiltGraph, Program
from pase_mtf.layout.progress import Progress
from pase_mtf.layout.rebuild import find_layout_of_program
from pase_mtf.layout.request import Request, bytes_limit, compared_layouts
from pase_mtf.layout.space import GivenLayout, GivenShape, MeshShape, expressible, mesh_and_devices
from pase_mtf.machine.machine import LOCAL
from pase_mtf.strategy.by_kernels import kernel_times

__all__ = ["find_layout"]


@checked_arguments
def find_layout(graph: mtf.Graph | Callable[..., object], devices: int | None = None,
                outputs: Iterable[mtf.Tensor] = (), machine: GivenMachine = LOCAL,
                mesh_shape: GivenShape | None = None, memory_limit: float | str | None = "device",
                fixed: Mapping[str, str | None] | None = None, *, together: Sequence[tuple[str, str]] = (),
                compare: Sequence[GivenLayout] = (), alternatives: int = 3,
                exported: ComputationGraph | None = None, name: str = "program",
                time_limit: float | None = None, prices: str | None = None, measure_seconds: float = 60.0,
                explain: Sequence[str] = ()) -> Layout:
    """Finds the mesh shape and the layout rules under which an unchanged program runs fastest.

    Every factorisation of p into at most three axes competes (in every order that the machine's links, or a reshape,
    tell apart), with every map from dims to axes under which stock mtf.Lowering lowers the graph to the values of one
    device. What is returned has been lowered, for its shapes.

    Args:
      graph: an mtf.Graph, before it is lowered; or a function that returns one, or (graph, outputs), or comes to
        mtf.Lowering, where it is stopped. A function that takes `mesh_shape` or `layout` (strings) is called for one
        layout after the other, as its graph may depend on it: see `pase_mtf.layout.rebuild`.
      devices: p (default: that of mesh_shape, else 8).
      outputs: tensors that the program exports; of a graph (a function returns its own).
      machine: a Machine, the name of one, the path of its file, or "local" (None is the same), which is measured: see
        `pase_mtf.calibration.load.load_machine`.
      mesh_shape: only this one, as "rows:2;cols:4"; otherwise the search chooses.
      memory_limit: what a layout may need per device: bytes, "11GB", "device" (what a device of the machine holds), or
        None (or "none"): no limit, then an answer that does not fit says so.
      fixed: dim name -> axis name for dims whose axis is given, None for those that stay whole. Axes named here are
        among those of the mesh shape.
      together: pairs of dims that are to be on one axis, or both on none.
      compare: layouts to cost too, as "mesh shape;layout rules" ("rows:2;cols:4;batch:rows"), or pairs of the two.
      alternatives: how many of the next best layouts to return.
      exported: what export_graph made of the graph (no function), if it is at hand.
      name: of the program, for people.
      time_limit: seconds after which the best layout so far is returned, with its gap (`search["gap"]`). What is being
        done then (a build, an export, one mesh shape) is brought to its end; None: the search ends by itself.
      prices: "roofline": by the rates of the machine; "measured": layouts in the order of what they take at least, each
        lowered by Mesh-TensorFlow's own code and priced by its TensorFlow kernels, timed on the CPUs at hand (or told
        by a file of kernel times, given as the machine), until no other can be better. For programs without loops,
        whose graph does not depend on the layout. None: "measured" where the machine is such a file, else "roofline".
      measure_seconds: with measured prices, how long to lower and to measure.
      explain: dims that the layout is to be asked about (`Layout.explain`): one that the graph does not have is told
        before the search, where the graph does not depend on the layout.

    Returns:
      The layout, with its predicted cost and that of data parallelism and of the layouts to compare with.

    Raises:
      UsageError: arguments that do not parse or do not fit each other; a function that returns something else, or
        needs other arguments; `outputs` or `exported` beside a function.
      MismatchError: `exported` is of another graph, or has updates as layers of their own.
      FormatError: the file of the machine, or of kernel times, is missing, truncated or foreign.
      InfeasibleError: no layout lowers (names operation and dim), or satisfies the constraints; where none fits the
        memory limit, with what the lightest needs.
    """
    program = None if isinstance(graph, mtf.Graph) else Program(graph)
    outputs = list(outputs)
    if program is not None:
        for given in (word for word, value in (("outputs", outputs), ("exported", exported)) if value):
            raise UsageError(f"find_layout: {given} is of a graph, and a function builds one of its own; leave it out"
                             + (", and return (graph, outputs)" if given == "outputs" else ""))
    if isinstance(memory_limit, str):
        parse_bytes(memory_limit, "find_layout: memory_limit")
    elif memory_limit is not None:
        if not memory_limit > 0:
            raise UsageError(f"find_layout: memory_limit={shortened(memory_limit)}: give a positive number of bytes")
        memory_limit = as_float(memory_limit)
    if alternatives < 0:
        raise UsageError(f"find_layout: alternatives={alternatives}: give 0 or more")
    if time_limit is not None and not time_limit > 0:
        raise UsageError(f"find_layout: time_limit={time_limit}: not above zero; give seconds")
    if not measure_seconds > 0.0:
        raise UsageError(f"find_layout: measure_seconds={shortened(measure_seconds)}: give seconds, such as 60")
    measure_seconds, time_limit = as_float(measure_seconds), None if time_limit is None else as_float(time_limit)
    measured = are_measured(prices, machine)
    if measured and explain:
        raise UsageError(NOT_BY_KERNELS)
    deadline = math.inf if time_limit is None else time.perf_counter() + time_limit
    mesh, devices = mesh_and_devices(mesh_shape, devices)
    compared = tuple(compared_layouts(compare, devices))
    for axis in (*(mesh.names if mesh else ()), *filter(None, (fixed or {}).values()),
                 *(axis for shape, _ in compared for axis in shape.names)):
        if not expressible(axis):
            raise UsageError(f"find_layout: axis {shortened(axis)}: layout rules cannot mention this name; take one "
                             "without spaces, commas, dots, colons and semicolons")
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(Progress(name))
        progress.say("building the graph")
        # Before the machine is loaded, which takes minutes where it has to be measured: what is wrong with the program
        # is told first.
        built, tf_graph = ((BuiltGraph(graph, outputs), tf.get_default_graph()) if program is None else
                           program.build_first(mesh, devices))
        if exported is not None and not is_export_of(exported, built.graph):
            raise MismatchError(f"find_layout: exported={shortened(exported.name)} ({exported.hash}) is not what "
                                "export_graph makes of this graph without sharded_updates; leave it out, or export "
                                "this graph")
        stack.enter_context(tf_graph.as_default())
        own = own_layout_of(graph) if program is None else program.own_layout(built)
        foreign = "" if own is None else _why_not_among_these(*own, devices)
        for dim in explain if program is None or not program.arguments else ():
            check_explained(dim, built.dims)
        if measured:
            check_program(built, () if program is None else program.arguments, name)
        progress.say("loading the machine")
        kernels = kernel_times(machine, devices) if measured else None
        loaded = load_machine(machine, devices) if kernels is None else machine_of_kernels(kernels)
        loaded.check_devices(devices)
        stack.enter_context(uncollected())  # not before: measuring a machine makes garbage
        request = Request(devices, loaded, mesh, bytes_limit(memory_limit, loaded),
                          {dim: axis or None for dim, axis in (fixed or {}).items()},
                          tuple(together), None if foreign else own, compared, alternatives, name, deadline,
                          progress.say)
        if kernels is not None:
            found = find_layout_by_kernels(built, exported, request, kernels, measure_seconds)
        elif program is not None and program.arguments:
            found = find_layout_of_program(program, built, request)
        else:
            found = _find_layout_of_graph(built, exported, request)
    if own is not None and foreign:
        found = dataclasses.replace(found, notes=(*found.notes, (
            f"note: the program's own layout {own[0]} {foreign}, and is not among these")))
    return dataclasses.replace(found, memory_limit=request.memory_limit)


def _why_not_among_these(mesh: MeshShape, rules: Mapping[str, str], devices: int) -> str:
    """Why the program's own layout cannot be weighed beside the others; "" where it can."""
    if mesh.devices != devices:
        return f"is for {mesh.devices} devices"
    return "" if all(map(expressible, (*mesh.names, *rules))) else "has names that no string can give"


def _find_layout_of_graph(built: BuiltGraph, exported: ComputationGraph | None, request: Request) -> Layout:
    one = GraphSearch(built.graph, built.outputs, request, exports=Exports(built.graph, request, exported))
    for entry in request.compare:  # a slip of the finger does not cost the answer
        one.check_given(*entry)
    # What is found first within a memory limit is not always proven to be the cheapest; equals stay in their order.
    found = sorted(one.candidates(1 + request.alternatives), key=lambda entry: float(f"{entry.cost:.12g}"))
    own = None if request.own is None else one.judge_own(*request.own)
    best = searched = one.cost("best", found[0].mesh, found[0].rules) if found else None
    data_parallel = one.data_parallel()
    parallel = one.judge("data parallel", *data_parallel) if data_parallel else None
    # Where time or patience is over before the search has found one, one of these is the answer.
    fixed = None if found or math.isinf(one.search.bound) else one.judge(
        "fixed", one.meshes[0], {dim: axis for dim, axis in request.fixed.items() if axis is not None})
    compared = tuple(one.judge(f"given {number}", *entry) for number, entry in enumerate(request.compare, 1))
    for other in (own, parallel, fixed, *compared):
        if other is not None and request.allows(other) and (
                best is None or other.seconds < best.seconds * (1 - 1e-9)):
            best = dataclasses.replace(other, name="best")
    if best is None:
        raise InfeasibleError(one.why_nothing())
    if not any(candidate.axis_of for candidate in found):
        one.check_split(best)
    gap = gap_above(one.search.bound if request.searched(best) else 0.0, best.seconds)
    return Layout(
        best=best, graph_name=request.name, devices=request.devices,
        machine_name=request.machine.name, machine_source=request.machine.source,
        device_bytes=request.machine.memory_bytes, data_parallel=parallel, own=own, compared=compared,
        alternatives=tuple(one.cost(f"next best {number}", candidate.mesh, candidate.rules)
                           for number, candidate in enumerate(found[best is searched:][:request.alternatives], 1)),
        search={"seconds": one.seconds, "export_seconds": one.export_seconds, "optimal": gap <= 1e-9, "gap": gap,
                **one.sizes()},
        notes=(*(one.notes(found[0]) if found else ()),
               *one.of_program([*([parallel] if parallel else []), *([own] if own else []), *compared]),
               *one.idle(best), *one.per_layer(best),
               *(f"note: {note}" for entry in request.compare for note in one.unknown_dims(*entry))),
        variables=one.variables, _search=one.search)
