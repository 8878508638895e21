"""Strategies that people write by hand: data parallelism, one weird trick, a pipeline of recurrent layers, the
Mesh-TensorFlow transformer layout.

Sources: Krizhevsky 2014 ("One weird trick"), Wu et al. 2016 (GNMT), Shazeer et al. 2018 (Mesh-TensorFlow), and the
meshes that the PaSE paper compares with.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence

from pase_mtf.errors import InfeasibleError, UsageError, shortened
from pase_mtf.graph.computation_graph import ComputationGraph, Layer
from pase_mtf.graph.configurations import Configuration

__all__ = ["BY_HAND", "batch_dim", "by_hand", "configurations_of_layout", "data_parallel", "expert", "expert_axes",
           "most_devices", "start_by_hand", "zero"]

BY_HAND = ("data_parallel", "expert", "zero")
"""The strategies that are written down, not searched for."""

# rows x columns of the Mesh-TensorFlow transformer's mesh, for the numbers of devices that the paper lists.
_TRANSFORMER_MESHES = {2: (2, 1), 4: (4, 1), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8)}
_TRANSFORMER_COLUMNS = ("heads", "d_ff", "vocab")
_IN_ITS_BLOCKS = ("heads", "d_ff")
# The dims of recurrent layers that stand on top of each other, or side by side.
_RECURRENT = ("layers", "directions")


def batch_dim(graph: ComputationGraph) -> str:
    """The name of the dim that data parallelism splits: "batch", or else the outermost dim of most layers.

    Raises:
      InfeasibleError: no layer has a dim that can be split.
    """
    counts: dict[str, int] = {}
    updating = _updating(graph)
    for number, layer in enumerate(graph.layers):
        if number in updating:
            continue
        if "batch" in layer.splittable:
            return "batch"
        for name in layer.splittable[:1]:
            counts[name] = counts.get(name, 0) + 1
    if not counts:
        raise InfeasibleError(f"{graph.name}: no layer has a dim that can be split; name the dims of its tensors")
    return max(counts, key=counts.__getitem__)


def configurations_of_layout(graph: ComputationGraph, mesh: Sequence[tuple[str, int]],
                             rules: Mapping[str, str]) -> tuple[Configuration, ...]:
    """What one mesh shape and one set of layout rules, the same for the whole graph, make of every layer.

    Args:
      graph: the computation graph.
      mesh: (axis name, size), outermost first.
      rules: dim name -> axis name. Dims of a layer that cannot be split by its axis (not splittable, not divisible,
        axis taken by an earlier dim of the layer) stay whole: the layer is replicated over that axis. A layer that
        updates the weights of another is split as that one.

    Returns:
      A configuration per layer.
    """
    result = []
    for layer in graph.layers:
        axes: list[tuple[str, int]] = []
        for axis, size in mesh:
            if size == 1:
                continue
            taken = [name for name, _ in axes]
            fitting = [name for name in layer.splittable
                       if rules.get(name) == axis and layer.dims[name] % size == 0 and name not in taken]
            axes.append((fitting[0] if fitting else "", size))
        result.append(Configuration(tuple(axes)))
    return _updated_in_place(graph, result)


def _updating(graph: ComputationGraph) -> dict[int, int]:
    """Layers that compute the new values of another layer's weights -> that other layer."""
    number = {layer.name: index for index, layer in enumerate(graph.layers)}
    return {number[variable.updated_by]: owner for owner, layer in enumerate(graph.layers)
            for variable in layer.variables if variable.updated_by}


def _updated_in_place(graph: ComputationGraph, configurations: Sequence[Configuration]) -> tuple[Configuration, ...]:
    """The configurations, with those of layers that update weights such that every device updates what it holds."""
    result = list(configurations)
    for number, owner in _updating(graph).items():
        layer, split = graph.layers[number], configurations[owner]
        result[number] = Configuration(tuple(
            (name if name in layer.splittable and layer.dims[name] % split.shards(name) == 0 else "", size)
            for name, size in split.axes))
    return tuple(result)


def zero(graph: ComputationGraph, devices: int) -> tuple[Configuration, ...]:
    """Data parallelism in which every device updates a part of the weights, and keeps the optimizer's slots of that
    part alone (ZeRO, stage 1; Rajbhandari et al. 2020).

    Args:
      graph: a computation graph with updates as layers.
      devices: p.

    Raises:
      InfeasibleError: no layer's batch divides by the number of devices, or no layer of the graph is an update.
    """
    result, updating = list(data_parallel(graph, devices)), _updating(graph)
    if not updating:
        raise InfeasibleError(f"{graph.name}: no layer of this graph updates another's weights: it was exported "
                              "without sharded_updates=True (--sharded_updates of the launcher), or no update of it "
                              "can be a layer of its own; take data_parallel")
    for number in updating:
        layer, axes, left = graph.layers[number], list[tuple[str, int]](), devices
        for name in sorted(layer.splittable, key=lambda name: -layer.dims[name]):
            shards = math.gcd(layer.dims[name], left)
            axes += [(name, shards)] if shards > 1 else []
            left //= shards
        result[number] = Configuration((*axes, ("", left)) if left > 1 else tuple(axes))
    return tuple(result)


