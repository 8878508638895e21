"""The memory of the devices: whether the arms fit into it, and how much of it a training step used."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from pase_mtf.compat import tf
from pase_mtf.errors import OutOfMemoryError
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.host import available_bytes
from pase_mtf.launch.arms.chosen import Chosen
from pase_mtf.launch.plan import Plan
from pase_mtf.machine.machine import Machine
from pase_mtf.pipeline.pipeline import Pipeline
from pase_mtf.runtime import JOB

__all__ = ["MEMORY_METHOD", "check_memory", "master_bytes", "peak_bytes_per_device", "short_device",
           "variable_bytes_per_device"]

MEMORY_METHOD = ("slice variables held + peak of the tensors live during one traced step (TensorFlow's allocation "
                 "records, per device; the largest device counts)")


def check_memory(plan: Plan, strategies: Mapping[str, Chosen], trained: Sequence[str], machine: Machine,
                 masters: float = 0.0) -> None:
    """Refuses what cannot fit, before anything is allocated: Linux does not say no, it kills.

    Args:
      plan: of the run.
      strategies: arm -> strategy or pipeline, of stock Mesh-TensorFlow one that needs as much.
      trained: the arms that are built.
      machine: the devices.
      masters: bytes of all variables, whole: the first process of every arm has them, however they are split.

    Raises:
      OutOfMemoryError: names the arm, what it needs, and the remedy.
    """
    found = {arm: strategies[arm] for arm in trained}
    smaller = "take a smaller --batch or --preset"
    if any(_kept_bytes(strategy) > machine.memory_bytes for strategy in found.values()):
        smaller = "the weights alone do not fit: take a smaller --preset"
    remedy = f"{smaller}, more devices, or fewer arms in --compare"
    for arm, strategy in found.items():
        if strategy.memory_bytes > machine.memory_bytes:
            raise OutOfMemoryError(f"arm {arm}: needs {strategy.memory_bytes / 2**30:.3g} GiB per device, a device of "
                                   f"machine {machine.name} has {machine.memory_bytes / 2**30:.3g} GiB; {remedy}")
    # All arms keep their variables; one at a time computes.
    kept = {arm: _kept_bytes(strategy) for arm, strategy in found.items()}
    working = max((strategy.memory_bytes - kept[arm] for arm, strategy in found.items()), default=0.0)
    if plan.devices.kind == "gpu" and sum(kept.values()) + working > machine.memory_bytes:
        raise OutOfMemoryError(f"all arms together need {(sum(kept.values()) + working) / 2**30:.3g} GiB per device, a "
                               f"device of machine {machine.name} has {machine.memory_bytes / 2**30:.3g} GiB; {remedy}")
    available = available_bytes()
    if plan.devices.kind == "cpu" and available is not None and found:
        count = plan.devices.on_one_host
        on_host = [_on_host(strategy, count, masters) for strategy in found.values()]
        total = sum(stays for stays, _ in on_host) + max(besides for _, besides in on_host)
        if total > available:
            raise OutOfMemoryError(f"all arms together need {total / 2**30:.1f} GiB on {count} virtual "
                                   f"devices, {available / 2**30:.1f} GiB are free; {remedy}")


def _kept_bytes(strategy: Chosen) -> float:
    """Bytes that live from step to step on the device with most of them: of a pipeline not always the fullest."""
    held = [stage.memory for stage in strategy.stages] if isinstance(strategy, Pipeline) else [strategy.memory]
    return max(map(_variables, held))


def _variables(memory: Mapping[str, float]) -> float:
    return sum(size for part, size in memory.items() if part in ("weights", "optimizer slots"))


def master_bytes(graph: ComputationGraph) -> float:
    """Bytes of all variables of a program, whole."""
    return float(sum(math.prod(variable.operand.shape) * variable.operand.itemsize
                     for layer in graph.layers for variable in layer.variables))


def _on_host(strategy: Chosen, count: int, masters: float) -> tuple[float, float]:
    """Bytes that live from step to step on so many devices of one host, with their masters, which are in the first
    process; and what a step holds there besides. Of a pipeline, whose stages differ, on the devices with most."""
    if not isinstance(strategy, Pipeline):
        kept = _kept_bytes(strategy)
        return count * kept + max(kept, masters), count * (strategy.memory_bytes - kept)
    stages = [(_variables(stage.memory), stage) for stage in strategy.stages]
    slices, besides = (sorted(column, reverse=True)[:count] for column in zip(*(
        (nbytes, stage.memory_bytes - nbytes) for nbytes, stage in stages for _ in range(stage.devices)), strict=True))
    return sum(slices) + max(masters, sum(nbytes for nbytes, _ in stages)), sum(besides)


def variable_bytes_per_device(graph: tf.Graph, step: Iterable[tf.Operation]) -> dict[str, int]:
    """Bytes of the variables on each device, without the masters that no step touches (a host's copy of the slices; a
    master that serves as its own only slice is touched), and without what lies with the client (the counter of steps).

    Args:
      graph: of the step.
      step: what a step runs; what these need is run, too.
    """
    touched, waiting = set[tf.Operation](), [*step]
    while waiting:
        operation = waiting.pop()
        if operation not in touched:
            touched.add(operation)
            waiting += [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]
    masters = {variable.op for variable in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
               if variable.op not in touched or "device:" not in variable.device}
    found: dict[str, int] = {}
    for operation in graph.get_operations():
        if operation.type in ("VarHandleOp", "VariableV2") and operation not in masters:
            shape, dtype = operation.get_attr("shape"), tf.as_dtype(operation.get_attr("dtype"))
            elements = math.prod(dim.size for dim in shape.dim)
            found[operation.device] = found.get(operation.device, 0) + elements * dtype.size
    return found


def peak_bytes_per_device(metadata: tf.RunMetadata, held: Mapping[str, int] | None = None) -> dict[str, int]:
    """The largest number of bytes each device held at one time during a traced step.

    On virtual CPU devices the process's memory is one pool and its resident size tells nothing about a device, but
    TensorFlow records every allocation and release with the device of the operation that made it.

    Args:
      metadata: of a run with FULL_TRACE.
      held: bytes that live through the step without being allocated in it (variables), per device.

    Returns:
      Device name, as in "CPU:3" or "task:1/CPU:3", -> bytes.
    """
    known = {short_device(name): size for name, size in (held or {}).items()}
    records: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for device in metadata.step_stats.dev_stats:
        name = short_device(device.device)
        for node in device.node_stats:
            entries = [(entry.alloc_micros, entry.alloc_bytes) for memory in node.memory
                       for entry in memory.allocation_records]
            records[name] += entries
            copied = sum(size for _, size in entries)
            if copied > 0 and _CHANGED.search(node.timeline_label):  # of a value that somebody else holds, too
                records[name].append((min(entries)[0], -min(copied, known.get(name, 0))))
    peaks = dict(known)
    for name, entries in records.items():
        # What a step leaves behind is new values of variables, for which the old ones are given back: when they are
        # assigned, which no record tells.
        left = min(sum(size for _, size in entries), known.get(name, 0))
        for at, size in sorted(_assigned(metadata, name)):
            entries.append((at, -min(left, size)))
            left -= min(left, size)
        peaks[name] = _peak(entries) + known.get(name, 0)
    return peaks


_CHANGED = re.compile(r"= (?:Assign(?:Add|Sub)VariableOp|Resource[A-Z][A-Za-z]+)\(")
"""In what a trace says of a node that changes a variable where it lies. Before its first step a slice may share its
memory with its master: then the value is copied to be changed, and the copy takes the place of what counts as held."""

_ASSIGNED = re.compile(r"= Assign(?:VariableOp)?\([^,]+, ([^,^)]+)")
"""In what a trace says of a node that assigns: the name of the tensor that it assigns."""


def _assigned(metadata: tf.RunMetadata, name: str) -> list[tuple[int, int]]:
    """Of every assignment of a new value on a device, when it was done, and the bytes of the value."""
    sizes: dict[str, int] = {}
    for device in metadata.step_stats.dev_stats:
        for node in device.node_stats:
            for output in node.output:
                described = output.tensor_description.allocation_description
                sizes[f"{node.node_name}:{output.slot}"] = described.requested_bytes
    found = []
    for device in metadata.step_stats.dev_stats:
        for node in device.node_stats if short_device(device.device) == name else ():
            if value := _ASSIGNED.search(node.timeline_label):
                tensor = value[1] if ":" in value[1] else f"{value[1]}:0"
                found.append((node.all_start_micros + node.op_end_rel_micros, sizes.get(tensor, 0)))
    return found


def _peak(entries: Iterable[tuple[int, int]]) -> int:
    # Within one microsecond releases first: the clock is too coarse to tell, and a forwarded buffer is not held twice.
    live = peak = 0
    for _, size in sorted(entries):
        live += size
        peak = max(peak, live)
    return peak


def short_device(name: str) -> str:
    """"/job:localhost/replica:0/task:0/device:CPU:3" -> "CPU:3"; of a process among several "task:1/CPU:3".

    Stream traces of GPUs keep their own name.
    """
    place, _, rest = name.rpartition("device:")
    task = re.search(f"/job:{JOB}/(?:replica:[0-9]+/)?(task:[0-9]+)", place)
    return (f"{task[1]}/" if task else "") + (rest or name).split("/")[-1]
