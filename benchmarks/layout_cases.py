"""What `benchmarks.layout` compares: layouts written by hand, and what a layout is predicted and measured to do."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import programs
from pase_mtf.compat import mtf, placement_mesh_impl, tf
from pase_mtf.errors import PaseError
from pase_mtf.launch.arms.arm import Arm
from pase_mtf.layout.find import find_layout
from pase_mtf.layout.layout import Layout
from pase_mtf.machine.machine import Link, Machine
from pase_mtf.runtime import Devices, session_config

__all__ = ["builder", "by_hand", "find", "first_loss", "for_one_device", "losses", "lower_stock", "measure",
           "predicted_cost", "slow_machine", "stock_arm"]

_BY_HAND = {
    # Batch on one axis; heads, the feed-forward's hidden dim and the vocabulary on the other; experts with the batch.
    "bert": "batch:rows;vocab:cols;intermediate:cols;num_heads:cols",
    "bert_moe": "batch:rows;vocab:cols;intermediate:cols;num_heads:cols;experts:rows;expert_hidden:cols",
    "lm": "batch:rows;vocab:cols;d_ff:cols;heads:cols",
    "translation": "batch:rows;vocab:cols;d_ff:cols;heads:cols",
    "lm_moe": "batch:rows;vocab:cols;d_ff:cols;heads:cols;experts:rows;expert_hidden:cols",
    # Space: the layout in the U-Net's own flags, without a third axis.
    "unet_2d": "image_nx_block:rows;image_ny_block:cols",
    "unet_3d": "image_nx_block:rows;image_ny_block:cols",
    "digits": "row_blocks:rows;col_blocks:cols",
    "toy": "even:rows;odd:cols",
}


def by_hand(name: str, devices: int) -> list[tuple[str, str, str]]:
    """(label, mesh shape, layout rules) that people write for a program: data parallelism, and two axes both ways."""
    found = [("data parallel", f"all:{devices}", "batch:all")]
    if devices % 4 == 0:
        for rows, cols in ((2, devices // 2), (devices // 2, 2)):
            label = f"by hand, {rows}×{cols}"
            entry = (label, f"rows:{rows};cols:{cols}", _BY_HAND[name])
            if entry[1:] not in [other[1:] for other in found]:
                found.append(entry)
    return found


def builder(name: str, size: str, devices: int, seen: Callable[[mtf.Graph], Any] = lambda graph: None) -> Any:
    """The function that builds a program, as find_layout takes it.

    Args:
      name, size: of the program.
      devices: the program's own layout for so many are the defaults of the function's arguments, where it has one.
      seen: is given every graph that is built.
    """
    mesh_shape, rules = (None, None) if name in programs.PROGRAMS else (programs.own_layout(name, devices)
                                                                        or (None, None))

    def build_graph(mesh_shape: str | None = mesh_shape, layout: str | None = rules) -> Any:
        program = programs.build(name, size, mesh_shape, layout)
        seen(program.graph)
        return program.graph, program.outputs

    def build_once() -> Any:
        return build_graph()

    def build_laid_out(mesh_shape: str, layout: str) -> Any:
        return build_graph(mesh_shape, layout)

    if name in ("unet_2d", "unet_3d"):
        # It imports slices that are laid out: there is no graph without a mesh.
        return build_laid_out
    return build_once if name in programs.PROGRAMS and name not in programs.REBUILT else build_graph


def find(name: str, size: str, devices: int, machine: Machine, compare: Sequence[tuple[str, str]] = (),
         mesh: str | None = None) -> Layout:
    """The layout that pase_mtf finds for a program; on one mesh shape only, if it is given."""
    return find_layout(builder(name, size, devices), devices=devices, machine=machine, mesh_shape=mesh,
                       compare=list(compare), name=name)


def predicted_cost(name: str, size: str, devices: int, machine: Machine, mesh_shape: str, rules: str) -> dict[str, Any]:
    """What a layout is predicted to cost, on the graph that the program builds for it.

    Returns:
      "seconds" and "bytes" (per device); or "problem", where it does not lower.
    """
    with tf.Graph().as_default():
        try:
            program = programs.build(name, size, mesh_shape, rules)
        except Exception as error:  # the program itself may refuse the layout
            return {"problem": f"{type(error).__name__}: {error}"[:200]}
        try:
            found = find_layout(program.graph, devices, program.outputs, machine, mesh_shape,
                                compare=[(mesh_shape, rules)], alternatives=0, name=name)
        except PaseError as error:
            return {"problem": str(error)[:200]}
    entry = found.compared[0]
    return {"problem": entry.problem[:200]} if entry.problem else {
        "seconds": entry.seconds, "bytes": entry.memory_bytes}


def lower_stock(program: programs.Program, mesh_shape: str, rules: str) -> mtf.Lowering:
    """Mesh-TF's own lowering, on virtual devices."""
    shape = mtf.convert_to_shape(mesh_shape)
    impl = placement_mesh_impl.PlacementMeshImpl(
        shape, mtf.convert_to_layout_rules(rules), [f"/device:CPU:{number}" for number in range(shape.size)])
    return mtf.Lowering(program.graph, {program.mesh: impl})