def data_parallel(graph: ComputationGraph, devices: int) -> tuple[Configuration, ...]:
    """The batch split over all devices, everything without a batch replicated.

    Raises:
      InfeasibleError: no layer's batch divides by the number of devices.
    """
    name = batch_dim(graph)
    result = configurations_of_layout(graph, [("all", devices)], {name: "all"})
    if devices > 1 and not any(configuration.splits for configuration in result):
        size = max(layer.dims.get(name, 0) for layer in graph.layers)
        raise InfeasibleError(f"data parallelism: {name}={size} does not divide by {devices} devices; take a batch "
                              f"that is a multiple of {devices}, in every microbatch")
    return result


def expert(graph: ComputationGraph, devices: int,
           mesh: Sequence[tuple[str, int]] | None = None) -> tuple[Configuration, ...]:
    """What an expert would write by hand for this graph.

    Networks with attention heads: the Mesh-TensorFlow transformer layout, batch on one mesh axis, heads, d_ff and
    vocabulary on the other. Recurrent networks: every recurrent layer on devices of its own, a pipeline, and as many
    such pipelines as there are devices for, each with a part of the batch; the rest is data parallel. All others: one
    weird trick, the batch split up to the first fully connected layer, from there on the out-channels.

    Args:
      graph: the computation graph.
      devices: p.
      mesh: two axes (name, size): the batch's, then the other's, for the transformer's layout (default: the paper's
        mesh, or the squarest that the sizes split over); other networks have none (`expert_axes`).

    Raises:
      InfeasibleError: the batch does not split over this many devices, or an axis of the transformer's mesh splits
        nothing of its blocks.
      UsageError: the mesh needs more devices than there are, has other than two axes, or the network has none.
    """
    if mesh is not None and expert_axes(graph, mesh) is None:
        raise UsageError(f"mesh={shortened(mesh)}: " + (
            "the transformer's layout has two axes, the batch's and another; give two" if _has_heads(graph) else
            f"{shortened(graph.name)} has no attention heads, and other networks no such mesh; leave it out"))
    if _has_heads(graph):
        if mesh is None:
            return _squarest_transformer_layout(graph, devices)
        rows, columns = mesh[0][1], mesh[1][1]
        if rows * columns > devices:
            raise UsageError(f"mesh={shortened(mesh)}: needs {rows * columns} devices, there are {devices}; give axes "
                             "for no more")
        return _transformer_layout(graph, rows, columns)
    if any(name in layer.splittable for layer in graph.layers for name in _RECURRENT):
        return _updated_in_place(graph, _pipelines(graph, devices))
    return _updated_in_place(graph, _one_weird_trick(graph, devices))


def _has_heads(graph: ComputationGraph) -> bool:
    return any("heads" in layer.dims for layer in graph.layers)


def expert_axes(graph: ComputationGraph, axes: Sequence[tuple[str, int]]) -> Sequence[tuple[str, int]] | None:
    """The axes of a mesh that was named for a whole run, where `expert` has a use for them: two, for a network with
    attention heads. None: it makes its own choice.

    Args:
      graph: the computation graph.
      axes: (name, size) each.
    """
    return axes if len(axes) == 2 and _has_heads(graph) else None


def by_hand(graph: ComputationGraph, devices: int, name: str,
            mesh: Sequence[tuple[str, int]] | None = None) -> tuple[Configuration, ...]:
    """One of `BY_HAND`, a configuration per layer.

    Args:
      graph: the computation graph.
      devices: p.
      name: of `BY_HAND`.
      mesh: of `expert`.

    Raises:
      InfeasibleError, UsageError: as of the function of that name.
    """
    if name == "expert":
        return expert(graph, devices, mesh)
    return zero(graph, devices) if name == "zero" else data_parallel(graph, devices)


def most_devices(write: Callable[[ComputationGraph, int], object], graph: ComputationGraph, devices: int) -> int:
    """The largest number of devices, of at most p, for which a strategy can be written by hand; 1 where there is none.

    Args:
      write: `data_parallel`, `expert`, ...: raises InfeasibleError where there is none for so many.
      graph: the computation graph.
      devices: p.
    """
    for count in range(devices, 1, -1):
        try:
            write(graph, count)
        except InfeasibleError:
            continue
        return count
    return 1


