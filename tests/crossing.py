"""Prices in bytes, and the bytes that cross devices in the graph that a program is lowered to: what prices are held to.

On `BYTES` nothing takes time but bytes on the way, a second each: what is predicted is what a device receives.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple
from unittest import mock

import harness

from pase_mtf.compat import mtf, tf
from pase_mtf.cost import collectives
from pase_mtf.export.exporter import export_graph
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.graph.configurations import Configuration
from pase_mtf.layout.find import find_layout
from pase_mtf.lowering.lowering import PlanLowering
from pase_mtf.lowering.plans import plan_from_configurations
from pase_mtf.machine.machine import KINDS, Link, Machine
from pase_mtf.strategy.strategy import evaluate_strategy

BYTES = Machine("bytes", dict.fromkeys(KINDS, 1e30), 1e30, 1e30, 0.0, (Link(64, 1.0, 0.0),))

Fetches = tuple[list[mtf.Tensor], list[mtf.Operation]]
"""What a step is to compute: tensors, and operations that have no output."""


class Crossing(NamedTuple):
    """Bytes of one step.

    Attributes:
      priced: what is predicted.
      received: what a device receives, on the average.
    """

    priced: float
    received: float


def received(nodes: Iterable[tf.Operation], devices: int) -> float:
    """Bytes that a device receives from others for some nodes to be run, on the average: each tensor once."""
    seen: set[tf.Operation] = set()
    crossing: set[tuple[tf.Tensor, str]] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        stack += [*node.control_inputs, *(tensor.op for tensor in node.inputs)]
        crossing.update((tensor, node.device) for tensor in node.inputs if tensor.dtype != tf.resource
                        and node.device and tensor.op.device and node.device != tensor.op.device)
    return sum(tensor.shape.num_elements() * tensor.dtype.size for tensor, _ in crossing) / devices


def _lowered(lowering: mtf.Lowering, fetches: Fetches, devices: int) -> float:
    tensors, operations = fetches
    slices = [one.op for tensor in tensors for one in lowering.tensors[tensor].to_laid_out_tensor().all_slices]
    return received([*slices, *map(lowering.lowered_operation, operations)], devices)


def split(*names: str) -> Callable[[ComputationGraph, int], list[Configuration]]:
    """Every layer splits the first of these dims that it can."""
    def choose(graph: ComputationGraph, devices: int) -> list[Configuration]:
        found = []
        for layer in graph.layers:
            able = [name for name in names if name in layer.splittable and layer.dims[name] % devices == 0]
            found.append(Configuration(((able[0] if able else "", devices),)))
        return found

    return choose


def under_layout(program: Callable[[mtf.Mesh], Fetches], devices: int, layout: str, mesh_shape: str = "") -> Crossing:
    """Under one layout, by Mesh-TensorFlow's own lowering.

    Args:
      program: makes a graph.
      devices: p.
      layout: its rules, for axes of `mesh_shape`; by default the one axis "all".
      mesh_shape: of the layout.
    """
    mesh_shape = mesh_shape or f"all:{devices}"
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        tensors, _ = program(mesh)
        # What is small goes whole from one device to the next: as many bytes, but one after the other.
        with mock.patch.object(collectives, "_SEVERAL_RINGS", 0):
            found = find_layout(mesh.graph, devices, tensors, BYTES, mesh_shape=mesh_shape, memory_limit=None,
                                compare=[f"{mesh_shape};{layout}"]).compared[0]
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        fetches = program(mesh)
        return Crossing(found.seconds, _lowered(harness.stock_lowering(mesh, mesh_shape, layout), fetches, devices))


def under_strategy(program: Callable[[mtf.Mesh], Fetches], devices: int,
                   choose: Callable[[ComputationGraph, int], Sequence[Configuration]]) -> Crossing:
    """Under a configuration per layer, by our lowering for devices of their own.

    Args:
      program: makes a graph.
      devices: p.
      choose: a configuration per layer, of the exported graph and p.
    """
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        fetches = program(mesh)
        graph = export_graph(mesh.graph)
        configurations = choose(graph, devices)
        priced = evaluate_strategy(graph, configurations, devices, BYTES).seconds
        lowering = PlanLowering(mesh.graph, plan_from_configurations(mesh.graph, graph, configurations, devices),
                                harness.device_names(devices), shared_memory=False)
        return Crossing(priced, _lowered(lowering, fetches, devices))
