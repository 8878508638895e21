"""Certificates that were tampered with: whatever is handed to the checker, it verifies nothing that is not so."""

import dataclasses
import fractions
import itertools
import math
import pathlib

import numpy as np
import pytest
from random_networks import random_network

from pase_mtf.errors import InfeasibleError
from pase_mtf.search import CertificateError, certificate, check_certificate, solve
from pase_mtf.search.certificate import Certificate, Potential
from pase_mtf.search.network import CostNetwork, NetworkEdge
from pase_mtf.search.registry import Solution

INSTANCES = pathlib.Path(__file__).parents[1] / "data" / "instances"


class Untold:
    """Cannot be written into a message."""

    def __repr__(self):
        raise LookupError

    __str__ = __repr__

    def __format__(self, form):
        raise LookupError


JUNK = (None, True, -1, 10 ** 30, 10 ** 5000, -10 ** 5000, Untold(), [Untold()], 2.5, math.nan, "x", b"x", (), [], {},
        (1, "a"), np.zeros(0), np.zeros((2, 2)), np.int64(1), np.float64(0.5), np.array(["a"]), np.array([None]),
        object(), Certificate(), complex(1, 2), np.datetime64("2020-01-01"), range(3), float, Ellipsis,
        object.__new__(Potential), object.__new__(Solution))
AMOUNTS = (math.nan, math.inf, -math.inf, 1.7e308, -1.7e308, 1e290, -1e290, 1.01e290, 5e-324, -0.0, 2.0 ** 60,
           -2.0 ** 60)
DTYPES = (np.float32, np.longdouble, object, complex, np.int64, ">f8", np.float16, "M8[s]", "S8", bool)


class Exact:
    """The costs of all assignments of a small network, as fractions; those that are forbidden are left out."""

    def __init__(self, network):
        self.costs = {}
        for assignment in itertools.product(*map(range, network.sizes)):
            terms = [float(vector[choice]) for vector, choice in zip(network.vectors, assignment, strict=True)]
            terms += [float(edge.matrix[edge.rows[assignment[edge.source]], edge.columns[assignment[edge.target]]])
                      for edge in network.edges]
            if math.inf not in terms:
                self.costs[assignment] = sum(map(fractions.Fraction, terms)), sum(
                    fractions.Fraction(abs(term)) for term in terms)
        self.least = min(cost for cost, _ in self.costs.values())

    def holds(self, solution, tolerance):
        """Whether what the checker says it has verified is so."""
        cost, parts = self.costs[tuple(solution.assignment)]
        return (float(cost) == solution.cost and self.least >= cost - fractions.Fraction(tolerance)
                and 0 <= tolerance <= 1.001e-12 * float(parts))


def potentials_changed(proof, change):
    """The proof with every potential (there may be none) passed through `change`."""
    return dataclasses.replace(proof, potentials=tuple(change(entry) for entry in proof.potentials))


def noisy(proof, network, rng):
    scale = 10.0 ** rng.uniform(-15, 20)
    return potentials_changed(proof, lambda entry: dataclasses.replace(
        entry, rows=entry.rows + rng.normal(size=len(entry.rows)) * scale,
        columns=entry.columns - rng.normal(size=len(entry.columns)) * scale))


def misjudged(proof, network, rng):
    """Wrong about whether its bound is proof enough, and with a bound that mostly is not."""
    return dataclasses.replace(noisy(proof, network, rng), alone=not proof.alone)


def absorbing(proof, network, rng):
    """Large amounts on some pairs, and on others of the same layers what rounding makes of them: 0.75 ulp vanish, or
    become one."""
    large = 2.0 ** rng.integers(10, 80) * (1 + rng.integers(0, 2) * rng.random())
    ulp = math.ulp(large)
    pick = [(large, -large, large + ulp, 0.75 * ulp, -0.75 * ulp, -large + 0.5 * ulp, 0.25 * ulp, 0.0)[i]
            for i in rng.integers(0, 8, 4 * max(1, len(proof.potentials)))]
    numbers = iter(pick * 2)
    return potentials_changed(proof, lambda entry: dataclasses.replace(
        entry, rows=entry.rows + next(numbers), columns=entry.columns + next(numbers)))