def start_by_hand(graph: ComputationGraph, devices: int, name: str,
                  mesh: Sequence[tuple[str, int]] | None = None) -> tuple[Configuration, ...]:
    """Where a search that improves a strategy begins: `by_hand`, over fewer devices where there is none for all; the
    search is free to take the others.

    Args:
      graph, devices, name, mesh: of `by_hand`.

    Raises:
      InfeasibleError, UsageError: as of `by_hand`, where that is for no want of devices.
    """
    try:
        return by_hand(graph, devices, name, mesh)
    except InfeasibleError:
        if mesh is not None:  # one that is named is taken as it is: fewer devices are no help
            raise
        write = functools.partial(by_hand, name=name)
        return by_hand(graph, most_devices(write, graph, devices), name)


def _transformer_layout(graph: ComputationGraph, rows: int, columns: int) -> tuple[Configuration, ...]:
    name = batch_dim(graph)
    rules = {name: "rows", **dict.fromkeys(_TRANSFORMER_COLUMNS, "columns")}
    result = configurations_of_layout(graph, [("rows", rows), ("columns", columns)], rules)
    split = {dim for configuration in result for dim in configuration.splits}
    if (rows > 1 and name not in split) or (columns > 1 and split.isdisjoint(_IN_ITS_BLOCKS)):
        sizes = {dim: max(layer.dims.get(dim, 0) for layer in graph.layers) for dim in (name, *_IN_ITS_BLOCKS)}
        raise InfeasibleError(f"the transformer's layout: no splitting {name}={sizes[name]} by {rows} and "
                              f"{' or '.join(f'{dim}={sizes[dim]}' for dim in _IN_ITS_BLOCKS)} by {columns}; take "
                              "another mesh or batch")
    return result


def _pipelines(graph: ComputationGraph, devices: int) -> tuple[Configuration, ...]:
    batch, result = batch_dim(graph), []
    for layer, by_batch in zip(graph.layers, data_parallel(graph, devices), strict=True):
        name = next((name for name in _RECURRENT if name in layer.splittable), "")
        stages = math.gcd(layer.dims[name], devices) if name else 1
        if stages == 1:
            result.append(by_batch)
            continue
        # The devices of one pipeline are neighbours.
        pipelines = math.gcd(layer.dims[batch], devices // stages) if batch in layer.splittable else 1
        axes = (("", devices // stages // pipelines), (batch, pipelines), (name, stages))
        result.append(Configuration(tuple(axis for axis in axes if axis[1] > 1)))
    return tuple(result)


def _squarest_transformer_layout(graph: ComputationGraph, devices: int) -> tuple[Configuration, ...]:
    """The layout on the paper's mesh or, of the others, on the squarest that the sizes of the graph split over."""
    first: InfeasibleError | None = None
    for rows, columns in _transformer_meshes(devices):
        try:
            return _transformer_layout(graph, rows, columns)
        except InfeasibleError as error:
            first = first or error
    assert first is not None  # there is a mesh for every number of devices
    raise first


def _transformer_meshes(devices: int) -> list[tuple[int, int]]:
    """The paper's mesh, where it has one, then all others, the squarest first."""
    short = [n for n in range(math.isqrt(devices), 0, -1) if devices % n == 0]
    return [*([_TRANSFORMER_MESHES[devices]] if devices in _TRANSFORMER_MESHES else []),
            *(mesh for n in short for mesh in ((n, devices // n), (devices // n, n)))]


def _one_weird_trick(graph: ComputationGraph, devices: int) -> tuple[Configuration, ...]:
    batch = data_parallel(graph, devices)
    result: list[Configuration] = []
    columns: list[str] = []  # the out-channel dims of the fully connected layers so far
    for layer, by_batch in zip(graph.layers, batch, strict=True):
        out = _out_dim(layer)
        if out:
            columns.append(out)
        mine = out or next((name for name in reversed(columns) if name in layer.splittable), "")
        result.append(_split_as_far_as_possible(layer, mine, devices) if mine else by_batch)
    return tuple(result)


def _out_dim(layer: Layer) -> str:
    """The out-channel dim of a fully connected layer: its weight's and its output's, not its input's."""
    if layer.kind != "matmul":
        return ""
    weights = {name for variable in layer.variables if variable.trainable for name in variable.operand.dims if name}
    for operation in layer.operations:
        if operation.phase == "forward" and operation.kind == "matmul":
            outputs = {name for operand in operation.outputs for name in operand.dims}
            found = [name for name in weights & outputs if name in layer.splittable]
            return max(sorted(found), key=layer.dims.__getitem__, default="")
    return ""


def _split_as_far_as_possible(layer: Layer, name: str, devices: int) -> Configuration:
    shards = math.gcd(layer.dims[name], devices)
    axes = [(name, shards)] if shards > 1 else []
    if shards < devices:
        axes.append(("", devices // shards))
    return Configuration(tuple(axes))
