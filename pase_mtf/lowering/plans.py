"""Plans: the mesh of every operation of a graph, and of the new values of variables."""

from __future__ import annotations

from collections.abc import Sequence

from pase_mtf.compat import mtf
from pase_mtf.errors import MismatchError
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.graph.configurations import Configuration
from pase_mtf.lowering.mesh_spec import Layout, MeshShape, MeshSpec, specs_of_layers
from pase_mtf.operations.flow import all_operations
from pase_mtf.operations.registry import rule_of, splittable_dims

__all__ = ["legal_spec", "plan_from_configurations", "uniform_plan", "updates_from_configurations"]


def legal_spec(spec: MeshSpec, operation: mtf.Operation) -> MeshSpec:
    """The spec with only the layout rules that the operation supports; the other dims stay whole.

    Rules for dims that the operation does not have are kept: then operations of one layer share one implementation.
    """
    spaces = rule_of(operation).spaces(operation)
    names = {dim.name for space in spaces for dim in space}
    if not any(names & axis for axis, _ in spec.axes):
        return spec
    allowed = splittable_dims(operation)
    axes = []
    for axis, parts in spec.axes:
        kept = {name for name in axis if name not in names or name in allowed}
        kept -= {dim.name for space in spaces for dim in space if dim.size % parts}
        for space in spaces:
            mine = [dim.name for dim in space if dim.name in kept]
            kept -= set(mine) - set(mine[:1])
        axes.append((axis if len(kept) == len(axis) else frozenset(kept), parts))
    return MeshSpec(tuple(axes), spec.devices)


def plan_from_configurations(graph: mtf.Graph, computation_graph: ComputationGraph,
                             configurations: Sequence[Configuration], devices: int,
                             ) -> dict[mtf.Operation, MeshSpec]:
    """The plan in which every operation of a layer has the mesh of the layer's configuration.

    Axis i of a configuration becomes mesh axis i, on devices 0, 1, ...

    Args:
      graph: the Mesh-TF graph that was exported.
      computation_graph: what export_graph made of it.
      configurations: one per layer.
      devices: number of devices there are.

    Raises:
      MismatchError: another number of configurations than layers, or another graph.
      InfeasibleError: a configuration splits a dim that its layer cannot split, or not evenly, or needs more devices.
    """
    operations = all_operations(graph)
    if computation_graph.operations != len(operations):
        raise MismatchError(f"the exported graph has {computation_graph.operations} operations, this one "
                            f"{len(operations)}; export it again")
    plan = {}
    specs = specs_of_layers(computation_graph, configurations, range(devices))
    for layer, spec in zip(computation_graph.layers, specs, strict=True):
        for operation in layer.operations:
            plan[operations[operation.index]] = spec
    return plan


def uniform_plan(graph: mtf.Graph, mesh_shape: MeshShape, layout: Layout, devices: Sequence[str],
                 ) -> dict[mtf.Operation, MeshSpec]:
    """The plan that gives every operation the same layout: what mtf.Lowering does.

    Args:
      graph: the Mesh-TF graph.
      mesh_shape: such as "rows:2;cols:4".
      layout: such as "batch:rows;d_ff:cols".
      devices: as many as the mesh has processors.
    """
    spec = MeshSpec.of_layout(mesh_shape, layout, range(len(devices)))
    return dict.fromkeys(graph.operations, spec)


def updates_from_configurations(graph: mtf.Graph, computation_graph: ComputationGraph,
                                configurations: Sequence[Configuration]) -> dict[mtf.Variable, MeshSpec]:
    """Variables whose new value another layer than their own computes, and the mesh of that layer's configuration.

    Args:
      graph, computation_graph, configurations: as of `plan_from_configurations`.
    """
    layers = {layer.name: (layer, configuration) for layer, configuration in zip(
        computation_graph.layers, configurations, strict=True)}
    updated_by = {variable.name: variable.updated_by for layer in computation_graph.layers
                  for variable in layer.variables if variable.updated_by}
    found = {}
    for variable in graph.all_variables:
        if variable.name in updated_by:
            layer, configuration = layers[updated_by[variable.name]]
            found[variable] = MeshSpec.of_configuration(configuration, layer.aliases)
    return found
