"""Intercepts mtf.Lowering in programs that call it deep inside a model_fn: to capture the graph, or to lower every
layer in a layout of its own.

    with pase_mtf.capture_graph() as captured:
        model_fn(features, labels, mode, params)       # stops where it would lower
    layout = pase_mtf.find_layout(captured.graph, devices=8)

    with pase_mtf.swap_lowering(machine="local"):
        model_fn(features, labels, mode, params)       # lowers every layer with a layout of its own
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pase_mtf.arguments import checked_arguments
from pase_mtf.calibration.load import GivenMachine, is_kernel_file, load_machine
from pase_mtf.compat import mtf
from pase_mtf.errors import UsageError
from pase_mtf.export.exporter import export_as, export_graph
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.layout.space import MeshShape, parse_layout
from pase_mtf.layout.stacking import is_not_stacked
from pase_mtf.lowering.emit import device_specs
from pase_mtf.lowering.lowering import PlanLowering
from pase_mtf.lowering.plans import plan_from_configurations, updates_from_configurations
from pase_mtf.machine.machine import LOCAL
from pase_mtf.replaced import replaced
from pase_mtf.runtime import Devices, gpu_names
from pase_mtf.strategy.find import find_strategy
from pase_mtf.strategy.strategy import Strategy

__all__ = ["CapturedGraph", "SwappedLowering", "capture_graph", "own_layout_of", "swap_lowering"]


@dataclasses.dataclass
class CapturedGraph:
    """What was about to be lowered.

    Attributes:
      mesh_to_impl: the mesh implementations that the program had made.
    """

    mesh_to_impl: dict[mtf.Mesh, mtf.MeshImpl] = dataclasses.field(default_factory=dict)
    _graph: mtf.Graph | None = None

    @property
    def graph(self) -> mtf.Graph:
        """The graph.

        Raises:
          UsageError: nothing was lowered.
        """
        if self._graph is None:
            raise UsageError("no graph was captured: the code within capture_graph() never came to mtf.Lowering")
        return self._graph

    @property
    def own(self) -> tuple[MeshShape, dict[str, str]] | None:
        """The layout that it was about to be lowered with; None where there is none, or one for each mesh."""
        return _one_of(_given(self.mesh_to_impl))

    @property
    def found(self) -> bool:
        """Whether the program came to lower a graph."""
        return self._graph is not None


# Not what they say: who reads it while the program builds its graph is taken for the program (`layout.reads`).
_OWN: weakref.WeakKeyDictionary[mtf.Graph, list[tuple[mtf.Shape, mtf.LayoutRules]]] = weakref.WeakKeyDictionary()


def _given(mesh_to_impl: Mapping[mtf.Mesh, mtf.MeshImpl]) -> list[tuple[mtf.Shape, mtf.LayoutRules]]:
    """Mesh shape and layout rules of every mesh implementation; nothing of them is read."""
    return [(impl.shape, impl.layout_rules) for impl in mesh_to_impl.values() if isinstance(impl, mtf.MeshImpl)]


def _one_of(given: Sequence[tuple[mtf.Shape, mtf.LayoutRules]]) -> tuple[MeshShape, dict[str, str]] | None:
    """The layout that all of these are; None where there is none, or more than one."""
    layouts = {(shape.to_string, str(rules)): (shape, rules) for shape, rules in given}
    if len(layouts) != 1:
        return None
    ((shape, rules),) = layouts.values()
    try:
        return parse_layout((shape, rules))
    except UsageError:  # one that Mesh-TF refuses too, at the first tensor with the dim
        return None


def own_layout_of(graph: mtf.Graph) -> tuple[MeshShape, dict[str, str]] | None:
    """The layout that a captured graph was about to be lowered with."""
    return _one_of(_OWN.get(graph, ()))


class _Stop(BaseException):
    """Leaves the program at its lowering; no Exception, so that nothing on the way catches it."""


@contextlib.contextmanager
def capture_graph() -> Iterator[CapturedGraph]:
    """Runs a program up to the first `mtf.Lowering(graph, ...)`, and leaves the block there.

    What follows in the block is skipped. Only the graph is kept, as it was before lowering. What other threads lower
    meanwhile is lowered as ever.

    Yields:
      CapturedGraph, whose `graph` is there after the block.
    """
    captured = CapturedGraph()

    def stop(self: mtf.Lowering, graph: mtf.Graph, mesh_to_impl: Mapping[mtf.Mesh, mtf.MeshImpl],
             autostack: bool = True, *_: object, **__: object) -> None:
        del self
        if not autostack:
            is_not_stacked(graph)
        captured._graph, captured.mesh_to_impl = graph, dict(mesh_to_impl)
        _OWN[graph] = _given(mesh_to_impl)
        raise _Stop

    # The class itself stays, since a program may have imported it by itself: only its __init__ is replaced.
    with contextlib.suppress(_Stop), replaced(mtf.Lowering, "__init__", lambda _: stop):
        yield captured


@dataclasses.dataclass
class SwappedLowering:
    """What was lowered with a layout per layer.

    Attributes:
      lowerings: in the order of the program.
      strategies: one per lowering.
    """

    lowerings: list[PlanLowering] = dataclasses.field(default_factory=list)
    strategies: list[Strategy] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
@checked_arguments
def swap_lowering(strategy: Strategy | None = None, *, devices: Sequence[str] | None = None,
                  machine: GivenMachine = LOCAL, method: str = "exact", **options: Any) -> Iterator[SwappedLowering]:
    """Within the block `mtf.Lowering(graph, {mesh: mesh_impl})` lowers every layer with its own layout.

    That of this thread: what other threads lower meanwhile is lowered as ever.

    Args:
      strategy: for the graph that will be lowered. By default it is searched for, at the moment of lowering.
      devices: names of the devices (default: those of the program's mesh implementation).
      machine: for the search: a Machine, the name of one, the path of its file or of one of kernel times, or "local"
        (None is the same), which is measured.
      method: of the search.
      **options: of the search (of `find_strategy`), such as prices="measured".

    Yields:
      SwappedLowering: the lowerings and their strategies.

    Raises:
      UsageError: one of `devices` is no name of a device; in the block, if the program's mesh implementation names no
        devices, or it lowers by a subclass of mtf.Lowering.
      MismatchError: in the block, if the strategy is of another graph.
      FormatError: in the block, if the file of the machine, or of kernel times, is missing, truncated or foreign.
    """
    swapped = SwappedLowering()
    device_specs(devices or ())

    def lower(self: mtf.Lowering, graph: mtf.Graph, mesh_to_impl: Mapping[mtf.Mesh, mtf.MeshImpl], *_: object,
              **__: object) -> None:
        if type(self) is not mtf.Lowering:
            raise UsageError(f"{type(self).__name__} is a subclass of mtf.Lowering with a lowering of its own; "
                             "use pase_mtf.lower where it is made")
        names = list(devices) if devices is not None else _devices_of(mesh_to_impl)
        if strategy is None:
            exported = export_graph(graph, sharded_updates=bool(options.get("sharded_updates")))
            chosen = _found(graph, exported, names, machine, method, options)
        else:
            exported, chosen = export_as(graph, strategy.graph_hash), strategy
            chosen.check_graph(exported)
        plan = plan_from_configurations(graph, exported, chosen.configurations, len(names))
        updates = updates_from_configurations(graph, exported, chosen.configurations)
        # The object that the program gets is a PlanLowering; it is an mtf.Lowering as well.
        self.__class__ = PlanLowering
        PlanLowering.__init__(self, graph, plan, names, updates=updates)
        swapped.lowerings.append(self)
        swapped.strategies.append(chosen)

    with replaced(mtf.Lowering, "__init__", lambda _: lower):
        yield swapped


def _found(graph: mtf.Graph, exported: ComputationGraph, names: Sequence[str], machine: GivenMachine,
           method: str, options: Mapping[str, Any]) -> Strategy:
    """The strategy of a graph that is about to be lowered over some devices."""
    kind = _kind_of(names)
    if options.get("prices") != "measured" and not is_kernel_file(machine):
        of_graph = {name: value for name, value in options.items() if name != "sharded_updates"}  # it has them
        listed = _listed(names, kind)
        loaded = (load_machine(machine, len(names), kind, over=listed) if listed else
                  load_machine(machine, len(names), kind))
        return find_strategy(exported, len(names), loaded, method, **of_graph)
    if kind != "cpu":
        raise UsageError("measured prices are those of CPUs only; take roofline prices, or devices of kind cpu")
    return find_strategy(graph, len(names), machine, method, **options)


def _kind_of(devices: Sequence[str]) -> str:
    """Of devices with these names: "gpu" where every one says so, otherwise "cpu"."""
    kinds = {spec.device_type for spec in device_specs(devices)}
    return "gpu" if kinds == {"GPU"} else "cpu"


def _listed(names: Sequence[str], kind: str) -> Devices | None:
    """Which GPUs of this process these are, where they are others than its first."""
    specs = device_specs(names)
    numbers = [spec.device_index for spec in specs]
    if kind != "gpu" or None in numbers or len(set(numbers)) < len(numbers) or any(
            spec.job not in (None, "localhost") or spec.task for spec in specs):
        return None
    listed = Devices(kind, tuple(f"/device:GPU:{number}" for number in numbers))
    if listed.names == Devices.first(len(names), kind).names or max(numbers) >= len(gpu_names()):
        return None
    return listed


def _devices_of(mesh_to_impl: Mapping[mtf.Mesh, mtf.MeshImpl]) -> list[str]:
    """The devices of the program's mesh implementations, which have to be placed on named ones."""
    found: list[str] = []
    for impl in mesh_to_impl.values():
        names = getattr(impl, "devices", None)
        if names is None or len(set(names)) != len(names):
            raise UsageError(f"the program's {type(impl).__name__} does not name a device for each of its {impl.size} "
                             "processors; give swap_lowering(devices=[...])")
        if len(names) > len(found):
            found = list(names)
    return found
