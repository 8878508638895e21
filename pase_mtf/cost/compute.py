"""What a layer costs by itself: one function per term, and `layer_parts`, which adds them up.

Terms that grow with the size of a tensor are first written as sums over tensors, per operation [(tensor, amount),
...]: what fraction of each tensor a device holds under a configuration is then worked out once per tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from pase_mtf.cost.collectives import allreduce_seconds, group_sizes
from pase_mtf.cost.moves import handed_on, move_seconds
from pase_mtf.cost.resharding import Reshardings
from pase_mtf.cost.rows import adding_bytes, rows_seconds, travel_as_rows
from pase_mtf.cost.signature import FILTER_GRADIENT, MULTIPLYING, OperationSignature, TensorBytes, counted
from pase_mtf.cost.tables import ConfigurationTable, DistinctShardings
from pase_mtf.graph.layer_operation import PHASES
from pase_mtf.machine.machine import NARROW, WIDE, Machine

__all__ = ["PARTS", "layer_parts", "sum_seconds"]

PARTS = (*PHASES, "overhead", *(f"all-reduce {phase}" for phase in PHASES),
         *(f"resharding {phase}" for phase in PHASES))
"""The parts of a layer's cost, in the order of the rows of `layer_parts`: the arithmetic or memory traffic of each
phase, what every operation costs however small, the all-reduces and what is moved within the layer in each phase."""
_OVERHEAD, _ALLREDUCE, _RESHARDING = (PARTS.index(name) for name in (
    "overhead", "all-reduce forward", "resharding forward"))

_Terms = list[tuple[int, float]]
"""A sum over tensors: [(number of the tensor in `_Shares`, amount of the whole tensor), ...]."""


class _Shares:
    """Numbers the tensors of a layer: two whose split dims are the same are held in the same share."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, ...], int] = {}

    def number(self, columns: Sequence[int]) -> int:
        """The number of a tensor by the columns of its dims, in any order; -1 among them is left out."""
        return self._numbers.setdefault(
            tuple(sorted(column for column in set(columns) if column >= 0)), len(self._numbers))

    def held(self, table: ConfigurationTable) -> np.ndarray:
        """float64 [tensors, K]: what fraction of each one device holds."""
        return np.stack([table.share(columns) for columns in self._numbers])

    def matrix(self, terms: Sequence[_Terms]) -> np.ndarray:
        """Sums over tensors as the rows of a matrix, float64 [len(terms), tensors]."""
        matrix = np.zeros((len(terms), len(self._numbers)))
        for row, entries in enumerate(terms):
            for column, amount in entries:
                matrix[row, column] += amount
        return matrix


def layer_parts(signature: Sequence[OperationSignature], table: ConfigurationTable,
                reshardings: Reshardings) -> np.ndarray:
    """Seconds per training step of a layer under each of its configurations, by part.

    A roofline: an operation takes the longer of its arithmetic and its memory traffic at the sizes one device holds,
    the time to transpose what lies in another order than it reads, and the overhead of its nodes. All-reduces and
    in-layer resharding come on top.
    Replicated work costs nothing extra on real devices (all replicas are computed at once); where devices share cores,
    every replica is paid.

    Args:
      signature: `layer_signature` of the layer.
      table: its configurations.
      reshardings: price what is moved within the layer, on the machine whose numbers count.

    Returns:
      float64 [len(PARTS), K].
    """
    result, machine = np.zeros((len(PARTS), len(table.devices))), reshardings.machine
    operations = counted(signature)
    computing = {entry: times for entry, times in operations.items() if entry.kind != "none"}
    if computing:
        seconds = _operation_seconds(list(computing), table, machine, stock=reshardings.stock)
        # The work of all devices together, or that of the critical-path device (they are all alike).
        everywhere = table.devices if machine.shared_cores else np.ones(len(table.devices))
        for (entry, times), row in zip(computing.items(), seconds, strict=True):
            early, devices = row, everywhere
            if machine.shared_cores and entry.drawn and not reshardings.stock:
                # Of devices that have the same part one draws it for all.
                devices = 1.0 / table.share(entry.outputs[0][0])
            if entry.row_sum is not None and reshardings.sums_on_edges and not any(entry.pending):
                # No product is made: rows are added up, those of all that are added into one sum there.
                added = adding_bytes(entry.row_sum, table) / machine.memory_bandwidth if entry.row_sum.is_last else 0.0
                travels = travel_as_rows(entry.row_sum, table)
                early = row = np.where(travels, added, row)
                if any(entry.gradients):  # when all rows are there, of all microbatches: once, before the update
                    early = np.where(travels, 0.0, row)
                    result[PHASES.index("update")] += times * devices * (row - early)
            result[PHASES.index(entry.phase)] += times * devices * early
            # Mesh-TF itself has a node for every block that it hands on.
            move = None if reshardings.stock and machine.shared_cores else entry.move
            nodes = entry.nodes * ~handed_on(move, table) if move else entry.nodes
            result[_OVERHEAD] += times * devices * (machine.with_overhead(row, nodes) - row)
    for entry, times in operations.items():
        for (columns, tensors), gradient in entry.sums_within(
                on_edges=reshardings.sums_on_edges, added_on_edges=reshardings.adds_on_edges):
            result[_ALLREDUCE + PHASES.index(entry.phase)] += times * sum_seconds(
                entry, columns, tensors, table, reshardings, gradient=gradient)
        if entry.move:
            result[_RESHARDING + PHASES.index(entry.phase)] += times * move_seconds(entry.move, table, reshardings)
    return result


