"""Proofs of optimality, and a checker that shares no code with the searches.

A certificate holds numbers (potentials) for the two ends of every pair of layers that edges join. Taking the potential
of a configuration from the pair and adding it to the layer changes no assignment's cost, so the sum of the minima of
what remains at every layer and pair is a lower bound, whatever the numbers are: a wrong certificate can only prove too
little. Where that bound falls short of the cost, configurations that it excludes are pruned and the checker
minimises over the rest itself; where that would be too large, the certificate cuts the domain of a layer in two and
proves both parts. All sums are formed in numpy's longdouble (64 bits of mantissa on x86).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from pase_mtf.errors import PaseError
from pase_mtf.search.network import CostNetwork
from pase_mtf.search.registry import Solution

__all__ = ["Certificate", "CertificateError", "Potential", "check_certificate"]

# Table entries the checker is willing to minimise over at once.
_MOST_ENTRIES = 1 << 22
# Longdouble has eleven bits more than the costs: what its own rounding can amount to, relative to all it adds up.
_ROUNDING = 1e-15


class CertificateError(PaseError):
    """A certificate that does not prove what it claims."""


@dataclasses.dataclass(frozen=True, eq=False)
class Potential:
    """What is moved from the edges between two layers to the layers themselves.

    Attributes:
      source, target: the layers, source < target. Several potentials of one pair add up.
      row_classes, column_classes: int [configurations] of source and target.
      rows, columns: float64 per class, the amounts.
    """

    source: int
    target: int
    row_classes: np.ndarray
    rows: np.ndarray
    column_classes: np.ndarray
    columns: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Certificate:
    """A proof that no assignment is cheaper: either potentials, or a layer whose domain is cut, and a proof per part.

    Attributes:
      potentials: of every pair of layers that edges join.
      layer: the layer whose domain is cut; -1 where potentials prove the bound.
      part: the configurations of that layer in the first part.
      proofs: for the assignments with that layer inside and outside of `part`.
    """

    potentials: tuple[Potential, ...] = ()
    layer: int = -1
    part: tuple[int, ...] = ()
    proofs: tuple[Certificate, ...] = ()


class _Pairs:
    """The network as the checker sees it: per pair of layers the sum of its edges, over groups of configurations that
    all of these edges treat alike."""

    def __init__(self, network: CostNetwork) -> None:
        self.vectors = [vector.astype(np.longdouble) for vector in network.vectors]
        together: dict[tuple[int, int], list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
        for edge in network.edges:
            if edge.source == edge.target:
                self.vectors[edge.source] = self.vectors[edge.source] + edge.matrix[edge.rows, edge.columns]
            elif edge.source < edge.target:
                together.setdefault((edge.source, edge.target), []).append((edge.matrix, edge.rows, edge.columns))
            else:
                together.setdefault((edge.target, edge.source), []).append((edge.matrix.T, edge.columns, edge.rows))
        self.pairs = {}
        for ends, edges in together.items():
            rows, row_group = np.unique(np.stack([row for _, row, _ in edges]), axis=1, return_inverse=True)
            columns, column_group = np.unique(np.stack([column for _, _, column in edges]), axis=1,
                                              return_inverse=True)
            total = np.zeros((rows.shape[1], columns.shape[1]), np.longdouble)
            for number, (matrix, _, _) in enumerate(edges):
                total += matrix[np.ix_(rows[number], columns[number])]
            self.pairs[ends] = total, row_group.reshape(-1), column_group.reshape(-1)


def _grouped(values: np.ndarray, groups: np.ndarray, count: int) -> np.ndarray:
    """The least value per group; inf for a group without values."""
    least = np.full(count, np.inf, np.longdouble)
    np.minimum.at(least, groups, values)
    return least


class _Part:
    """One part of the search space under one set of potentials."""

    def __init__(self, pairs: _Pairs, potentials: Sequence[Potential], active: list[np.ndarray]) -> None:
        self.active = [mask.copy() for mask in active]
        self.theta = [vector.copy() for vector in pairs.vectors]
        moved = {ends: (np.zeros(len(self.theta[ends[0]]), np.longdouble),
                        np.zeros(len(self.theta[ends[1]]), np.longdouble)) for ends in pairs.pairs}
        for entry in potentials:
            ends = entry.source, entry.target
            if ends not in moved:
                raise CertificateError(f"certificate: layers {ends} have no edge; it belongs to another network")
            try:
                amounts = entry.rows[entry.row_classes], entry.columns[entry.column_classes]
            except (IndexError, TypeError) as error:
                raise CertificateError(f"certificate: potentials of {ends}: {error}; it is damaged") from error
            for side in (0, 1):
                if amounts[side].shape != moved[ends][side].shape or not np.isfinite(amounts[side]).all():
                    raise CertificateError(f"certificate: potentials of {ends} do not fit; it is damaged")
                moved[ends][side][:] += amounts[side]
                self.theta[ends[side]] += amounts[side]
        # What remains on a pair is never less than this, group by group: the largest potential of a group counts.
        self.left = {}
        for ends, (cost, rows, columns) in pairs.pairs.items():
            row, column = moved[ends]
            self.left[ends] = (cost + _grouped(-row, rows, cost.shape[0])[:, None]
                               + _grouped(-column, columns, cost.shape[1])[None, :]), rows, columns

    def bound(self) -> np.longdouble:
        """A lower bound for the assignments of active configurations."""
        total = np.longdouble(0)
        for theta, active in zip(self.theta, self.active, strict=True):
            total += theta[active].min()
        for ends in self.left:
            total += self._active_matrix(ends).min()
        return total

    def _active_matrix(self, ends: tuple[int, int]) -> np.ndarray:
        cost, rows, columns = self.left[ends]
        found: np.ndarray = cost[np.ix_(np.unique(rows[self.active[ends[0]]]),
                                        np.unique(columns[self.active[ends[1]]]))]
        return found

    def prune(self, limit: np.longdouble) -> bool:
        """Removes configurations whose own bound is at least the limit: the total bound, with the minima at the layer,
        its pairs and the layers next to it taken under this configuration. Whether there were any."""
        spare = limit - self.bound()
        reduced = [theta - theta[active].min() for theta, active in zip(self.theta, self.active, strict=True)]
        extra = [entry.copy() for entry in reduced]
        for (u, v), (cost, rows, columns) in self.left.items():
            least = self._active_matrix((u, v)).min()
            above = _grouped(reduced[u][self.active[u]], rows[self.active[u]], cost.shape[0])
            right = _grouped(reduced[v][self.active[v]], columns[self.active[v]], cost.shape[1])
            if not np.isfinite(least):
                raise CertificateError(f"certificate: layers {u} and {v} cannot be combined; it is damaged")
            extra[u] += (cost - least + right[None, :]).min(axis=1)[rows]
            extra[v] += (cost - least + above[:, None]).min(axis=0)[columns]
        changed = False
        for active, entry in zip(self.active, extra, strict=True):
            pruned = active & ~(entry < spare)
            active &= ~pruned
            changed |= bool(pruned.any())
        return changed


def _least_of_rest(pairs: _Pairs, active: list[np.ndarray]) -> np.longdouble:
    """The least cost of active configurations, by eliminating one layer after another (numpy broadcasting, nothing
    clever).

    Raises:
      CertificateError: that would take too large a table.
    """
    tables: list[tuple[tuple[int, ...], np.ndarray]] = []
    for v, vector in enumerate(pairs.vectors):
        tables.append(((v,), vector[active[v]]))
    for (u, v), (cost, rows, columns) in pairs.pairs.items():
        tables.append(((u, v), cost[np.ix_(rows[active[u]], columns[active[v]])]))
    size = [int(mask.sum()) for mask in active]
    left, total = set(range(len(size))), np.longdouble(0)
    # Layers with one configuration first: they join nothing together.
    scope = {v: {v} for v in left}
    for own, _ in tables:
        for name in own:
            scope[name].update(own)
    while left:
        v = min(left, key=lambda u: (math.prod(size[w] for w in scope[u]), u))
        names = [*sorted(scope[v] - {v}), v]
        if math.prod(size[w] for w in names) > _MOST_ENTRIES:
            raise CertificateError("certificate: proves too little; what it leaves open is too large to search")
        joined = np.zeros([size[w] for w in names], np.longdouble)
        for own, table in tables:
            if v in own:
                order = sorted(range(len(own)), key=lambda axis: names.index(own[axis]))
                joined = joined + table.transpose(order).reshape([size[w] if w in own else 1 for w in names])
        tables = [entry for entry in tables if v not in entry[0]]
        tables.append((tuple(names[:-1]), joined.min(axis=-1)))
        left.discard(v)
        for w in names[:-1]:
            scope[w] = (scope[w] | scope[v]) - {v}
    for _, table in tables:
        total += table.sum()
    return total


def _check(pairs: _Pairs, certificate: Certificate, active: list[np.ndarray], limit: np.longdouble) -> None:
    if certificate.layer >= 0:
        if certificate.layer >= len(active) or len(certificate.proofs) != 2:
            raise CertificateError(f"certificate: cannot cut layer {certificate.layer} in two; it is damaged")
        inside = np.zeros(len(active[certificate.layer]), bool)
        if any(not 0 <= choice < len(inside) for choice in certificate.part):
            raise CertificateError(f"certificate: layer {certificate.layer} has no such part; it is damaged")
        inside[list(certificate.part)] = True
        for proof, mask in zip(certificate.proofs, (inside, ~inside), strict=True):
            half = list(active)
            half[certificate.layer] = active[certificate.layer] & mask
            if half[certificate.layer].any():
                _check(pairs, proof, half, limit)
        return
    part = _Part(pairs, certificate.potentials, active)
    while not part.bound() >= limit:
        if not part.prune(limit):
            if _least_of_rest(pairs, part.active) >= limit:
                return
            raise CertificateError("certificate: a cheaper assignment exists; the solution is not optimal")
        if not all(mask.any() for mask in part.active):
            return


def check_certificate(network: CostNetwork, solution: Solution) -> None:
    """Verifies that a solution costs what it says and that no assignment is cheaper.

    "Cheaper" means by more than 1e-12 of the sum of the absolute values of the solution's parts; in a network of
    integers (below 2**50) it means cheaper at all.

    Args:
      network: the network as it was given to the search.
      solution: with its certificate.

    Raises:
      CertificateError: the cost is wrong, there is no certificate, or it does not prove the claim.
    """
    terms = [np.longdouble(vector[choice])
             for vector, choice in zip(network.vectors, solution.assignment, strict=True)]
    terms += [np.longdouble(edge.matrix[edge.rows[solution.assignment[edge.source]],
                                        edge.columns[solution.assignment[edge.target]]]) for edge in network.edges]
    cost = sum(terms, np.longdouble(0))
    parts = sum((abs(term) for term in terms), np.longdouble(0))
    if not abs(cost - solution.cost) <= 1e-15 * parts:
        raise CertificateError(f"the assignment costs {cost}, not {solution.cost}; the solution is damaged")
    if solution.certificate is None:
        raise CertificateError("the solution has no certificate; search with certificate=True")
    arrays = [*network.vectors, *(edge.matrix for edge in network.edges)]
    whole = all(not array.size or (np.abs(array[np.isfinite(array)]).max(initial=0) < 2.0 ** 50
                                   and np.array_equal(array, np.rint(array))) for array in arrays)
    # Any cheaper assignment of integers is cheaper by 1; half of that leaves room for the rounding of the bound.
    slack = np.longdouble(0.5) if whole and parts * _ROUNDING < 0.25 else np.longdouble(1e-12) * parts
    pairs = _Pairs(network)
    active = [np.isfinite(vector) for vector in pairs.vectors]
    if not all(mask.any() for mask in active):
        raise CertificateError("certificate: a layer has no finite configuration; it belongs to another network")
    _check(pairs, solution.certificate, active, cost - slack)
