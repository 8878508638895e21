"""What each device did when, in a step that TensorFlow traced: in the form of a step that was simulated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from pase_mtf.compat import mtf, tf
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.launch.arms.memory import short_device
from pase_mtf.lowering.lowering import PlanLowering
from pase_mtf.lowering.nodes import IDLE_NODES
from pase_mtf.lowering.reshard import ALL_REDUCE, RESHARDING
from pase_mtf.operations.flow import all_operations
from pase_mtf.simulator.timeline import Slice, Timeline

__all__ = ["Work", "fallen_to_cpu", "timeline_of", "traced_slices", "works_of"]

_NANOSECONDS = 1e-9
_COPYING = ("Split", "SplitV", "Slice", "ConcatV2", "AddN")
"""What makes the pieces that are sent, and puts them together."""


class Work(NamedTuple):
    """What nodes are made for.

    Attributes:
      layer: name of the layer.
      phase: "forward", "backward" or "update".
    """

    layer: str
    phase: str


def works_of(graph: ComputationGraph, program: mtf.Graph, lowering: mtf.Lowering) -> dict[str, Work]:
    """Name scope, without its "/" -> what the nodes in it are made for; nothing of stock Mesh-TensorFlow's lowering,
    whose nodes do not tell.

    Args:
      graph: exported from the program.
      program: of Mesh-TensorFlow.
      lowering: of it.
    """
    if not isinstance(lowering, PlanLowering):
        return {}
    operations = all_operations(program)
    # An assignment stands in every layer whose variables it sets: the first counts.
    works = {operations[entry.index]: Work(layer.name, entry.phase)
             for layer in reversed(graph.layers) for entry in layer.operations}
    return {scope.rstrip("/"): works[operation] for scope, operation in lowering.scopes.items() if operation in works}


def traced_slices(metadata: tf.RunMetadata, works: Mapping[str, Work], devices: Mapping[str, int], *,
                  apart: bool = False, since: int = 0) -> list[Slice]:
    """What the devices did in a step as it was traced: every node from when its computation began until it ended, in
    seconds.

    What waits for a core between two nodes is not seen, nor is what devices send each other where they share memory.

    Args:
      metadata: of a run with FULL_TRACE.
      works: name scope -> what its nodes are made for (`works_of`).
      devices: short name of a device (`memory.short_device`) -> its number.
      apart: whether they have memory of their own: what slices and concatenates is told from what is sent, as it is in
        a step that was simulated.
      since: from when on these are counted, in nanoseconds since the epoch; seconds since then, as floats, are rounded
        to a quarter of a microsecond.
    """
    return [Slice(_kind(node, work, operation if apart else ""), work.phase, work.layer, device, device, begin, end)
            for device, node, operation, begin, end in _nodes(metadata, devices, since)
            if (work := _owner(node, works)) is not None]


def timeline_of(slices: Sequence[Slice], devices: int, name: str) -> Timeline:
    """A step that begins with the first of these slices.

    Args:
      slices: of `traced_slices`.
      devices: how many there are.
      name: of the step, for people.
    """
    start = min((one.begin for one in slices), default=0.0)
    ordered = sorted((one._replace(begin=one.begin - start, end=one.end - start) for one in slices),
                     key=lambda one: (one.begin, one.device))
    return Timeline(name, devices, max((one.end for one in ordered), default=0.0), tuple(ordered))


def _nodes(metadata: tf.RunMetadata, devices: Mapping[str, int],
           since: int) -> Iterator[tuple[int, str, str, float, float]]:
    """(device, name, TensorFlow's operation, begin, end in seconds) of every node that computes."""
    for device in metadata.step_stats.dev_stats:
        number = devices.get(short_device(device.device))
        if number is None:
            continue
        for node in device.node_stats:
            if (kind := _type_of(node)) not in IDLE_NODES:
                start = node.all_start_nanos - since  # whole numbers, before they are floats
                begin, end = (start + when for when in (node.op_start_rel_nanos, node.op_end_rel_nanos))
                yield number, node.node_name, kind, _NANOSECONDS * begin, _NANOSECONDS * end


def fallen_to_cpu(metadata: tf.RunMetadata, graph: tf.Graph) -> list[str]:
    """The types of operations that a graph puts on GPUs and that ran on a CPU in a traced step, for want of a kernel:
    what they read and make is copied there and back.

    Args:
      metadata: of a run with FULL_TRACE.
      graph: that was run.
    """
    on_gpus = {operation.name for operation in graph.get_operations() if "GPU:" in operation.device}
    ran = [node for device in metadata.step_stats.dev_stats if "CPU:" in short_device(device.device)
           for node in device.node_stats if on_gpus]
    return sorted({kind for node in ran
                   if node.node_name in on_gpus and (kind := _type_of(node)) and kind not in IDLE_NODES})


def _type_of(node: tf.NodeExecStats) -> str:
    """TensorFlow's name of a node's operation, of its label: "name = AddN(first, second)"."""
    return node.timeline_label.partition(" = ")[2].partition("(")[0]


def _owner(node: str, works: Mapping[str, Work]) -> Work | None:
    """What a node is made for: the innermost scope that is known."""
    scope = node
    while scope:
        scope = scope.rpartition("/")[0]
        if scope in works:
            return works[scope]
    return None


def _kind(node: str, work: Work, operation: str) -> str:
    """The kind of a slice (`simulator.slots.KINDS`), by the name scope that the lowering gives it, and what it is."""
    words = {word.rpartition("_")[0] if word.rpartition("_")[2].isdigit() else word for word in node.split("/")}
    if RESHARDING in words:
        return "copying" if operation in _COPYING else "resharding"
    if ALL_REDUCE in words:
        # A sum is made for who reads it first: of gradients of weights that is the update, of others the backward pass.
        # (What an update sums besides, the means of Adafactor, is called so, too.)
        return "gradient all-reduce" if work.phase == "update" else "all-reduce"
    return "kernels"
