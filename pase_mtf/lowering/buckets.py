"""Sums that wait for each other are made together: the gradients of several layers in one all-reduce.

What a message costs besides its bytes is then paid once a bucket (`graph.all_reduces.buckets`). A sum that is read
before others are made, such as that of a normalization, is alone; gradients wait until the first update reads one.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeAlias

from pase_mtf.compat import mtf, tf
from pase_mtf.graph.all_reduces import buckets
from pase_mtf.graph.partition import groups
from pase_mtf.lowering.mesh import DeviceMeshImpl
from pase_mtf.lowering.reshard import ALL_REDUCE, all_reduce
from pase_mtf.operations.flow import Flow
from pase_mtf.operations.protocols import LaidOut
from pase_mtf.operations.registry import is_known, rule_of

__all__ = ["Buckets"]

_Sum: TypeAlias = mtf.ops.LazyAllreduceSum


class Buckets:
    """The sums of a lowering that were made, and that nobody has read yet."""

    def __init__(self, flow: Flow, impl_of: Callable[[mtf.Operation], DeviceMeshImpl]):
        """Takes the operations of the graph, and what gives the mesh implementation of each."""
        self._flow, self._impl_of = flow, impl_of
        self._readers: dict[mtf.Tensor, list[mtf.Operation]] = collections.defaultdict(list)
        for operation in flow.loops_of:
            for tensor in _read_by(operation):
                self._readers[tensor].append(operation)
        # What is summed over the same devices in one type, by the identity of each: two tensors may share one.
        self._waiting: dict[Hashable, dict[int, _Sum]] = collections.defaultdict(dict)
        self._key_of: dict[mtf.Tensor, Hashable] = {}

    def add(self, tensor: mtf.Tensor, laid_out: LaidOut) -> None:
        """Takes up what an operation outside of loops has made, where it is a sum that all its readers need in place.

        Rows that were looked up, and what another mesh implementation sees of a sum, are not.
        """
        if type(laid_out) is _Sum and laid_out._reduced is None and self._is_read_in_place(tensor, laid_out.mesh_impl):
            devices = laid_out.mesh_impl.spec.devices
            key = self._key_of[tensor] = devices, _summed_along(laid_out), tensor.dtype
            self._waiting[key][id(laid_out)] = laid_out

    def _is_read_in_place(self, tensor: mtf.Tensor, impl: DeviceMeshImpl) -> bool:
        """Whether all that read it need the sum itself, where its parts are, and none of them in a loop."""
        here = impl.partition(tensor.shape)

        def needs_it(reader: mtf.Operation) -> bool:
            rule = rule_of(reader)
            passes_it_on = rule.forwards_sums or rule.is_view or rule.holds_others or not is_known(reader)
            # What is assigned may be read in the layout of the variable.
            return not (passes_it_on or self._flow.loops_of[reader] or rule.assigns(reader)) and (
                self._impl_of(reader).partition(tensor.shape) == here)

        readers = self._readers.get(tensor, ())
        return bool(readers) and all(map(needs_it, readers))

    def before(self, operation: mtf.Operation) -> None:
        """Makes the sums that an operation reads, and with them those that wait like them."""
        for tensor in _read_by(operation):
            waiting = self._waiting.pop(self._key_of.get(tensor), {})
            _make([each for each in waiting.values() if each._reduced is None])


def _read_by(operation: mtf.Operation) -> Iterable[mtf.Tensor]:
    return dict.fromkeys((*operation.inputs, *rule_of(operation).reads(operation)))


def _summed_along(lazy: _Sum) -> tuple[tuple[int, int], ...]:
    """(size, stride) of the mesh axes that it is summed over, outermost first: whatever they split besides."""
    found: Sequence[tuple[int, int]] = lazy.mesh_impl.strides(lazy.mesh_axes)
    return tuple(sorted(found, key=lambda axis: -axis[1]))


def _make(sums: Sequence[_Sum]) -> None:
    """Makes sums over the same groups of devices, those that share a bucket by one all-reduce."""
    for bucket in buckets([math.prod(each.slice_shape) for each in sums]):
        if len(bucket) > 1:  # else whoever reads it makes it
            _make_together([sums[number] for number in bucket])


def _make_together(sums: Sequence[_Sum]) -> None:
    impl, shapes = sums[0].mesh_impl, [each.slice_shape for each in sums]
    emitter, counts = impl.emitter, [math.prod(shape) for shape in shapes]

    def end_to_end(device: str, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        flat = [emitter.reshape(device, part, [count]) for part, count in zip(parts, counts, strict=True)]
        return emitter.concat(device, flat, 0)

    def taken_apart(device: str, total: tf.Tensor) -> list[tf.Tensor]:
        flat = emitter.split_sizes(device, total, counts, 0)
        return [emitter.reshape(device, part, shape) for part, shape in zip(flat, shapes, strict=True)]

    with tf.name_scope(ALL_REDUCE):
        rows = zip(*(each.laid_out_input.tensor_list for each in sums), strict=True)
        parts = [end_to_end(device, row) for device, row in zip(impl.devices, rows, strict=True)]
        totals = all_reduce(parts, groups(impl.size, _summed_along(sums[0])), impl.devices, emitter)
        columns = zip(*map(taken_apart, impl.devices, totals), strict=True)
    for each, blocks in zip(sums, columns, strict=True):
        each._reduced = each.mesh_impl.LaidOutTensor(list(blocks))
        if each.add_counter_fn:
            each.add_counter_fn()
