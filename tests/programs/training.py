"""Training a program for a few steps under any lowering, and what one device makes of it."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from benchmarks import programs
from pase_mtf.compat import mtf, placement_mesh_impl, tf

DEVICES = 8
STEPS = 3
# float32 sums in another order; a wrong value differs in the third digit at the latest.
TOLERANCE = 2e-4


def device_names(devices: int = DEVICES) -> list[str]:
    return [f"/device:CPU:{number}" for number in range(devices)]


def stock(program: programs.Program, mesh_shape: str = "", layout: str = "") -> mtf.Lowering:
    """Mesh-TF's own lowering; by default on one device."""
    shape = mtf.convert_to_shape(mesh_shape)
    impl = placement_mesh_impl.PlacementMeshImpl(shape, mtf.convert_to_layout_rules(layout), device_names(shape.size))
    return mtf.Lowering(program.graph, {program.mesh: impl})


def _ancestors(operations: list[tf.Operation]) -> list[tf.Operation]:
    found, stack = set(operations), list(operations)
    while stack:
        operation = stack.pop()
        for other in (*(tensor.op for tensor in operation.inputs), *operation.control_inputs):
            if other not in found:
                found.add(other)
                stack.append(other)
    return list(found)


def _read_before_updating(fetches: list[tf.Operation]) -> None:
    """Stock Mesh-TF reads a variable at every use, in no order with its update: here all reads come first."""
    reads, assigns = collections.defaultdict(list), []
    for operation in _ancestors(fetches):
        if operation.type == "ReadVariableOp":
            reads[operation.inputs[0].op].append(operation)
        elif operation.type.startswith("Assign") and operation.type.endswith("VariableOp"):
            assigns.append(operation)
    for assign in assigns:
        after = set()  # what the assignment leads to must not come before it
        stack = [assign]
        while stack:
            operation = stack.pop()
            for other in (*operation._control_outputs, *(op for out in operation.outputs for op in out.consumers())):
                if other not in after:
                    after.add(other)
                    stack.append(other)
        mine = [read for read in reads[assign.inputs[0].op] if read not in after]
        assign._add_control_inputs(mine)


def train(program: programs.Program, lowering: mtf.Lowering, steps: int = STEPS) -> np.ndarray:
    """The losses of a few steps; every step's update is in the next step's loss."""
    loss = lowering.export_to_tf_tensor(program.loss)
    update = tf.group([lowering.lowered_operation(operation) for operation in program.updates])
    _read_before_updating([loss.op, update])
    advance = tf.assign_add(program.global_step, 1)
    config = tf.ConfigProto(device_count={"CPU": DEVICES}, allow_soft_placement=True)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    with tf.Session(config=config) as session:
        session.run(tf.global_variables_initializer())
        session.run(lowering.copy_masters_to_slices())
        losses = []
        for batch in itertools.islice(program.batches(), steps):
            feed = {placeholder: batch[name] for name, placeholder in program.placeholders.items()}
            losses.append(session.run([loss, update], feed)[0])
            session.run(advance)
    return np.asarray(losses)


def losses_of(name: str, lower: Callable[[programs.Program], mtf.Lowering], mesh_shape: str = "",
              layout: str = "") -> np.ndarray:
    """The losses of a reduced program, in a graph of its own."""
    with tf.Graph().as_default():
        program = programs.build(name, "reduced", mesh_shape, layout)
        return train(program, lower(program))


@functools.cache
def one_device(name: str) -> np.ndarray:
    """What stock Mesh-TF makes of a reduced program on one device."""
    return losses_of(name, stock)


@contextlib.contextmanager
def built(name: str, size: str = "reduced") -> Iterator[programs.Program]:
    """A program in a graph of its own."""
    with tf.Graph().as_default():
        yield programs.build(name, size)
