"""How many iterations a loop makes, where that can be computed from the graph alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pase_mtf.compat import mtf, placement_mesh_impl, tf
from pase_mtf.operations.registry import LoopParts, is_known, rule_of

__all__ = ["static_trips", "value_of"]

_MOST_ELEMENTS = 64
"""Larger tensors are data; what counts iterations is small."""
_MOST_TRIPS = 100_000


class _NotStaticError(Exception):
    """The condition depends on what only running the program tells."""


class _Scalars:
    """Lowers small operations whole, on one device. What Mesh-TF's own lowering would do, without its graph."""

    def __init__(self, values: dict[mtf.Tensor, tf.Tensor]) -> None:
        self._impl = placement_mesh_impl.PlacementMeshImpl([], [], ["/device:CPU:0"])
        self.tensors = {tensor: self._impl.LaidOutTensor([value]) for tensor, value in values.items()}

    def mesh_impl(self, _: object) -> placement_mesh_impl.PlacementMeshImpl:
        """The only one."""
        return self._impl

    def set_tensor_lowering(self, tensor: mtf.Tensor, laid_out: placement_mesh_impl.PlacementMeshImpl.LaidOutTensor,
                            ) -> None:
        """Sets what an output became."""
        self.tensors[tensor] = laid_out

    def add_counter(self, *_: object) -> None:
        """Nobody asks."""

    def value(self, tensor: mtf.Tensor) -> tf.Tensor:
        """What a tensor became."""
        return self.tensors[tensor].to_laid_out_tensor().tensor_list[0]


def _hands_on(operation: mtf.Operation) -> bool:
    """Whether it hands on what it is given first, and does something besides that is not to happen here: it waits, or
    prints."""
    return bool(rule_of(operation).waits_for(operation)) or isinstance(operation, mtf.ops.PrintOperation)


def _differs(operation: mtf.Operation) -> bool:
    """Whether it is a function of slices that does something else every time: it draws random numbers, or prints."""
    nodes = rule_of(operation).nodes
    return nodes is not None and nodes(operation, {}).is_stateful


def _lead_to(tensors: Iterable[mtf.Tensor], given: Iterable[mtf.Tensor]) -> tuple[list[mtf.Operation],
                                                                                  set[mtf.Tensor]]:
    """(the operations that make some tensors, in an order in which they can run; those of the given that they read).

    Raises:
      _NotStaticError: one of them depends on data, variables or chance.
    """
    order: list[mtf.Operation] = []
    done: set[mtf.Operation] = set()
    read: set[mtf.Tensor] = set()
    known = set(given)
    stack = [(tensor, False) for tensor in tensors]
    while stack:
        tensor, ready = stack.pop()
        operation = tensor.operation
        if tensor in known:
            read.add(tensor)
        elif ready:
            if operation not in done:
                done.add(operation)
                order.append(operation)
        elif operation not in done:
            rule = rule_of(operation)
            if (tensor.size > _MOST_ELEMENTS or rule.is_variable or rule.loop(operation) or not is_known(operation)
                    or rule.is_random or (rule.holds_others and not _hands_on(operation)) or _differs(operation)):
                raise _NotStaticError
            stack.append((tensor, True))
            stack += [(source, False) for source in operation.inputs]
    return order, read


def value_of(x: tf.Tensor) -> Any:
    """The value of a tensor that is constant; None of another. `tf.get_static_value` would tell TensorFlow that nobody
    may feed a constant: who does makes as many iterations as that says."""
    node = getattr(x, "op", None)  # one that is eager has none
    return tf.make_ndarray(node.get_attr("value")) if node is not None and node.type == "Const" else (
        tf.get_static_value(x))


def _computed(operations: Iterable[mtf.Operation], values: dict[mtf.Tensor, tf.Tensor]) -> _Scalars:
    lowering = _Scalars(values)
    for operation in operations:
        imported = rule_of(operation).imported(operation)
        if imported is not None:
            value = value_of(imported)
            if value is None:
                raise _NotStaticError
            lowering.tensors[operation.outputs[0]] = lowering.mesh_impl(None).LaidOutTensor([tf.constant(value)])
        elif _hands_on(operation):  # that is computed, what it waits for or prints is not
            lowering.tensors[operation.outputs[0]] = lowering.tensors[operation.inputs[0]]
        else:
            operation.lower(lowering)
    return lowering


def static_trips(parts: LoopParts, most: int = _MOST_TRIPS) -> int | None:
    """How many iterations a loop makes, by running what its condition depends on, and nothing else.

    Args:
      parts: of the loop.
      most: iterations after which it ends in any case.

    Returns:
      None where the condition depends on data, variables or chance, holds for too long, or cannot be lowered by
      itself.
    """
    try:
        with tf.Graph().as_default():
            trips = _counting(parts, min(most, _MOST_TRIPS))
            with tf.Session(config=tf.ConfigProto(device_count={"GPU": 0}, inter_op_parallelism_threads=1,
                                                  intra_op_parallelism_threads=1)) as session:
                found = int(session.run(trips))
    except Exception:  # also whatever the lowering of an operation raises by itself: then nobody knows
        return None
    return found if found < _MOST_TRIPS else None


def _counting(parts: LoopParts, most: int) -> tf.Tensor:
    """The number of iterations, or `most` if there are more, as a loop over the scalars that the condition depends on.
    """
    seen = {tensor: variable for variable in parts.variables for tensor in variable.seen}
    condition, read = _lead_to([parts.condition], seen)
    used = {seen[tensor].output: seen[tensor] for tensor in read}
    step: list[mtf.Operation] = []
    while True:  # what the next values depend on grows until it is closed
        step, read = _lead_to([variable.next for variable in used.values()], seen)
        more = {seen[tensor].output: seen[tensor] for tensor in read if seen[tensor].output not in used}
        if not more:
            break
        used.update(more)
    variables = list(used.values())
    before, _ = _lead_to([variable.start for variable in variables], ())
    starts = _computed(before, {})

    def values(state: tuple[tf.Tensor, ...]) -> dict[mtf.Tensor, tf.Tensor]:
        return {tensor: value for variable, value in zip(variables, state, strict=True) for tensor in variable.seen}

    def go_on(count: tf.Tensor, *state: tf.Tensor) -> tf.Tensor:
        return tf.logical_and(count < most, _computed(condition, values(state)).value(parts.condition))

    def iterate(count: tf.Tensor, *state: tf.Tensor) -> list[tf.Tensor]:
        lowered = _computed(step, values(state))
        return [count + 1, *(lowered.value(variable.next) for variable in variables)]

    first: list[tf.Tensor] = [tf.constant(0), *(starts.value(variable.start) for variable in variables)]
    looped: Callable[..., list[tf.Tensor]] = tf.while_loop
    return looped(go_on, iterate, first, back_prop=False)[0]
