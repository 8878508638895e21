"""Proofs of optimality, and a checker that shares no code with the searches.

A certificate holds numbers (potentials) for the two ends of every pair of layers that edges join. Taking the potential
of a configuration from the pair and adding it to the layer changes no assignment's cost, so the sum of the minima of
what remains at every layer and pair is a lower bound, whatever the numbers are: a wrong certificate can only prove too
little. Where that bound falls short of the cost, the checker leaves out the configurations that it excludes and
minimises over the rest itself; where that would be too large, the certificate splits the domain of a layer in two and
proves both parts.

Costs and potentials are taken for the real numbers that their float64 stand for, and every number that the checker
forms is at most the one it stands for: checked_network.py lays the network out, checked_bounds.py adds, and this file
decides. What is handed in is checked before it is used, so that damage ends in CertificateError.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import more_itertools
import numpy as np

from pase_mtf.errors import shortened
from pase_mtf.search.checked_bounds import (
    HUGE,
    MOST,
    add_potentials,
    alike,
    at_layers,
    at_small_pairs,
    exclude,
    least_left,
    nothing_read,
    open_small,
    open_table,
    read,
    reparametrised,
    take_over,
)
from pase_mtf.search.checked_elimination import LayerTables, least_sum
from pase_mtf.search.checked_network import CertificateError, CheckedNetwork, checked
from pase_mtf.search.checked_search import EXHAUSTED, remainder_of, search
from pase_mtf.search.network import CostNetwork
from pase_mtf.search.proof import Certificate, Potential
from pase_mtf.search.registry import Solution

__all__ = ["Certificate", "CertificateError", "Potential", "check_certificate"]

# What the checker is willing to do by itself: sums of table entries for a proof, and for all of the larger ones
# together; entries of tables that it holds at a time beside the network's; rounds of leaving configurations out.
_MOST_SUMS = 1 << 22
_MOST_LARGE_SUMS = 1 << 31
_MOST_ENTRIES = 1 << 25
# Entries of the tables of what is left open: 2 GiB.
_MOST_LEFT = 1 << 28
_MOST_ROUNDS = 30
# Entries of tables that further rounds may read, which are needed where edges forbid one configuration after another.
_MOST_READ = 1 << 31
# Bytes of the parts that wait to be proven.
_MOST_WAITING = 1 << 31
# Configurations per layer from where on it may minimise over the remainder without leaving out all it can; or else once
# the remainder is so many times smaller than what the next round would read.
_FEW = 3
_SMALLER = 16
# Pairs of equal costs that are looked at side by side.
_AT_ONCE = 64
# Of the sum of the absolute values of a solution's parts: what a bound may fall short of its cost.
_TOLERANCE = 1e-12
# Integers that add up to less are told apart exactly.
_MOST_WHOLE = 2e12
_CHEAPER = "certificate: does not exclude that a cheaper assignment exists"
_TOO_LITTLE = "certificate: proves too little; what it leaves open is too large to search"


def _surely(total: float, additions: int) -> float:
    """At most the true sum of so many numbers of at least 0 (each rounded down or exact) whose rounded sum this is."""
    return max(0.0, total * (1 - (additions + 8) * 2.0 ** -52))


def _next(total: float, way: float) -> float:
    """The next number on the way to another; but a sum of float64 that is so small was not rounded."""
    return math.nextafter(total, way) if abs(total) >= 2.0 ** -1021 else total


def _given(network: CheckedNetwork, potentials: Sequence[Potential]) -> np.ndarray:
    """The potential of every slot.

    Raises:
      CertificateError: they are not potentials of this network.
    """
    flat, edges = network.flat, np.array([len(table.parts) for table in network.tables], np.int64)[network.small.kinds]
    if type(potentials) not in (tuple, list) or len(potentials) > 2 * edges.sum():
        raise CertificateError("certificate: no potentials, or more than there can be; it is damaged")
    number_of = {ends: number for number, ends in enumerate(zip(*flat.ends.tolist(), strict=True))}
    sizes = np.diff(flat.first).tolist()
    pairs, turned, values, classes = [], [], [np.zeros(0)], [np.zeros(0, np.int32)]
    for entry in potentials:
        if type(entry) is not Potential or type(entry.source) is not int or type(entry.target) is not int:
            raise CertificateError("certificate: something else in place of a potential; it is damaged")
        ends = entry.source, entry.target
        if (ends not in number_of and ends[::-1] not in number_of) or ends[0] > ends[1]:
            raise CertificateError(f"certificate: layers {shortened(ends)} have no edge; it belongs to another network")
        turned.append(ends not in number_of)
        pairs.append(number_of[ends[::-1] if turned[-1] else ends])
        for amounts, kinds, layer in ((entry.rows, entry.row_classes, ends[0]),
                                      (entry.columns, entry.column_classes, ends[1])):
            if not (type(amounts) is np.ndarray and type(kinds) is np.ndarray and amounts.dtype == np.float64
                    and kinds.dtype == np.int32 and amounts.ndim == 1 and len(amounts) <= sizes[layer]
                    and kinds.shape == (sizes[layer],)):
                raise CertificateError(f"certificate: potentials of layers {ends} do not fit; it is damaged")
            values.append(amounts)
            classes.append(kinds)
    given = np.zeros(flat.slots[-1, -1])
    lengths = np.array([len(amounts) for amounts in values[1:]], np.int64).reshape(-1, 2)
    wrong = add_potentials(flat, np.array(pairs, np.int64), np.array(turned, np.int64), lengths,
                           np.concatenate(values), np.concatenate(classes), given)
    if wrong >= 0:
        raise CertificateError(f"certificate: potentials of layers {potentials[wrong].source} and "
                               f"{potentials[wrong].target} have a class or an amount out of range; it is damaged")
    return given


def _at_pairs(network: CheckedNetwork, given: np.ndarray, near: np.ndarray, beyond: np.ndarray, least_only: bool
              ) -> np.ndarray:
    """The least that is left on every pair (see `read`): those with equal costs are read together, and of those with
    equal costs, potentials and neighbours (repeated layers) one."""
    flat, small = network.flat, network.small
    firsts, least = alike(flat, small.kinds, given, near, least_only), np.empty(len(small.kinds))
    at_small_pairs(flat, small, firsts, given, near, beyond, least_only, least)
    numbers = np.flatnonzero((firsts == np.arange(len(firsts))) & (small.at[small.kinds] < 0))
    for kind in np.unique(small.kinds[numbers]).tolist():
        table = network.tables[kind]
        for some in more_itertools.chunked(numbers[small.kinds[numbers] == kind].tolist(), _AT_ONCE):
            own = flat.slots[:, some].T.copy(), given, near, beyond, least_only
            found = nothing_read(table.shape, *own)
            wanted = np.logical_or.reduce(near[own[0][:, :1] + np.arange(table.shape[0])] >= 0)
            for rows, band in table.bands(wanted):
                read(found, rows, band, *own)
            least[some] = least_left(found, table.shape[0], *own)
    take_over(flat, firsts, beyond, least)
    return least


def _tables(network: CheckedNetwork, given: np.ndarray, active: np.ndarray, reduced: np.ndarray, least: np.ndarray,
            most: int) -> LayerTables:
    """What active configurations cost above the bound: a table per layer and pair, over those of their layers that have
    more than one configuration.

    Raises:
      CertificateError: one is too large, or minimising over all would take more than `most` sums.
    """
    flat, small, chosen = network.flat, network.small, np.flatnonzero(active)
    counts = np.add.reduceat(active, flat.first[:-1], dtype=np.int64)
    first = np.cumsum([0, *counts.tolist()])
    lengths = counts[flat.ends].prod(axis=0)
    several = lengths.sum() - len(lengths)  # what has one entry takes no sum
    if (lengths > _MOST_SUMS).any() or several > min(most, _MOST_LEFT):
        raise CertificateError(_TOO_LITTLE)
    at = np.cumsum([0, *counts.tolist(), *lengths.tolist()])
    values, layers = np.empty(at[-1]), np.arange(len(counts))
    values[:first[-1]] = reduced[chosen]
    open_small(flat, small, chosen, first, given, least, at[len(counts):-1], values)
    for e in np.flatnonzero(small.at[small.kinds] < 0).tolist():
        rows, columns = (flat.groups[chosen[first[v]:first[v + 1]] - flat.first[v] + flat.groups_at[side, e]]
                         for side, v in enumerate(flat.ends[:, e].tolist()))
        table = network.tables[small.kinds[e]].block(rows.astype(np.int64), columns.astype(np.int64))
        open_table(table, given[flat.slots[0, e] + rows], given[flat.slots[1, e] + columns], least[e])
        values[at[len(counts) + e]:at[len(counts) + e + 1]] = table.ravel()
    scopes = np.concatenate([np.stack([layers, np.full(len(layers), -1)], axis=1), flat.ends.T])
    return LayerTables(counts, np.where(counts[scopes] > 1, scopes, -1), at, values)


def _surely_least_sum(tables: LayerTables, most: int) -> tuple[float, int]:
    """At most the least sum of an entry of each table, and how many sums of two entries that took.

    Raises:
      CertificateError: that would take more than `most`.
    """
    total, sums = least_sum(tables, most, _MOST_ENTRIES)
    if sums == math.inf:
        raise CertificateError(_TOO_LITTLE)
    return _surely(total, 2 * len(tables.scopes)), int(sums)


def _searched(tables: LayerTables, missing: float, most: int) -> int:
    """Verifies that no sum of an entry of each table is below what is missing, by a search; returns what it took.

    Raises:
      CertificateError: one may be, or it would take more than `most`.
    """
    listed = tables.listed()
    decided = math.fsum(float(table) for own, table in listed if not own)
    limit = math.nextafter(missing - _surely(decided, len(listed)), math.inf)
    limit *= 1 + (4 * len(listed) + 64) * 2.0 ** -51
    if limit <= 0.0:
        return 0
    remainder = remainder_of([(own, table) for own, table in listed if own])
    ended, looked = (None, 0) if remainder is None else search(remainder, limit, most)
    if ended != EXHAUSTED:
        raise CertificateError(_TOO_LITTLE if looked > most or remainder is None else _CHEAPER)
    return looked


def _small(network: CheckedNetwork, active: np.ndarray) -> bool:
    """Whether to minimise over what is active now, rather than to leave out more of it first."""
    flat = network.flat
    counts = np.add.reduceat(active, flat.first[:-1], dtype=np.float64)
    entries = sum(table.size for table in network.tables)
    return bool(counts.sum() <= _FEW * len(flat.first)
                or _SMALLER * counts[flat.ends].prod(axis=0).sum() <= entries)


def _prove(network: CheckedNetwork, certificate: Certificate, active: np.ndarray, limit: float, most: int) -> int:
    """Verifies that no assignment of active configurations costs less than the limit, by a certificate's potentials.
    Returns how many sums it took to minimise over what these leave open: `_MOST_SUMS` at most, or `most`.

    Raises:
      CertificateError: the potentials do not show it.
    """
    flat = network.flat
    given = _given(network, certificate.potentials)
    theta = reparametrised(flat, given)
    near, beyond, reduced = np.empty(len(given)), np.zeros(len(given)), np.empty(len(theta))
    # What edges forbid reaches one layer more in each; where layers form a ring, it may go around for every
    # configuration.
    entries = max(1, int(flat.counts.prod(axis=0).sum()))
    most_rounds = max(_MOST_ROUNDS, len(flat.first), min(len(flat.unary), _MOST_READ // entries))
    for rounds in range(1 + most_rounds):
        least = at_layers(flat, theta, active, reduced, near)
        least_only = rounds == 0 and certificate.alone is True
        between = _at_pairs(network, given, near, beyond, least_only)
        total = math.fsum([*least.tolist(), *between.tolist()])
        bound = _next(total, -math.inf)
        if bound >= limit:
            return 0
        missing = math.nextafter(limit - bound, math.inf)
        active = active.copy()
        excluded = exclude(flat, reduced, beyond, missing * (1 + (2 * len(between) + 16) * 2.0 ** -51), active)
        if not np.logical_or.reduceat(active, flat.first[:-1]).all():
            return 0  # every assignment has a configuration that is excluded
        last = not (excluded or least_only) or rounds == most_rounds
        if not last and not _small(network, active):
            continue
        try:
            large = max(_MOST_SUMS, most)
            tables = _tables(network, given, active, reduced, between, large if last else _MOST_SUMS)
            if last and certificate.searched is True:
                return _searched(tables, missing, large)
            above, sums = _surely_least_sum(tables, large if last else _MOST_SUMS)
        except CertificateError:
            if last:
                raise
            continue
        if above >= missing:
            return sums
        if last:
            break
    raise CertificateError(_CHEAPER)


def _halves(certificate: Certificate, first: np.ndarray, active: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The active configurations inside and outside of the part that a certificate splits off.

    Raises:
      CertificateError: it does not split a layer in two.
    """
    layer, part = certificate.layer, certificate.part
    if not 0 <= layer < len(first) - 1 or type(part) not in (tuple, list):
        raise CertificateError("certificate: splits something else than a layer; it is damaged")
    begin, end = first[layer:layer + 2].tolist()
    inside = np.zeros(len(active), bool)
    for choice in part:
        if type(choice) is not int or not 0 <= choice < end - begin:
            raise CertificateError(f"certificate: layer {layer} has no such part; it is damaged")
        inside[begin + choice] = True
    one, other = active.copy(), active & ~inside
    one[begin:end] &= inside[begin:end]
    if not one[begin:end].any() or not other[begin:end].any():
        raise CertificateError(f"certificate: does not split layer {layer} in two; it is damaged")
    return one, other