# -- one operation of each kind --------------------------------------------------------------------------------------
def _operation_seconds(entries: Sequence[OperationSignature], table: ConfigurationTable,
                       machine: Machine, *, stock: bool) -> np.ndarray:
    """What one operation of each kind takes on one device without its overhead, float64 [operations, K]."""
    shares = _Shares()
    work = [shares.number(entry.dims) for entry in entries]
    traffic = [_traffic(entry, shares) for entry in entries]
    transposed = [_transposed(entry, shares) for entry in entries]
    held = shares.held(table)
    arithmetic = np.stack([_arithmetic(machine, entry, held[share])
                           for entry, share in zip(entries, work, strict=True)])
    seconds: np.ndarray = np.maximum(arithmetic, shares.matrix(traffic) @ held / machine.memory_bandwidth)
    if any(transposed) and not machine.overhead_within:  # rates of whole kernels have their transposes in them
        seconds = seconds + shares.matrix(transposed) @ held / machine.memory_bandwidth
    for number, entry in enumerate(entries):
        if entry.passed_on and not (stock and entry.kind != "reduction"):  # Mesh-TF itself adds it to zeros
            seconds[number, _is_passed_on(entry, table)] = 0.0
        if entry.turned and not stock:
            seconds[number, _is_turned_in_place(entry, table)] = 0.0
        if entry.move:
            seconds[number, handed_on(entry.move, table)] = 0.0
    return seconds


def _is_passed_on(entry: OperationSignature, table: ConfigurationTable) -> np.ndarray:
    """Whether a device has one element along what it reduces: TensorFlow passes that on, without a copy. bool [K]."""
    if entry.nodes > 1 or len(entry.inputs) != 1 or len(entry.outputs) != 1:
        return np.zeros(len(table.devices), np.bool_)
    (read, whole), (made, left) = entry.inputs[0], entry.outputs[0]
    found: np.ndarray = np.isclose(whole * table.share(read), left * table.share(made), rtol=1e-9)
    return found


def _is_turned_in_place(entry: OperationSignature, table: ConfigurationTable) -> np.ndarray:
    """Whether the dims of which a device has more than one element keep their order: TensorFlow gives that another
    shape, without a copy. bool [K]."""
    before, found = np.full(len(table.devices), -1), np.ones(len(table.devices), np.bool_)
    for column, size, place in entry.turned:
        several = table.shards[:, column] < size
        found &= ~several | (place > before)
        before = np.where(several, place, before)
    return found


def _arithmetic(machine: Machine, entry: OperationSignature, held: np.ndarray) -> np.ndarray:
    """Seconds of the arithmetic of an operation of which a device does these fractions, float64 [K]."""
    flops = entry.flops * held
    seconds: np.ndarray = flops / _rate(machine, entry)
    if machine.efficiency and entry.kind in MULTIPLYING:
        amounts, fractions = np.transpose(machine.efficiency)
        seconds /= np.interp(flops, amounts, fractions)
    return seconds


def _rate(machine: Machine, entry: OperationSignature) -> float:
    """FLOP/s of an operation: of its kind, in bfloat16 where it multiplies that and the machine is faster at it, and in
    float64 where it multiplies that."""
    kind, rates = entry.kind, machine.rates
    if kind == FILTER_GRADIENT and kind not in rates:
        kind = "convolution"
    rate = rates.get(kind) or rates["matmul"]
    if entry.wide:
        return rates.get(WIDE.get(kind, ""), rate)
    return max(rate, rates.get(NARROW.get(kind, ""), rate)) if entry.narrow else rate


