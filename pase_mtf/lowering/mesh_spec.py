"""What a mesh implementation is made from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from pase_mtf.compat import mtf, placement_mesh_impl, tf
from pase_mtf.errors import InfeasibleError, MismatchError, UsageError
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.graph.configurations import Configuration

__all__ = ["Layout", "MeshShape", "MeshSpec", "specs_of_layers"]

MeshShape: TypeAlias = "str | mtf.Shape | Sequence[mtf.Dimension]"
"""What Mesh-TF takes for the shape of a mesh, such as "rows:2;cols:4"."""

Layout: TypeAlias = "str | mtf.LayoutRules | Sequence[tuple[str, str]]"
"""What Mesh-TF takes for layout rules, such as "batch:rows;d_ff:cols"."""


@dataclasses.dataclass(frozen=True)
class MeshSpec:
    """What a mesh implementation is made from; equal specs share one implementation object.

    Attributes:
      axes: (names of the dims laid out on the axis, size) per mesh axis, outermost first.
      devices: the device number of every processor, row-major over the axes.
    """

    axes: tuple[tuple[frozenset[str], int], ...]
    devices: tuple[int, ...]

    @classmethod
    def of_configuration(cls, configuration: Configuration, aliases: Mapping[str, str] | None = None) -> MeshSpec:
        """The mesh of a layer: an axis per axis of its configuration, on the first devices.

        Args:
          configuration: of the layer.
          aliases: other dim name -> dim of the layer that it is laid out like (`Layer.aliases`).
        """
        axes = []
        for name, size in configuration.axes:
            others = [other for other, dim in (aliases or {}).items() if dim == name]
            axes.append((frozenset([name, *others] if name else []), size))
        return cls(tuple(axes), tuple(range(configuration.devices)))

    @classmethod
    def of_layout(cls, mesh_shape: MeshShape, layout: Layout, devices: Sequence[int]) -> MeshSpec:
        """What Mesh-TF users write: mesh shape ("rows:2;cols:4") and layout rules ("batch:rows;d_ff:cols").

        Args:
          mesh_shape: anything that converts to a mtf.Shape.
          layout: anything that converts to mtf.LayoutRules.
          devices: the device number of every processor.

        Raises:
          UsageError: the mesh has another number of processors.
        """
        shape, rules = mtf.convert_to_shape(mesh_shape), mtf.convert_to_layout_rules(layout)
        if shape.size != len(devices):
            raise UsageError(f"a mesh of {shape.size} processors on {len(devices)} devices; give as many devices")
        axes = tuple(
            (frozenset(rules.mesh_dimension_name_to_tensor_dimension_names(dim.name)), dim.size) for dim in shape.dims)
        return cls(axes, tuple(devices))

    @classmethod
    def of_mesh_impl(cls, mesh_impl: placement_mesh_impl.PlacementMeshImpl, devices: Sequence[str]) -> MeshSpec:
        """The spec of a placement mesh implementation of anybody's, its devices found by name.

        Raises:
          UsageError: a device of the mesh is not in the list.
        """
        known = getattr(mesh_impl, "spec", None)
        if isinstance(known, cls):
            return known
        numbers = {_in_full(name): number for number, name in reversed(list(enumerate(devices)))}
        for name in mesh_impl.devices:
            if _in_full(name) not in numbers:
                raise UsageError(f"mesh device {name!r} is not among the devices of the lowering; add it to `devices`")
        used = tuple(numbers[_in_full(name)] for name in mesh_impl.devices)
        if len(set(used)) != len(used):
            used = tuple(range(len(used)))
        return cls.of_layout(mesh_impl.shape, mesh_impl.layout_rules, used)


def _in_full(device: str) -> str:
    """A device's name as TensorFlow's runtime writes it, so that /cpu:0 is /device:CPU:0; what is no name, as it is."""
    try:
        return str(tf.DeviceSpec.from_string(device).to_string())
    except (TypeError, ValueError, AttributeError):
        return device


def specs_of_layers(computation_graph: ComputationGraph, configurations: Sequence[Configuration],
                    *groups: Sequence[int]) -> list[MeshSpec]:
    """The mesh of every layer's configuration: axis i becomes mesh axis i, on the first devices of the layer's group.

    Args:
      computation_graph: what export_graph made of a graph.
      configurations: one per layer.
      groups: numbers of devices, one group per layer; or one for all.

    Raises:
      MismatchError, InfeasibleError: of `plan_from_configurations`.
    """
    layers = computation_graph.layers
    if len(layers) != len(configurations):
        raise MismatchError(f"{len(configurations)} configurations for {len(layers)} layers; search again for this "
                            "graph")
    found = []
    for layer, configuration, group in zip(layers, configurations, groups * (len(layers) if len(groups) == 1 else 1),
                                           strict=True):
        if configuration.devices > len(group):
            raise InfeasibleError(f"layer {layer.name!r} is configured for {configuration.devices} devices, there are "
                                  f"{len(group)}; give more devices or search again")
        for name, shards in configuration.splits.items():
            if name not in layer.splittable:
                raise InfeasibleError(f"layer {layer.name!r} cannot split dim {name!r}; it can split: "
                                      f"{', '.join(layer.splittable) or 'nothing'}")
            if layer.dims[name] % shards:
                raise InfeasibleError(f"layer {layer.name!r}: dim {name!r} of size {layer.dims[name]} does not split "
                                      f"into {shards} shards; choose a divisor")
        spec = MeshSpec.of_configuration(configuration, layer.aliases)
        found.append(dataclasses.replace(spec, devices=tuple(group[number] for number in spec.devices)))
    return found