def in_balance(proof, network, rng):
    """The same large amount taken from one pair of a layer and given by the next, so that sums in float64 lose what was
    there."""
    large = float(rng.choice([2.0 ** 53, 2.0 ** 60, 1e17, 3e18, 1e25, 1e200])) * float(rng.choice([-1, 1]))
    sign = {}

    def balanced(entry):
        shift = []
        for layer in (entry.source, entry.target):
            sign[layer] = -sign.get(layer, -1)
            shift.append(sign[layer] * large * (1 + float(rng.integers(0, 2)) * 2.0 ** -52))
        return dataclasses.replace(entry, rows=entry.rows + shift[0], columns=entry.columns + shift[1])
    return potentials_changed(proof, balanced)


def planted(proof, network, rng):
    """A large amount on one pair of every layer, and on another one what rounds up to its next number: in float64 the
    layer gets more than the pairs lose."""
    large, met = 2.0 ** rng.integers(5, 200), {}

    def shift(layer):
        met[layer] = met.get(layer, 0) + 1
        return {1: large, 2: 0.75 * math.ulp(large)}.get(met[layer], 0.0)
    return potentials_changed(proof, lambda entry: dataclasses.replace(
        entry, rows=entry.rows + shift(entry.source), columns=entry.columns + shift(entry.target)))


def odd_amounts(proof, network, rng):
    def change(entry):
        name = ("rows", "columns")[rng.integers(2)]
        amounts = getattr(entry, name).copy()
        amounts[rng.integers(len(amounts)):] = AMOUNTS[rng.integers(len(AMOUNTS))]
        return dataclasses.replace(entry, **{name: amounts})
    return potentials_changed(proof, change)


def odd_dtypes(proof, network, rng):
    name = ("rows", "columns", "row_classes", "column_classes")[rng.integers(4)]
    dtype = DTYPES[rng.integers(len(DTYPES))]

    def change(entry):
        with np.errstate(over="ignore"):
            values = getattr(entry, name)
            return dataclasses.replace(entry, **{name: values.astype(np.int64).astype(dtype) if dtype == "M8[s]"
                                                 else values.astype(dtype)})
    return potentials_changed(proof, change)


def odd_classes(proof, network, rng):
    name = ("row_classes", "column_classes")[rng.integers(2)]

    def change(entry):
        classes = getattr(entry, name).copy()
        kind = rng.integers(5)
        if kind == 0:
            classes[rng.integers(len(classes))] = (-1, 10 ** 6, -2 ** 31, 2 ** 31 - 1)[rng.integers(4)]
        elif kind == 1:
            classes = classes[:-1]
        elif kind == 2:
            classes = rng.permutation(classes)
        elif kind == 3:
            classes = np.concatenate([classes, classes])[:len(classes) + 1]
        else:
            classes = classes[::-1]
        return dataclasses.replace(entry, **{name: classes})
    return potentials_changed(proof, change)


def rearranged(proof, network, rng):
    entries = list(proof.potentials)
    kind = rng.integers(4)
    if kind == 0 and entries:
        entries.pop(rng.integers(len(entries)))
    elif kind == 1:
        entries += entries
    elif kind == 2:
        entries = [dataclasses.replace(entry, source=entry.target, target=entry.source) for entry in entries]
    elif entries:
        one, other = rng.integers(len(entries), size=2)
        entries[one] = dataclasses.replace(entries[one], source=entries[other].source, target=entries[other].target)
    return dataclasses.replace(proof, potentials=tuple(entries))


def junk(proof, network, rng):
    """Something else in place of any field of the certificate or of a potential."""
    thing = JUNK[rng.integers(len(JUNK))]
    name = rng.choice([field.name for field in dataclasses.fields(Certificate)])
    if rng.random() < 0.4 or not proof.potentials:
        return dataclasses.replace(proof, **{name: thing})
    entries = list(proof.potentials)
    place = rng.integers(len(entries))
    name = rng.choice([field.name for field in dataclasses.fields(Potential)])
    entries[place] = thing if rng.random() < 0.2 else dataclasses.replace(entries[place], **{name: thing})
    return dataclasses.replace(proof, potentials=tuple(entries))


