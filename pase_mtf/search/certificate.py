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

import heapq
import itertools
import math
from collections.abc import Sequence

import more_itertools
import numpy as np

from pase_mtf.errors import shortened
from pase_mtf.search.checked_bounds import (
    HUGE,
    MOST,
    FlatNetwork,
    add_potentials,
    at_layers,
    exclude,
    least_left,
    nothing_read,
    open_table,
    read,
    reparametrised,
)
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
_MOST_ROUNDS = 30
# Configurations per layer from where on it may minimise over the remainder without leaving out all it can; or else once
# the remainder is so many times smaller than what the next round would read.
_FEW = 3
_SMALLER = 16
# Pairs of equal costs that are looked at side by side, and sums that are formed at once.
_AT_ONCE = 64
_SUMS_AT_ONCE = 1 << 19
# Of the sum of the absolute values of a solution's parts: what a bound may fall short of its cost.
_TOLERANCE = 1e-12
# Integers that add up to less are told apart exactly.
_MOST_WHOLE = 2e12
_Tables = list[tuple[tuple[int, ...], np.ndarray]]
"""Tables, each with the layers of its axes."""
_CHEAPER = "certificate: does not exclude that a cheaper assignment exists"
_TOO_LITTLE = "certificate: proves too little; what it leaves open is too large to search"


def _surely(total: float, additions: int) -> float:
    """At most the true sum of so many numbers of at least 0 (each rounded down or exact) whose rounded sum this is."""
    return max(0.0, total * (1 - (additions + 8) * 2.0 ** -52))


def _given(flat: FlatNetwork, potentials: Sequence[Potential]) -> np.ndarray:
    """The potential of every slot.

    Raises:
      CertificateError: they are not potentials of this network.
    """
    if type(potentials) not in (tuple, list):
        raise CertificateError(f"certificate: potentials of type {type(potentials).__name__}; it is damaged")
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
                    and kinds.dtype == np.int32 and amounts.ndim == 1 and kinds.shape == (sizes[layer],)):
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