def _claimed_cost(network: CostNetwork, solution: Solution) -> tuple[float, float]:
    """The cost of a solution, rounded once, and the sum of the absolute values of its parts.

    Raises:
      CertificateError: the assignment is none, or costs something else than the solution says.
    """
    if not isinstance(network, CostNetwork) or type(solution) is not Solution:
        raise CertificateError("something else in place of a network and its solution; give a CostNetwork and what "
                               "`solve` returned")
    assignment, sizes = solution.assignment, network.sizes
    if type(assignment) not in (tuple, list) or len(assignment) != len(sizes) or not all(
            type(choice) is int and 0 <= choice < size for choice, size in zip(assignment, sizes, strict=True)):
        raise CertificateError("the assignment is no configuration index per layer; the solution is damaged")
    terms = [float(vector[choice]) for vector, choice in zip(network.vectors, assignment, strict=True)]
    try:
        terms += [float(edge.matrix[edge.rows[assignment[edge.source]], edge.columns[assignment[edge.target]]])
                  for edge in network.edges]
    except (IndexError, ValueError) as error:
        raise CertificateError("the edges do not fit the layers; the network is damaged") from error
    if not all(abs(term) <= MOST for term in terms):
        raise CertificateError(f"the assignment has a part that is forbidden, or above {MOST:g}; nothing is proven")
    cost = math.fsum(terms)
    if type(solution.cost) is not float or solution.cost != cost:
        raise CertificateError(f"the assignment costs {cost}, not {shortened(solution.cost)}; the solution is damaged")
    return cost, math.fsum(map(abs, terms))