def split(proof, network, rng, depth=0):
    """Cuts of random layers in random parts, some of which are none."""
    if depth == 3 or rng.random() < 0.2 * depth:
        return FORGERIES[rng.integers(5)](proof, network, rng)
    layer = int(rng.integers(len(network.sizes)))
    size = network.sizes[layer]
    part = tuple(rng.permutation(size)[:rng.integers(size + 1)].tolist())
    if rng.random() < 0.1:
        part = (*part, (size, -1, 0.5, None)[rng.integers(4)])
    proofs = [split(proof, network, rng, depth + 1), split(proof, network, rng, depth + 1)]
    kind = rng.integers(20)
    proofs = proofs[:1] if kind == 0 else [proofs[0]] * 2 if kind == 1 else [*proofs, proof] if kind == 2 else proofs
    return Certificate((), layer, part, tuple(proofs))


FORGERIES = (noisy, absorbing, in_balance, planted, odd_amounts, odd_dtypes, odd_classes, rearranged, junk, split,
             misjudged)


def claims(network, solution, exact, rng):
    """The solution, one that is not optimal (mostly), or one that is damaged."""
    kind = rng.integers(10)
    if kind < 2:
        return solution
    others = list(exact.costs)
    other = others[rng.integers(len(others))]
    if kind < 4:  # as near to the optimum as there is one
        above = [(cost, assignment) for assignment, (cost, _) in exact.costs.items() if cost > exact.least]
        other = min(above, default=(None, other))[1]
    if kind < 8:
        return dataclasses.replace(solution, assignment=other, cost=network.cost(other))
    if kind == 8:
        cost = network.cost(other)
        return dataclasses.replace(solution, assignment=other, cost=(
            math.nextafter(cost, -math.inf), cost * (1 - 1e-9), cost - 1, math.nan, -math.inf, int(cost), None,
            np.float32(cost), 10 ** 5000, Untold())[rng.integers(10)])
    last = (-1, 0.0, None, True, np.int64(0), 10 ** 30, 10 ** 5000, Untold(), "0")[rng.integers(9)]
    return dataclasses.replace(solution, assignment=(
        (*other[:-1], last), other[:-1], (*other, 0), list(other), None, np.array(other), "0" * len(other),
        tuple(choice - size for choice, size in zip(other, network.sizes, strict=True)))[rng.integers(8)])


def forge(seeds, forged_each, monkeypatch):
    """Hands forged solutions to the checker; returns how many of them were verified (all of them rightly)."""
    count = verified = 0
    for seed in seeds:
        network = random_network(seed, 200)
        try:
            solution = solve(network)
        except InfeasibleError:
            continue
        exact, rng = Exact(network), np.random.default_rng(seed)
        for number in range(forged_each):
            # Half of the time the certificate is all there is: nothing is excluded, and nothing eliminated.
            monkeypatch.setattr(certificate, "_MOST_SUMS", (1 << 22, 0)[number % 2])
            monkeypatch.setattr(certificate, "_MOST_LARGE_SUMS", (1 << 31, 0)[number % 2])
            monkeypatch.setattr(certificate, "_MOST_ROUNDS", (30, 1, 1, 3)[number % 4])
            claim = claims(network, solution, exact, rng)
            forgery = FORGERIES[rng.integers(len(FORGERIES))](solution.certificate, network, rng)
            if type(forgery) is Certificate and number % 3:  # what is left open is searched instead
                forgery = dataclasses.replace(forgery, searched=True)
            count += 1
            try:
                tolerance = check_certificate(network, dataclasses.replace(claim, certificate=forgery))
            except CertificateError:
                continue
            verified += 1
            assert exact.holds(claim, tolerance), (seed, number)
    return count, verified


