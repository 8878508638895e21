"""The kernels of a layout: a program lowered by Mesh-TensorFlow's own code, and every node that a step of it runs."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from pase_mtf.compat import mtf, placement_mesh_impl, tf
from pase_mtf.export.phases import FORWARD, phases_of
from pase_mtf.layout.space import MeshShape, rules_text
from pase_mtf.lowering.equal_nodes import first_of_equal
from pase_mtf.lowering.nodes import IDLE_NODES, kernel_of
from pase_mtf.machine.kernels import SENT, Kernel, send_kernel
from pase_mtf.operations.facts import read_operations, trains
from pase_mtf.operations.flow import Flow, all_operations
from pase_mtf.operations.protocols import LaidOut
from pase_mtf.operations.registry import rule_of
from pase_mtf.replaced import replaced

__all__ = ["COMPUTE", "LayoutKernels", "layout_kernels"]

COMPUTE = "kernels"
_SUMS, _MOVES = "all-reduce", "resharding"
_SCOPES = {_SUMS: "pase_mtf_sums", _MOVES: "pase_mtf_moves"}


class LayoutKernels(NamedTuple):
    """What a step under one layout runs on all devices together.

    Attributes:
      parts: part of the cost -> kernels, and how often.
      unknown: types of nodes whose sizes are not known before they run.
    """

    parts: dict[str, collections.Counter[Kernel]]
    unknown: frozenset[str]


class _Slices:
    """The slices of a variable, without a master that they would be filled from."""

    def __init__(self, variable: mtf.Variable, mesh_impl: placement_mesh_impl.PlacementMeshImpl) -> None:
        self._variable, self._devices = variable, mesh_impl.devices
        slices, shape = [], mesh_impl.slice_shape(variable.outputs[0].shape)
        for number, device in enumerate(mesh_impl.devices):
            with tf.device(device):
                slices.append(tf.Variable(tf.zeros(shape, variable.slice_dtype), use_resource=True, collections=[],
                                          name=f"{variable.name}_slice_{number}"))
        self.laid_out_tensor = mesh_impl.LaidOutTensor(slices)
        self.copy_master_to_slices = self.copy_slices_to_master = tf.no_op()

    def assign_to_slices(self, assign_fn: Callable[..., tf.Operation], values: Sequence[tf.Tensor]) -> tf.Operation:
        """As that of Mesh-TensorFlow's own class does."""
        return tf.group(mtf.parallel(self._devices, assign_fn, [self._variable] * len(values),
                                     self.laid_out_tensor.all_slices, values))


class _MeshImpl(placement_mesh_impl.PlacementMeshImpl):
    """Mesh-TensorFlow's own, whose sums and moves can be told from the rest by the names of their nodes."""

    LaidOutVariable = _Slices

    def allreduce(self, *arguments: object, **named: object) -> LaidOut:
        """Combines partial sums."""
        with tf.name_scope(_SCOPES[_SUMS]):
            return super().allreduce(*arguments, **named)

    def allconcat(self, *arguments: object, **named: object) -> LaidOut:
        """Puts the blocks of a dim together."""
        with tf.name_scope(_SCOPES[_MOVES]):
            return super().allconcat(*arguments, **named)

    def alltoall(self, *arguments: object, **named: object) -> LaidOut:
        """Splits one dim in place of another."""
        with tf.name_scope(_SCOPES[_MOVES]):
            return super().alltoall(*arguments, **named)


def _unread(graph: mtf.Graph, *, gradients: bool) -> list[mtf.Tensor]:
    """What the forward pass makes, or any, and no operation reads."""
    facts = read_operations(graph, Flow(graph))
    read = {tensor for fact in facts for tensor in fact.operation.inputs}
    return [tensor for fact, phase in zip(facts, phases_of(graph, facts), strict=True)
            if gradients or phase == FORWARD for tensor in fact.operation.outputs if tensor not in read]


def _sent(node: tf.Operation) -> Kernel | None:
    """What a ring hands on to the next device: it computes nothing, but sending takes its time, as in strategies."""
    if node.type != SENT or node.inputs[0].device in ("", node.device):
        return None
    elements = node.outputs[0].shape.num_elements()
    return None if elements is None else send_kernel(elements, node.outputs[0].dtype.size)


def layout_kernels(graph: mtf.Graph, outputs: Iterable[mtf.Tensor], mesh: MeshShape,
                   rules: Mapping[str, str]) -> LayoutKernels:
    """Lowers a graph in the current tf.Graph, which holds what it imports.

    Args:
      graph: of Mesh-TF, without loops.
      outputs: tensors that a step computes, besides all assignments; where there are none, nobody has told them, and
        they are all that no operation reads, but for gradients where something that is trained is assigned: these
        TensorFlow never runs.
      mesh, rules: a layout under which it lowers.
    """
    impl = _MeshImpl(str(mesh), rules_text(rules), [f"/device:CPU:{number}" for number in range(mesh.devices)])
    meshes = {tensor.mesh for operation in graph.operations for tensor in operation.outputs}
    # Stacked, variables would be others in the user's own graph, and for good: their few copies of small slices are
    # not counted.
    with replaced(mtf.Lowering, "__init__", None):  # whoever asks may be where it is swapped
        lowering = mtf.Lowering(graph, dict.fromkeys(meshes, impl), autostack=False)
    waiting = [lowering.lowered_operation(operation) for operation in graph.operations
               if rule_of(operation).assigns(operation)]
    computed = list(outputs) or _unread(graph, gradients=not trains(all_operations(graph)))
    waiting += [block.op for tensor in computed for block in lowering.tensors[tensor].to_laid_out_tensor().all_slices]
    seen: set[tf.Operation] = set()
    parts: dict[str, collections.Counter[Kernel]] = {COMPUTE: collections.Counter()}
    unknown = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        waiting += [*(tensor.op for tensor in node.inputs), *node.control_inputs]
    for node in first_of_equal(node for node in tf.get_default_graph().get_operations() if node in seen):
        kernel = kernel_of(node) or _sent(node)
        if kernel is not None:
            part = next((part for part, scope in _SCOPES.items() if scope in node.name), COMPUTE)
            parts.setdefault(part, collections.Counter())[kernel] += 1
        elif node.type not in IDLE_NODES:
            unknown.add(node.type)
    return LayoutKernels(parts, frozenset(unknown))