def _halves_of(flat: FlatNetwork, numbers: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Per pair the numbers of the groups of its two sides, of those in all slots."""
    begins, middles = flat.slots.tolist()
    return [(numbers[begin:middle], numbers[middle:end])
            for (begin, end), middle in zip(itertools.pairwise(begins), middles, strict=False)]


def _alike(network: CheckedNetwork, given: np.ndarray) -> list[int]:
    """Of every pair the first with equal costs and potentials."""
    first: dict[tuple[int, bytes, bytes], int] = {}
    return [first.setdefault((id(table), rows.tobytes(), columns.tobytes()), e)
            for e, (table, (rows, columns)) in enumerate(zip(network.tables, _halves_of(network.flat, given),
                                                             strict=True))]


def _at_pairs(network: CheckedNetwork, alike: list[int], given: np.ndarray, near: np.ndarray, beyond: np.ndarray,
              least_only: bool) -> list[float]:
    """The least that is left on every pair (see `read`): those with equal costs are read together, and of those with
    equal costs, potentials and neighbours (repeated layers) one."""
    same: dict[int, dict[tuple[int, bytes, bytes], list[int]]] = {}
    for e, sides in enumerate(_halves_of(network.flat, near >= 0 if least_only else near)):
        key = alike[e], sides[0].tobytes(), sides[1].tobytes()
        same.setdefault(id(network.tables[e]), {}).setdefault(key, []).append(e)
    least, slots, parts = np.empty(len(alike)), network.flat.slots, _halves_of(network.flat, beyond)
    for groups in same.values():
        for some in more_itertools.chunked(groups.values(), _AT_ONCE):
            firsts = [group[0] for group in some]
            table, own = network.tables[firsts[0]], (slots[:, firsts].T.copy(), given, near, beyond, least_only)
            found = nothing_read(table.shape, *own)
            wanted = np.logical_or.reduce(near[own[0][:, :1] + np.arange(table.shape[0])] >= 0)
            for rows, band in table.bands(wanted):
                read(found, rows, band, *own)
            for group, lowest in zip(some, least_left(found, table.shape[0], *own), strict=True):
                least[group] = lowest
                for e in () if least_only else group[1:]:
                    for part, other in zip(parts[e], parts[group[0]], strict=True):
                        part[:] = other
    return least.tolist()


def _tables(network: CheckedNetwork, given: np.ndarray, active: np.ndarray, reduced: np.ndarray, least: list[float]
            ) -> _Tables:
    """What active configurations cost above the bound: a table per layer and pair, each with the layers of its axes.
    Layers with one configuration have no axis.

    Raises:
      CertificateError: one is too large.
    """
    flat = network.flat
    chosen = [begin + np.flatnonzero(active[begin:end])
              for begin, end in zip(flat.first[:-1].tolist(), flat.first[1:].tolist(), strict=True)]
    tables: _Tables = [((v,), reduced[own]) for v, own in enumerate(chosen)]
    halves = _halves_of(flat, given)
    for e, ends in enumerate(zip(*flat.ends.tolist(), strict=True)):
        rows, columns = (flat.groups[chosen[v] - flat.first[v] + flat.groups_at[side, e]].astype(np.int64)
                         for side, v in enumerate(ends))
        if len(rows) * len(columns) > _MOST_SUMS:
            raise CertificateError(_TOO_LITTLE)
        table = network.tables[e].block(rows, columns)
        open_table(table, halves[e][0][rows], halves[e][1][columns], least[e])
        tables.append((ends, table))
    return [(tuple(v for v in own if len(chosen[v]) > 1), table.squeeze()) for own, table in tables]


def _joined(v: int, parts: _Tables, some: slice) -> tuple[tuple[int, ...], np.ndarray]:
    """The sums of tables that all have a layer v, for some of its configurations: first the small ones, so that few
    sums are as large as the result. Its axes come in order, v's first."""
    names: tuple[int, ...] = (v,)
    joined = np.zeros(1)
    for own, table in parts:
        union = (v, *sorted({*names, *own} - {v}))
        taken = table.transpose([own.index(w) for w in union if w in own])[some]
        joined = (joined[tuple(slice(None) if w in names else None for w in union)]
                  + taken[tuple(slice(None) if w in own else None for w in union)])
        names = union
    return names, joined


def _least_sum(tables: _Tables, most: int) -> tuple[float, int]:
    """The least sum of an entry of each table, by eliminating one layer after another (nothing clever), and how many
    sums that took.

    Raises:
      CertificateError: that would take more than `most`.
    """
    at: dict[int, _Tables] = {}
    size: dict[int, int] = {}
    for entry in tables:
        size.update(zip(entry[0], entry[1].shape, strict=True))
    scope = {v: {v} for v in size}
    total, additions = math.fsum(float(table) for own, table in tables if not own), 2 * len(tables)
    for own, table in tables:
        for v in own:
            scope[v].update(own)
            at.setdefault(v, []).append((own, table))
    sums, held, made = 0, 0, set[int]()  # `made`: which tables are not of the network, by identity
    queue = [(math.prod(size[w] for w in scope[v]), v) for v in size]
    heapq.heapify(queue)
    while queue:
        product, v = heapq.heappop(queue)
        if v not in scope or product != math.prod(size[w] for w in scope[v]):
            continue  # eliminated already, or there is a later entry
        parts = sorted(at[v], key=lambda entry: (entry[1].size, entry[0]))
        union: set[int] = set()
        for own, _ in parts:
            union.update(own)
            sums += math.prod(size[w] for w in union)
        held += product // size[v] - sum(table.size for _, table in parts if id(table) in made)
        if sums > most or held > _MOST_ENTRIES:
            raise CertificateError(_TOO_LITTLE)
        step = max(1, _SUMS_AT_ONCE * size[v] // product)
        names, joined = _joined(v, parts, slice(0, step))
        least = joined.min(axis=0)
        for begin in range(step, size[v], step):
            least = np.minimum(least, _joined(v, parts, slice(begin, begin + step))[1].min(axis=0))
        for own, table in parts:
            for w in own:
                at[w] = [entry for entry in at[w] if entry[1] is not table]
        made.add(id(least))
        if not names[1:]:
            total += float(least)
        for w in names[1:]:
            at[w].append((names[1:], least))
            scope[w] = (scope[w] | scope[v]) - {v}
            heapq.heappush(queue, (math.prod(size[u] for u in scope[w]), w))
        del scope[v]
    return _surely(total, additions), sums


def _searched(tables: _Tables, missing: float, most: int) -> int:
    """Verifies that no sum of an entry of each table is below what is missing, by a search; returns what it took.

    Raises:
      CertificateError: one may be, or it would take more than `most`.
    """
    limit = math.nextafter(missing - _surely(math.fsum(float(table) for own, table in tables if not own), len(tables)),
                           math.inf) * (1 + (4 * len(tables) + 64) * 2.0 ** -51)
    if limit <= 0.0:
        return 0
    remainder = remainder_of([(own, table) for own, table in tables if own])
    ended, looked = (None, 0) if remainder is None else search(remainder, limit, most)
    if ended != EXHAUSTED:
        raise CertificateError(_TOO_LITTLE if looked > most or remainder is None else _CHEAPER)
    return looked


def _small(network: CheckedNetwork, active: np.ndarray) -> bool:
    """Whether to minimise over what is active now, rather than to leave out more of it first."""
    flat = network.flat
    counts = np.add.reduceat(active, flat.first[:-1], dtype=np.float64)
    entries = sum(table.size for table in {id(table): table for table in network.tables}.values())
    return bool(counts.sum() <= _FEW * len(flat.first)
                or _SMALLER * counts[flat.ends].prod(axis=0).sum() <= entries)


def _prove(network: CheckedNetwork, certificate: Certificate, active: np.ndarray, limit: float, most: int) -> int:
    """Verifies that no assignment of active configurations costs less than the limit, by a certificate's potentials.
    Returns how many sums it took to minimise over what these leave open: `_MOST_SUMS` at most, or `most`.

    Raises:
      CertificateError: the potentials do not show it.
    """
    flat = network.flat
    given = _given(flat, certificate.potentials)
    theta = reparametrised(flat, given)
    near, beyond, reduced = np.empty(len(given)), np.zeros(len(given)), np.empty(len(theta))
    alike = _alike(network, given)
    for rounds in range(1 + _MOST_ROUNDS):
        least = at_layers(flat, theta, active, reduced, near)
        least_only = rounds == 0 and certificate.alone is True
        between = _at_pairs(network, alike, given, near, beyond, least_only)
        bound = math.nextafter(math.fsum([*least.tolist(), *between]), -math.inf)
        if bound >= limit:
            return 0
        missing = math.nextafter(limit - bound, math.inf)
        active = active.copy()
        excluded = exclude(flat, reduced, beyond, missing * (1 + (2 * len(between) + 16) * 2.0 ** -51), active)
        if not np.logical_or.reduceat(active, flat.first[:-1]).all():
            return 0  # every assignment has a configuration that is excluded
        last = not (excluded or least_only) or rounds == _MOST_ROUNDS
        if not last and not _small(network, active):
            continue
        try:
            tables, large = _tables(network, given, active, reduced, between), max(_MOST_SUMS, most)
            if last and certificate.searched is True:
                return _searched(tables, missing, large)
            above, sums = _least_sum(tables, large if last else _MOST_SUMS)
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
    limit = cost - 0.75 if exact else math.nextafter(math.nextafter(cost, math.inf) - tolerance, math.inf)
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