@pytest.mark.parametrize("large", [2.0 ** 60, 2.0 ** 100, 1e18, 1e200])
def test_no_amount_proves_the_worst_of_a_real_network(large):
    """In float64 these potentials have a bound above anything."""
    network = CostNetwork.load(INSTANCES / "alexnet_8.npz")
    worst = tuple(size - 1 for size in network.sizes)
    claim = dataclasses.replace(solve(network), assignment=worst, cost=network.cost(worst))
    assert claim.cost > 1.1 * solve(network).cost
    for shifts in itertools.product((large, -large, 0.75 * math.ulp(large), -0.75 * math.ulp(large), 0.0), repeat=2):
        forged = potentials_changed(claim.certificate, lambda entry, shifts=shifts: dataclasses.replace(
            entry, rows=entry.rows + shifts[entry.source % 2], columns=entry.columns + shifts[entry.target % 2]))
        with pytest.raises(CertificateError):
            check_certificate(network, dataclasses.replace(claim, certificate=forged))


@pytest.mark.parametrize("damage", [
    {"assignment": (0,)}, {"assignment": None}, {"assignment": (-1,) * 14}, {"assignment": (0.5,) * 14},
    {"assignment": "a" * 14}, {"cost": None}, {"cost": math.nan}, {"cost": 10 ** 5000}, {"cost": Untold()},
    {"assignment": (10 ** 5000,) * 14}, {"certificate": "proof"}, {"certificate": object()},
    {"certificate": Certificate(layer=10 ** 5000)},
    {"certificate": Certificate((Potential(10 ** 5000, 1, *[None] * 4),))}])
def test_damaged_solutions(damage):
    network = CostNetwork.load(INSTANCES / "alexnet_8.npz")
    with pytest.raises(CertificateError):
        check_certificate(network, dataclasses.replace(solve(network), **damage))


def test_anything_at_all():
    network = random_network(0)
    for thing in JUNK:
        for one, other in ((network, thing), (thing, solve(network)), (thing, thing)):
            with pytest.raises(CertificateError):
                check_certificate(one, other)


def test_networks_that_are_none():
    """A network is not validated before it is searched; what no search can be asked to do proves nothing."""
    ends = np.array([0, 1])
    solution = solve(CostNetwork([[1.0, 2.0], [1.0, 3.0]], [NetworkEdge(0, 1, [[1.0, 0.0], [0.0, 0.0]], ends, ends)]))
    for vector, edge in (([1.0, math.nan], NetworkEdge(0, 1, np.zeros((2, 2)), ends, ends)),
                         ([1.0, -math.inf], NetworkEdge(0, 1, np.zeros((2, 2)), ends, ends)),
                         ([1.0, 2.0], NetworkEdge(0, 1, np.full((2, 2), math.nan), ends, ends)),
                         ([1.0, 2.0], NetworkEdge(0, 1, np.zeros((2, 2)), ends, ends - 1)),
                         ([1.0, 2.0], NetworkEdge(0, 1, np.zeros((2, 2)), ends, ends + 1)),
                         ([1.0, 2.0], NetworkEdge(0, 1, np.zeros((2, 2)), ends, ends[:1])),
                         ([1.0, 2.0], NetworkEdge(0, 0, np.zeros((2, 2)), ends, ends - 5)),
                         ([1.0, 2.0], NetworkEdge(0, 2, np.zeros((2, 2)), ends, ends)),
                         ([1.0, 2.0], NetworkEdge(-1, 1, np.zeros((2, 2)), ends, ends))):
        network = CostNetwork([vector, [1.0, 3.0]], [edge])
        claim = dataclasses.replace(solution, assignment=(0, 0), cost=2.0)
        with pytest.raises(CertificateError):
            check_certificate(network, claim)


def test_a_proof_within_itself():
    """Neither a ring nor what doubles at every step keeps the checker busy."""
    network = random_network(3)
    solution, ring = solve(network), []
    doubled = solution.certificate
    for _ in range(60):
        doubled = Certificate((), 0, (0,), (doubled, doubled))
    ring.append(Certificate((), 0, (0,), ring))
    deep = solution.certificate
    for _ in range(100_000):
        deep = Certificate((), 0, (0,), (deep, Certificate()))
    ring.append(ring[0])
    for proof in (doubled, ring[0], deep):
        with pytest.raises(CertificateError):
            check_certificate(network, dataclasses.replace(solution, certificate=proof))
    while deep.proofs:  # what nests so deep is taken apart by hand: Python's own way calls itself as often
        deep = deep.proofs[0]