def _whole(network: CostNetwork) -> bool:
    """Whether all costs are integers (or infinite)."""
    return all(np.array_equal(np.floor(array), array) for array in (network.arrays.unary, *network.arrays.matrices()))


def _check(network: CostNetwork, solution: Solution) -> float:
    """See check_certificate."""
    cost, parts = _claimed_cost(network, solution)
    if solution.certificate is None:
        raise CertificateError("the solution has no certificate; search with certificate=True")
    exact = parts <= _MOST_WHOLE and _whole(network)
    tolerance = 0.0 if exact else _TOLERANCE * parts
    # Another integer is smaller by 1 at least. The sum is rounded by less than to the next number.
    limit = cost - 0.75 if exact else _next(_next(cost, math.inf) - tolerance, math.inf)
    prepared = checked(network)
    active = prepared.flat.unary < HUGE
    seen: set[int] = set()
    large = _MOST_LARGE_SUMS
    todo = [(solution.certificate, active)]
    while todo:
        certificate, active = todo.pop()
        if type(certificate) is not Certificate or type(certificate.layer) is not int or id(certificate) in seen:
            raise CertificateError("certificate: something else in place of a proof, or one twice; it is damaged")
        seen.add(id(certificate))
        if certificate.layer < 0:
            sums = _prove(prepared, certificate, active, limit, large)
            large -= sums if sums > _MOST_SUMS else 0
            continue
        if type(certificate.proofs) not in (tuple, list) or len(certificate.proofs) != 2:
            raise CertificateError(f"certificate: no two proofs for a split of layer {shortened(certificate.layer)}; "
                                   "it is damaged")
        todo += zip(certificate.proofs, _halves(certificate, prepared.flat.first, active), strict=True)
        if len(todo) * len(active) > _MOST_WAITING:
            raise CertificateError(_TOO_LITTLE)
    return tolerance


def check_certificate(network: CostNetwork, solution: Solution) -> float:
    """Verifies that a solution costs what it says, and that no assignment costs less by more than a tolerance.

    This is meant of the real numbers that the network's float64 stand for, added exactly; the solution's cost is that
    sum, rounded once. The tolerance is 0 where all costs are integers and the absolute values of the solution's parts
    add up to at most 2e12; else it is 1e-12 of that sum.

    Args:
      network: the network as it was given to the search.
      solution: with its certificate. Whatever this holds, nothing that is not so is verified.

    Returns:
      the tolerance.

    Raises:
      CertificateError: the cost is wrong, there is no certificate, or it does not prove the claim.
    """
    try:
        return _check(network, solution)
    except AttributeError as error:
        raise CertificateError(f"{error}; the solution or its certificate is damaged") from error
    except MemoryError as error:
        raise CertificateError(_TOO_LITTLE) from error