def _traffic(entry: OperationSignature, shares: _Shares) -> _Terms:
    """Bytes that are read and written."""
    ends = (*entry.inputs, *entry.outputs)
    # What is made in between has all dims of the operation: divided as the ends are, it would take more than it does.
    between = max(entry.traffic - 1.0, 0.0) * sum(nbytes for _, nbytes in ends)
    return [*((shares.number(columns), min(entry.traffic, 1.0) * nbytes) for columns, nbytes in ends),
            (shares.number(entry.dims), between)]


def _transposed(entry: OperationSignature, shares: _Shares) -> _Terms:
    """Bytes of tensors that have to be transposed: each is read and written once more."""
    return [(shares.number(columns), 2.0 * nbytes) for columns, nbytes in entry.transposed]


# -- what crosses between devices -------------------------------------------------------------------------------------
def sum_seconds(entry: OperationSignature, reduced: Sequence[int], tensors: Sequence[TensorBytes],
                table: ConfigurationTable, reshardings: Reshardings, *, gradient: bool) -> np.ndarray:
    """Seconds of combining the partial sums of some tensors within a layer, under each of K configurations.

    Args:
      entry: the operation that makes them.
      reduced: columns of the dims whose split leaves parts.
      tensors: what is summed.
      table: the configurations.
      reshardings: price what moves, on the machine whose numbers count.
      gradient: these are gradients of weights, which wait for each other and are summed in buckets. What that saves is
        counted as if all of the program were summed over the same devices.

    Returns:
      float64 [K]; of all-reduces (of stock Mesh-TensorFlow, of views of the parts as well), or where fewer elements
      travel so, of rows that devices give each other; or of giving each other what they have found.
    """
    if entry.gathered:
        # Of a part that has fewer elements than are wanted all are found, of every output as many as of the first.
        most = entry.inputs[0][1] / max(entry.outputs[0][1], 1.0)
        elements = max(entry.outputs[0][1] / entry.itemsize, 1.0)
        return sum((_gathering_seconds(reduced, tensor, elements, most, table, reshardings) for tensor in tensors),
                   np.zeros(len(table.devices)))
    nbytes, whole = np.asarray(sum(size * table.share(columns) for columns, size in tensors)), sum(
        size for _, size in tensors)
    machine = reshardings.machine
    # Of the others it is not known how they are split: as these are.
    waiting = reshardings.waiting * nbytes / whole if gradient and whole else 0.0
    seconds = allreduce_seconds(nbytes, group_sizes(table, reduced, machine), table.devices, machine,
                                stock=reshardings.stock, waiting=waiting, itemsize=entry.itemsize)
    if reshardings.stock:
        seconds = seconds * (1 + entry.again)
    row_sum = entry.row_sum
    if row_sum is None or not reshardings.sums_on_edges:
        return seconds
    as_rows = travel_as_rows(row_sum, table)
    return np.where(as_rows, rows_seconds(row_sum, table, reshardings), seconds) if as_rows.any() else seconds


def _gathering_seconds(reduced: Sequence[int], tensor: TensorBytes, elements: float, most: float,
                       table: ConfigurationTable, reshardings: Reshardings) -> np.ndarray:
    """Seconds in which devices give each other what each has found along some dims, float64 [K].

    What they have found is a tensor with one more dim for each of these, of as many elements as there are parts, which
    is split as they are; all devices need all of it. In more than `most` parts each has fewer than are wanted.
    """
    columns, nbytes = tensor
    held = table.shardings((*columns, *sorted({column for column in reduced if column >= 0})))
    needed = dataclasses.replace(held, shards=held.shards.copy(), strides=held.strides.copy())
    needed.shards[:, len(columns):] = needed.strides[:, len(columns):] = 1
    parts = held.shards[:, len(columns):].prod(axis=1)
    seconds = np.zeros(len(parts))
    for count in np.unique(parts[parts > 1]).tolist():
        some = parts == count
        source, target = (DistinctShardings(each.devices[some], each.shards[some], each.strides[some],
                                            np.arange(some.sum(), dtype=np.int32)) for each in (held, needed))
        found = elements * min(1.0, most / count)  # of values, and of their indices, whose type is another
        pairs = reshardings.seconds(source, target, (count, round(found)), round(nbytes / elements))
        seconds[some] = pairs.diagonal()
    gathered: np.ndarray = seconds[held.index]
    return gathered