def test_what_is_verified_is_said():
    """A network of integers: exactly; another: up to the tolerance that the checker returns."""
    ends = np.array([0, 1])
    edge = NetworkEdge(0, 1, [[0.0, 5.0], [5.0, 0.0]], ends, ends)
    whole, parts = (CostNetwork([[1.0, 2.0], [last, 7.0]], [edge]) for last in (1.0, 1.5))
    assert check_certificate(whole, solve(whole)) == 0.0
    assert check_certificate(parts, solve(parts)) == 1e-12 * 2.5


def test_forgeries(monkeypatch):
    count, verified = forge(range(0, 3000, 90), 12, monkeypatch)
    assert count > 350
    assert verified > 20  # what was done to a certificate may leave it a proof


@pytest.mark.slow
def test_ten_thousand_forgeries(monkeypatch):
    count, verified = forge(range(1, 2500, 6), 26, monkeypatch)
    assert count > 10_000
    assert verified > 500


def test_shares_of_the_least_numbers_are_not_rounded_up():
    unit = 5e-324
    centre = np.array([0.0, 11 * unit, 15 * unit])
    one, other = np.zeros((2, 3)), np.zeros((2, 3))
    one[0, 0] = other[1, 0] = 1.0
    network = CostNetwork([np.zeros(2)] * 20 + [centre] * 2, [
        NetworkEdge(v, end, costs, [0, 1], [0, 1, 2]) for v in range(20) for end, costs in ((20, one), (21, other))])
    claim = (0,) * 20 + (2, 0)
    assert network.cost((0,) * 20 + (1, 0)) < network.cost(claim)
    with pytest.raises(CertificateError):
        check_certificate(network, Solution(claim, network.cost(claim), 0.0, 0.0, True, 0.0, {},
                                            Certificate(alone=False, searched=True)))


def test_tables_that_are_too_large_are_refused(monkeypatch):
    parity = np.arange(6) % 2
    network = CostNetwork([np.zeros(6)] * 3, [NetworkEdge(u, v, np.eye(2), parity, parity)
                                              for u, v in itertools.combinations(range(3), 2)])
    solution = Solution((0, 0, 1), 1.0, 1.0, 0.0, True, 0.0, {}, Certificate(alone=False))
    assert check_certificate(network, solution) == 0.0
    monkeypatch.setattr(certificate, "_MOST_LEFT", 100)  # 3 * 35 are open
    with pytest.raises(CertificateError):
        check_certificate(network, solution)


def test_potentials_of_more_than_there_is():
    both = np.arange(2, dtype=np.int32)
    network = CostNetwork([[0.0, 1.0]] * 2, [NetworkEdge(0, 1, [[0.0, 1.0], [1.0, 0.5]], both, both)])
    solution, few = solve(network), Potential(0, 1, both, np.zeros(2), both, np.zeros(2))
    check_certificate(network, dataclasses.replace(solution, certificate=Certificate((few,))))
    for entries in ((few,) * 1000, (dataclasses.replace(few, rows=np.broadcast_to(0.0, 10 ** 6)),)):
        with pytest.raises(CertificateError):
            check_certificate(network, dataclasses.replace(solution, certificate=Certificate(entries)))


def test_parts_that_wait_are_few(monkeypatch):
    network, proof = CostNetwork([np.arange(100.0)], []), Certificate()
    for choice in range(1, 99):
        proof = Certificate((), 0, (choice,), (Certificate(), proof))
    claim = dataclasses.replace(solve(network), certificate=proof)
    assert check_certificate(network, claim) == 0.0
    monkeypatch.setattr(certificate, "_MOST_WAITING", 5000)
    with pytest.raises(CertificateError, match="too large"):
        check_certificate(network, claim)