def slow_machine() -> Machine:
    """A machine on which even the reduced programs are worth splitting."""
    rates = dict.fromkeys(("matmul", "convolution", "pointwise", "reduction", "gather"), 1e6)
    return Machine("splits everything", rates, 1e7, 1e12, 1e-6, (Link(2, 1e8, 1e-8), Link(64, 1e7, 1e-7)))


def losses(build: Callable[[], programs.Program], lowering: Callable[[programs.Program], mtf.Lowering], steps: int,
           devices: Devices, values: Mapping[str, Any] | None = None) -> tuple[list[float], dict[str, Any]]:
    """The losses of the first steps of a program.

    Args:
      build: builds it in the current tf.Graph.
      lowering: lowers it.
      steps: how many.
      devices: of the session.
      values: initial values of its master variables, by name; None: those of the seed.

    Returns:
      (losses, initial values).
    """
    with tf.Graph().as_default():
        program = build()
        lowered = lowering(program)
        loss = lowered.export_to_tf_tensor(program.loss)
        updates = [lowered.lowered_operation(operation) for operation in program.updates]
        fill, masters = lowered.copy_masters_to_slices(), {
            variable.op.name: variable for variable in tf.global_variables()}
        with tf.Session(config=session_config(devices)) as session:
            session.run(tf.global_variables_initializer())
            for name, value in (values or {}).items():
                masters[name].load(value, session)
            initial = session.run(masters) if values is None else {}
            session.run(fill)
            result = []
            for batch in itertools.islice(program.batches(), steps):
                feed = {program.placeholders[name]: value for name, value in batch.items()}
                result.append(float(session.run([loss, *updates], feed)[0]))
    return result, initial


def stock_arm(label: str, name: str, size: str, mesh_shape: str, rules: str, devices: Devices) -> Arm:
    """A program under one layout, lowered by Mesh-TF itself."""
    return Arm(label, lambda: programs.build(name, size, mesh_shape, rules),
               lambda program: lower_stock(program, mesh_shape, rules), devices)


def _batches(name: str, size: str) -> Any:
    with tf.Graph().as_default():
        return programs.build(name, size).batches()


def for_one_device(name: str, mesh_shape: str | None, rules: str | None) -> tuple[str | None, str | None]:
    """For which layout a program is built, so that one device runs the graph of a layout.

    That layout itself; but what the U-Nets import is laid out already, and has to be whole on one device.
    """
    return (None, None) if name in ("unet_2d", "unet_3d") else (mesh_shape, rules)


def first_loss(name: str, size: str, mesh_shape: str, rules: str, devices: Devices) -> float:
    """The first loss of the graph that is built for a layout, on one device."""
    built = for_one_device(name, mesh_shape, rules)
    arm = Arm("one device", lambda: programs.build(name, size, *built), lambda program: lower_stock(program, "", ""),
              devices)
    try:
        return arm.step(next(_batches(name, size)))[0]
    finally:
        arm.close()


def measure(name: str, size: str, arms: Sequence[Arm], seconds: float, progress: Callable[[], Any],
            turn: int = 2) -> dict[str, dict[str, float]]:
    """Steps of all arms, interleaved: after one traced and one untimed step each, turns of a few steps.

    Args:
      name, size: of the program that the arms are.
      arms: lowered programs; they are left open.
      seconds: about how long to go on.
      progress: called after every turn.
      turn: steps per turn.

    Returns:
      Arm -> "ms" (median), "spread_ms" (half the distance of the quartiles), "steps", "bytes", "loss" (the first).
    """
    batches = _batches(name, size)
    result: dict[str, dict[str, float]] = {}
    times: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for number, batch in enumerate(itertools.islice(batches, 2)):
        for arm in arms:
            loss, _ = arm.step(batch, trace=number == 0)
            if number == 0:
                result[arm.name] = {"loss": loss, "bytes": arm.measured_bytes or 0}
        progress()
    start, rounds = time.perf_counter(), 0
    while rounds < 3 or time.perf_counter() - start < seconds:
        held = list(itertools.islice(batches, turn))
        for place in range(len(arms)):
            arm = arms[(place + rounds) % len(arms)]
            times[arm.name] += [arm.step(batch)[1] for batch in held]
        rounds += 1
        progress()
    for label, taken in times.items():
        quartiles = statistics.quantiles(taken, n=4, method="inclusive")  # as the launcher's
        result[label].update(ms=1e3 * statistics.median(taken), steps=len(taken),
                             spread_ms=5e2 * (quartiles[2] - quartiles[0]))
    return result
