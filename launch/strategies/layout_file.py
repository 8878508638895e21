"""layout.txt: the strategy of a run in the words of plain Mesh-TensorFlow, one mesh shape and one set of rules.

Where the layers of a strategy do not agree on one mesh, it lists the layout of every layer, and beside them the best
that one mesh can do, with what that costs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from pase_mtf.compat import mtf, tf
from pase_mtf.errors import InfeasibleError
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.graph.configurations import Configuration
from pase_mtf.launch.arms.program import program_of, variables_by_name
from pase_mtf.launch.console import Stage
from pase_mtf.launch.plan import Plan
from pase_mtf.layout.find import find_layout
from pase_mtf.layout.layout import LayoutCost
from pase_mtf.machine.machine import Machine
from pase_mtf.pipeline.pipeline import Pipeline
from pase_mtf.strategy.experts import configurations_of_layout
from pase_mtf.strategy.measured import MeasuredPrices
from pase_mtf.strategy.strategy import Strategy, evaluate_strategy

__all__ = ["best_single_layout", "layout_of_run", "layout_text", "pipeline_text", "single_mesh"]

_Mesh = list[tuple[str, int]]
_NOTHING = '""'


def layout_of_run(plan: Plan, graph: ComputationGraph, machine: Machine, strategy: Strategy,
                  prices: MeasuredPrices | None = None) -> str:
    """The text of layout.txt for the trained strategy of a run.

    Args:
      plan: of the run.
      graph: of its program.
      machine: whose numbers count.
      strategy: the one that is trained.
      prices: those of measured kernels, which the strategy has.
    """
    beside = ""
    if single_mesh(graph, strategy.configurations, strategy.devices) is None:
        with Stage("best single layout"):
            single = best_single_layout(plan, machine)
            if isinstance(single, str):
                beside = f"# And no single mesh would do: {single}"
            else:
                beside = _beside(single, *_steps(single, graph, machine, strategy, prices))
    return layout_text(graph, strategy.configurations, strategy.devices, strategy.name, beside)


def best_single_layout(plan: Plan, machine: Machine) -> LayoutCost | str:
    """The best layout of the program of a run that one mesh expresses, within its limit of memory; or why there is
    none.

    Args:
      plan: of the run.
      machine: whose numbers count.
    """
    limit = plan.options.bytes_per_device(machine)
    with tf.Graph().as_default(), variables_by_name():
        program = program_of(plan)
        try:
            return find_layout(program.graph, plan.devices.count, [program.loss], machine, alternatives=0,
                               memory_limit=None if math.isinf(limit) else limit, name=plan.options.model).best
        except InfeasibleError as error:
            return str(error)


def _steps(single: LayoutCost, graph: ComputationGraph, machine: Machine, strategy: Strategy,
           prices: MeasuredPrices | None) -> tuple[str, float, float]:
    """How steps are told, and the seconds of a single layout's and of the strategy's: by what chose the strategy."""
    mesh = [(dim.name, dim.size) for dim in mtf.convert_to_shape(single.mesh_shape).dims]
    rules = dict(mtf.convert_to_layout_rules(single.layout_rules)._pairs)
    laid_out = configurations_of_layout(graph, mesh, rules)
    if prices is not None:  # what it costs by a roofline says nothing beside what kernels take; none is measured for it
        return "predicted", prices.evaluate(laid_out, "layout", seconds=0.0).seconds, strategy.seconds
    if strategy.simulated_seconds is not None:
        layout = evaluate_strategy(graph, laid_out, strategy.devices, machine, name="layout")
        if layout.simulated_seconds is not None:
            return "simulated", layout.simulated_seconds, strategy.simulated_seconds
    return "predicted", single.seconds, strategy.seconds


def _beside(single: LayoutCost, told: str, seconds: float, ours: float) -> str:
    """The best single layout as comments of layout.txt."""
    return (f"# The best that one mesh can do is {told} {1e3 * seconds:.3f} ms a step, "
            f"{seconds / ours:.2f} times this strategy's {1e3 * ours:.3f} ms:\n"
            f"# mesh_shape = {single.mesh_shape}\n# layout = {single.layout_rules or _NOTHING}")


def single_mesh(graph: ComputationGraph, configurations: Sequence[Configuration],
                devices: int) -> tuple[_Mesh, dict[str, str]] | None:
    """The one mesh shape and the one set of layout rules that put every tensor where this strategy puts it: over all
    devices, or over the first few where all layers leave the others idle.

    Plain Mesh-TF splits a dim of a given name wherever it occurs, by the one axis its rule names, so the layers have to
    agree: the same factorisation of the devices, the same axis per dim name, and no layer that replicates a dim with a
    rule.

    Args:
      graph, configurations: the strategy.
      devices: p.

    Returns:
      (mesh as (axis name, size), outermost first; dim name -> axis name), or None where the layers do not agree.
    """
    # A mesh axis is an interval of strides: from how many devices share a part, to how many a whole round takes.
    devices = min(devices, max((configuration.devices for configuration in configurations), default=devices))
    boundaries = {1, devices}
    splits: list[dict[str, tuple[int, int]]] = []
    for layer, configuration in zip(graph.layers, configurations, strict=True):
        if configuration.devices != devices:
            return None
        strides = configuration.strides
        split = {dim: (strides[dim], strides[dim] * shards) for dim, shards in configuration.splits.items()}
        # A renamed dim is laid out like the one it was renamed from: its name needs the same rule.
        split.update({other: split[dim] for other, dim in layer.aliases.items() if dim in split})
        splits.append(split)
        boundaries.update(*splits[-1].values())
    cuts = sorted(boundaries)
    if any(high % low for low, high in itertools.pairwise(cuts)):
        return None
    axes = {(low, high): f"axis_{number}"
            for number, (low, high) in enumerate(reversed(list(itertools.pairwise(cuts))))}
    rules: dict[str, str] = {}
    for split in splits:
        for dim, interval in split.items():
            if interval not in axes or rules.setdefault(dim, axes[interval]) != axes[interval]:
                return None
    for layer, split in zip(graph.layers, splits, strict=True):
        if any(dim in rules and dim not in split for dim in (*layer.dims, *layer.aliases)):
            return None
    return [(name, high // low) for (low, high), name in axes.items()], rules


def layout_text(graph: ComputationGraph, configurations: Sequence[Configuration], devices: int, name: str,
                beside: str = "") -> str:
    """The text of layout.txt.

    Args:
      graph, configurations: the strategy.
      devices: p.
      name: of the strategy, for people.
      beside: comments on what one mesh could do instead, for a strategy that needs more than one.
    """
    head = f"# strategy {name}, {devices} devices, graph {graph.name} ({graph.hash})\n"
    found = single_mesh(graph, configurations, devices)
    if found:
        mesh, rules = found
        used = math.prod(size for _, size in mesh)
        which = "" if used == devices else f" over the first {used} of them, while the others idle,"
        return (head + f"# One mesh{which} expresses it; hand these to mtf.placement_mesh_impl.PlacementMeshImpl.\n"
                f"mesh_shape = {_join(mesh)}\nlayout = {_join(sorted(rules.items()))}\n")
    lines = [head + "# No single mesh expresses it: every layer has its own (pase_mtf.lower puts them together).\n"
             "# Axes are numbered per layer, outermost first; devices 0..n-1 lie row-major over them.",
             *([beside] if beside else [])]
    lines += [_line(layer.name, configuration, layer.aliases)
              for layer, configuration in zip(graph.layers, configurations, strict=True)]
    return "\n".join(lines) + "\n"


def pipeline_text(pipeline: Pipeline) -> str:
    """The text of layout.txt for a pipeline.

    Args:
      pipeline: that is trained.
    """
    lines = [f"# pipeline, {pipeline.devices} devices, {pipeline.microbatches} microbatches, graph "
             f"{pipeline.graph_name} ({pipeline.graph_hash})\n"
             "# No mesh expresses it: layers of different stages lie on different devices.\n"
             "# Axes are numbered per layer, outermost first; the devices of its stage lie row-major over them."]
    for number, stage in enumerate(pipeline.stages, 1):
        lines.append(f"# stage {number}: devices {stage.offset} to {stage.offset + stage.devices - 1}")
        lines += map(_line, pipeline.layer_names[stage.first:stage.stop],
                     pipeline.configurations[stage.first:stage.stop])
    return "\n".join(lines) + "\n"


def _line(name: str, configuration: Configuration, aliases: Mapping[str, str] = MappingProxyType({})) -> str:
    """The mesh and the rules of one layer; rules of what its dims are renamed to, too, as far as that is known."""
    mesh = [(f"axis_{number}", size) for number, (_, size) in enumerate(configuration.axes)]
    rules = [(one, axis) for (dim, _), (axis, _) in zip(configuration.axes, mesh, strict=True) if dim
             for one in (dim, *(other for other, same in aliases.items() if same == dim))]
    return f"{name}: mesh_shape = {_join(mesh)}  layout = {_join(rules)}"


def _join(pairs: Sequence[tuple[str, object]]) -> str:
    return ";".join(f"{first}:{second}" for first, second in pairs) or _NOTHING
