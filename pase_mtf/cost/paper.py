"""The paper's own cost model, in FLOP: the formulas of PaSE (arXiv 2407.04001) on the interface of ours.

Forward operations only: the backward pass is charged as the paper does, by a factor of three on the arithmetic and by
the partial sums of the gradients. Communication counts words; a word costs r FLOP, r being the machine's FLOP rate
divided by the bandwidth of its weakest link (heterogeneous links are modelled by their weakest, as in the paper).
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

import numpy as np

from pase_mtf.cost.moves import move_elements
from pase_mtf.cost.resharding import Reshardings
from pase_mtf.cost.signature import PRODUCTS, OperationSignature, counted
from pase_mtf.cost.tables import ConfigurationTable, DistinctShardings

__all__ = ["PAPER_PARTS", "paper_edge", "paper_parts"]

PAPER_PARTS = ("compute", "all-reduce output", "all-reduce gradients", "moves")
"""The parts of a layer's cost, in the order of the rows of `paper_parts`."""
_COMPUTE, _OUTPUT, _GRADIENTS, _MOVES = range(len(PAPER_PARTS))


def _words(size: float, share: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Words a device sends in an all-reduce of size * share words over a group: 2 (q - 1) w / q."""
    words: np.ndarray = 2.0 * (group - 1.0) * (size * share) / group
    return words


def _group(table: ConfigurationTable, columns: Sequence[int]) -> np.ndarray:
    return 1.0 / table.share(sorted({column for column in columns if column >= 0}))


def paper_parts(signature: Sequence[OperationSignature], table: ConfigurationTable,
                reshardings: Reshardings) -> np.ndarray:
    """FLOP of a layer under each configuration, by part.

    A matrix product of local sizes m, n, k (a convolution is one) costs 3 m n k for its compute, an all-reduce of m n
    words over the split of k, of m k words over the split of n and of n k words over the split of m; other operations
    cost three times their FLOP and the all-reduce of the partial sums that a split of a reduced dim leaves. What is
    moved within the layer moves back as a gradient. The gradient of weights is reduced once, however many operations
    read them: of a product its weights, of a layer without any (a normalisation) its scale and its bias.

    Args:
      signature: `layer_signature` of the layer.
      table: its K configurations.
      reshardings: price what is moved within the layer; their machine gives r.

    Returns:
      float64 [len(PAPER_PARTS), K].
    """
    result, machine = np.zeros((len(PAPER_PARTS), len(table.devices))), reshardings.machine
    # (columns, words, dims absent, variables of this kind) -> times
    read: collections.Counter[tuple[tuple[int, ...], float, tuple[int, ...], int]] = collections.Counter()
    forward = counted(entry for entry in signature if entry.phase == "forward")
    only_pointwise = not any(entry.kind in (*PRODUCTS, "convolution") for entry in forward)
    for entry, count in forward.items():  # an unrolled recurrence does the same at every time step
        product = entry.kind in (*PRODUCTS, "convolution")
        # A multiply-add is one FLOP in the paper, two in ours.
        flops = 0.0 if entry.kind == "none" else entry.flops / 2.0 if product else entry.flops
        result[_COMPUTE] += count * 3.0 * flops * table.share(sorted(set(entry.dims) - {-1}))
        for reduced, outputs in entry.sums:
            for columns, nbytes in outputs:
                result[_OUTPUT] += count * machine.balance * _words(nbytes / entry.itemsize, table.share(columns),
                                                              _group(table, reduced))
        for number, ((columns, nbytes), itemsize) in enumerate(zip(entry.inputs, entry.itemsizes, strict=True)):
            variables = entry.weights[number] if number < len(entry.weights) else 0
            # Statistics can look like a scale or a bias; counting no more than there are variables leaves them out.
            if product or (only_pointwise and variables):
                read[columns, nbytes / itemsize, tuple(sorted(set(entry.dims) - set(columns))), variables] += count
        if entry.move:
            result[_MOVES] += count * 2.0 * machine.balance * move_elements(entry.move, table, reshardings)
    for (columns, words, absent, variables), times in read.items():
        result[_GRADIENTS] += (min(times, variables) if variables else times) * machine.balance * _words(
            words, table.share(columns), _group(table, absent))
    return result


def paper_edge(source: DistinctShardings, target: DistinctShardings, shape: Sequence[int],
               reshardings: Reshardings) -> np.ndarray:
    """FLOP of an edge for every pair of shardings: the words that move forward, and the gradient's that move back.

    Returns:
      float64 [R, C].
    """
    flop: np.ndarray = reshardings.machine.balance * (
        reshardings.elements(source, target, shape) + reshardings.elements(target, source, shape).T)
    return flop
