"""Gradients that wait for each other are summed together: those of several layers in one all-reduce.

What a message costs besides its bytes is then paid once a bucket (`graph.all_reduces.buckets`). Only sums wait that
nothing but the update reads: it begins when all of them are known, and no gradient of another layer waits for them.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from pase_mtf.compat import mtf, tf
from pase_mtf.export.phases import UPDATE
from pase_mtf.graph.all_reduces import buckets
from pase_mtf.graph.partition import groups
from pase_mtf.lowering.mesh import DeviceMeshImpl
from pase_mtf.lowering.readers import Readers
from pase_mtf.lowering.reshard import ALL_REDUCE, all_reduce
from pase_mtf.operations.facts import OperationFacts
from pase_mtf.operations.protocols import LaidOut
from pase_mtf.operations.registry import is_known, read_by, rule_of

__all__ = ["Buckets"]

_Sum: TypeAlias = mtf.ops.LazyAllreduceSum


class _Waiting(NamedTuple):
    """A sum that nobody has read yet.

    Attributes:
      key: equal for those that can be summed together.
      sum: itself.
    """

    key: Hashable
    sum: _Sum


class Buckets:
    """The sums of a lowering that were made, and that nobody has read yet."""

    def __init__(self, facts: Sequence[OperationFacts], phases: Sequence[str],
                 impl_of: Callable[[mtf.Operation], DeviceMeshImpl], readers: Readers,
                 fed: Mapping[mtf.Operation, int]):
        """Takes the operations of a graph, their phases, the mesh implementation of each, who reads what, and what each
        is made of that steps are fed."""
        self._impl_of, self._fed = impl_of, fed
        self._in_update = {fact.operation for fact, phase in zip(facts, phases, strict=True)
                           if phase == UPDATE and not fact.loops}
        self._readers = readers
        # By the identity of each: two tensors may share one.
        self._waiting: dict[Hashable, dict[int, _Sum]] = collections.defaultdict(dict)
        self._of: dict[mtf.Tensor, _Waiting] = {}

    def add(self, tensor: mtf.Tensor, laid_out: LaidOut) -> None:
        """Takes up what an operation outside of loops has made, where it is a sum that only the update reads, and that
        all its readers need.

        Rows that were looked up, and what another mesh implementation sees of a sum, are not.
        """
        if type(laid_out) is _Sum and laid_out._reduced is None and self._waits(tensor, laid_out.mesh_impl):
            # Who fetches one of several updates need not feed what the others are made of.
            key = (laid_out.mesh_impl.spec.devices, _summed_along(laid_out), tensor.dtype,
                   self._fed.get(tensor.operation, 0))
            self._of[tensor] = _Waiting(key, laid_out)
            self._waiting[key][id(laid_out)] = laid_out

    def _waits(self, tensor: mtf.Tensor, impl: DeviceMeshImpl) -> bool:
        """Whether nothing but the update reads it, and needs the sum, some of it where its parts are: else it is summed
        on the way there."""
        readers, here = self._readers.of(tensor), impl.partition(tensor.shape)
        return all(reader in self._in_update and _needs_sum(reader, tensor) for reader in readers) and any(
            not rule_of(reader).assigns(reader) and self._impl_of(reader).partition(tensor.shape) == here
            for reader in readers)

    def leave_parts(self, addition: mtf.Operation) -> bool:
        """Whether the sum of two tensors may stay pending although only one of them is: nothing else reads what is
        added, which may be parts under some layout, and whoever reads the sum needs the same parts of it."""
        output, = addition.outputs
        return all(_may_be_parts(tensor) and len(self._readers.of(tensor)) == 1 for tensor in addition.inputs) and len(
            {self._impl_of(reader).partition(output.shape) for reader in self._readers.of(output)}) == 1

    def before(self, operation: mtf.Operation) -> None:
        """Makes the sums that an operation reads, and with them those that wait like them."""
        for tensor in read_by(operation):
            key, found = self._of.get(tensor, (None, None))
            waiting = self._waiting.get(key, {})
            if found is not None and id(found) in waiting:
                sums = [each for each in waiting.values() if each._reduced is None]
                together = buckets([math.prod(each.slice_shape) for each in sums])
                for bucket in together:
                    if len(bucket) > 1:  # else whoever reads it makes it
                        _make_together([sums[number] for number in bucket])
                self._waiting[key] = {id(each): each for each in sums if each._reduced is None and each is not found}


def _needs_sum(reader: mtf.Operation, tensor: mtf.Tensor) -> bool:
    """Whether an operation needs the sum itself, however it is split: it does not pass the parts on."""
    rule = rule_of(reader)
    if not is_known(reader) or rule.is_view or (rule.holds_others and not rule.assigns(reader)):
        return False
    return not rule.forwards_sums or not all(map(_may_be_parts, rule.reads(reader)))


def _may_be_parts(tensor: mtf.Tensor) -> bool:
    """Whether a tensor may be held in parts that are still to be summed, under some layout: all that is added up in it
    may. Without recursion: a residual stream, and the gradient of what every time step uses, are long chains."""
    waiting, seen = [tensor], set[mtf.Tensor]()
    while waiting:
        tensor = waiting.pop()
        operation = tensor.operation
        rule = rule_of(operation)
        if tensor in seen or not is_known(operation) or rule.loop(operation):
            continue
        seen.add(tensor)
        if rule.forwards_sums or rule.is_view:
            waiting += rule.reads(operation)
        elif not (rule.sum_is_pending(operation) and any(rule.contracted(operation))):
            return False
    return True


def _summed_along(lazy: _Sum) -> tuple[tuple[int, int], ...]:
    """(size, stride) of the mesh axes that it is summed over, outermost first: whatever they split besides."""
    found: Sequence[tuple[int, int]] = lazy.mesh_impl.strides(lazy.mesh_axes)
    return tuple(sorted(found, key=lambda axis: -axis[1]))


def _make_together(sums: Sequence[_Sum]) -> None:
    """Makes sums over the same groups of devices by one all-reduce."""
    impl, along, shapes = sums[0].mesh_impl, _summed_along(sums[0]), [each.slice_shape for each in sums]
    emitter, counts = impl.emitter, [math.prod(shape) for shape in shapes]
    # Equal pieces of it are one collective, others are sent one by one.
    rest = -sum(counts) % math.prod(size for size, _ in along)
    sizes = [*counts, rest] if rest else counts

    def end_to_end(device: str, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        flat = [emitter.reshape(device, part, [count]) for part, count in zip(parts, counts, strict=True)]
        zeros = [emitter.constant(device, 0, parts[0].dtype, [rest])] if rest else []
        return emitter.concat(device, [*flat, *zeros], 0)

    def taken_apart(device: str, total: tf.Tensor) -> list[tf.Tensor]:
        flat = emitter.split_sizes(device, total, sizes, 0)
        return [emitter.reshape(device, part, shape) for part, shape in zip(flat, shapes, strict=False)]

    with tf.name_scope(ALL_REDUCE):
        rows = zip(*(each.laid_out_input.tensor_list for each in sums), strict=True)
        parts = [end_to_end(device, row) for device, row in zip(impl.devices, rows, strict=True)]
        totals = all_reduce(parts, groups(impl.size, along), impl.devices, emitter)
        columns = zip(*map(taken_apart, impl.devices, totals), strict=True)
    for each, blocks in zip(sums, columns, strict=True):
        each._reduced = each.mesh_impl.LaidOutTensor(list(blocks))
        if each.add_counter_fn:
            each.add_counter_fn()
