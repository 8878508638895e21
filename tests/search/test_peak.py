"""A limit of the largest of several sums, against brute force."""

import contextlib
import itertools
import re

import numpy as np
import pytest
from random_networks import random_network

from pase_mtf.errors import InfeasibleError
from pase_mtf.search import Solution
from pase_mtf.search.looking_on import LookingOn
from pase_mtf.search.nearby import Nearby
from pase_mtf.search.network import CostNetwork, NetworkEdge
from pase_mtf.search.packed import pack
from pase_mtf.search.peak import minimise_within_peak


def _everything(network):
    """Cost -> assignment, of all finite ones."""
    costs = ((network.cost(choice), choice) for choice in itertools.product(*map(range, network.sizes)))
    return sorted((cost, choice) for cost, choice in costs if np.isfinite(cost))


def _sums(network, seed):
    """Three sums of which any may be the largest: what is kept, and one of three blocks."""
    rng = np.random.default_rng(seed)
    kept = [rng.integers(0, 10, size).astype(float) for size in network.sizes]
    return {key: [vector + rng.integers(0, 40, len(vector)) * (rng.random() < 0.5) for vector in kept]
            for key in (1, 2, 3)}


def _peak_of(sums):
    def peak(choice):
        return max((sum(vector[one] for vector, one in zip(vectors, choice, strict=True)), key)
                   for key, vectors in sums.items())
    return peak


def _slack(everything, cost):
    """What costs may differ by that are the same: by what assignments cost, which may be next to nothing."""
    most = max(abs(everything[0][0]), abs(everything[-1][0])) or 1.0
    return 1e-9 * max(abs(cost), min(1.0, most))


@pytest.mark.parametrize("seeds", [range(0, 300, 15), pytest.param(
    [seed for seed in range(0, 300, 3) if seed % 15], marks=pytest.mark.slow)])
def test_against_brute_force(seeds):
    proven = unproven = refused = bounds = exact = 0
    for seed in seeds:
        network = random_network(seed, 400)
        everything = _everything(network)
        if not everything:
            continue
        sums = _sums(network, seed)
        peak = _peak_of(sums)
        needs = sorted({peak(choice)[0] for _, choice in everything})
        for limit in (needs[0], needs[len(needs) // 3], needs[len(needs) // 2], 0.9 * needs[0]):
            least = next((cost for cost, choice in everything if peak(choice)[0] <= limit), None)
            try:
                found = minimise_within_peak(network, sums.get, peak, limit)
            except InfeasibleError as error:
                refusal = error
                # What takes least of every sum may still be missed where no two sums agree.
                assert least is None or not refusal.proven
                assert refusal.proven == ("found nothing that needs less" not in str(refusal))
                assert everything[0][0] * (1 - 1e-9) <= refusal.lower_bound
                assert least is None or refusal.lower_bound <= least * (1 + 1e-9)
                named = [int(number) for number in re.findall(r"\d+", str(refusal))][1:]
                assert named[-1] in needs
                if len(named) == 2:  # of one sum, and of an assignment
                    assert named[0] <= needs[0]
                    bounds += 1
                elif refusal.proven:
                    assert named == needs[:1]
                    exact += 1
                refused += 1
                continue
            assert least is not None
            assert peak(found.assignment)[0] <= limit
            slack = _slack(everything, least)
            assert network.cost(found.assignment) == pytest.approx(found.cost, abs=slack)
            assert found.lower_bound <= least + slack
            if found.optimal:
                assert found.cost <= least + slack
                proven += 1
            else:
                unproven += 1
    assert proven > 5 * unproven
    assert proven > len(seeds) // 2
    assert refused
    assert bounds
    assert exact


def test_what_is_known_is_kept_where_the_cheapest_was_found_in_haste():
    """Out of time, or to within a gap, what is found without a limit may fit and cost more than what is known."""
    network = CostNetwork([[0.0, 1.0]] * 2, [NetworkEdge(0, 1, [[10.0, 10.0], [10.0, 0.0]], [0, 1], [0, 1])])
    sums = {1: [np.array([1.0, 2.0])] * 2}
    hasty = Solution((0, 0), 10.0, 1.5, 0.85, False, 0.0, {})
    found = minimise_within_peak(network, sums.get, _peak_of(sums), 9.0, cheapest=hasty, initial=(1, 1))
    assert (found.assignment, found.cost, found.lower_bound) == ((1, 1), 2.0, 1.5)
    assert (found.gap, found.optimal) == (0.25, False)


@pytest.mark.parametrize("seeds", [range(0, 300, 15), pytest.param(
    [seed for seed in range(0, 300, 3) if seed % 15], marks=pytest.mark.slow)])
def test_what_is_found_costs_no_more_than_what_is_known(seeds):
    cheaper = 0
    for seed in seeds:
        network = random_network(seed, 400)
        everything = _everything(network)
        peak = _peak_of(sums := _sums(network, seed))
        needs = sorted({peak(choice)[0] for _, choice in everything})
        for limit in (needs[0], needs[len(needs) // 3], needs[len(needs) // 2]) if needs else ():
            fitting = [(cost, choice) for cost, choice in everything if peak(choice)[0] <= limit]
            cost, known = fitting[len(fitting) // 2]
            found = minimise_within_peak(network, sums.get, peak, limit, initial=known)
            slack = _slack(everything, cost)
            assert peak(found.assignment)[0] <= limit
            assert found.lower_bound - slack <= fitting[0][0] <= found.cost + slack <= cost + 2 * slack
            assert not found.optimal or found.cost <= fitting[0][0] + slack
            cheaper += found.cost < cost - slack
    assert cheaper


def _with_copies(network, sums, seed):
    """A peak that holds, beside the largest sum, what differs between neighbours; and its `copies`."""
    rng = np.random.default_rng([seed, 1])
    pairs = {(edge.source, edge.target): rng.integers(0, 30, (network.sizes[edge.source], network.sizes[edge.target]))
             for edge in network.edges}
    largest = _peak_of(sums)

    def peak(choice):
        used, key = largest(choice)
        return used + float(sum(table[choice[i], choice[j]] for (i, j), table in pairs.items())), key

    def copies(choice, key):
        found = [np.zeros(size) for size in network.sizes]
        for (i, j), table in pairs.items():
            found[j] += table[choice[i]]
        return found
    return peak, copies


def test_the_lightest_assignment_is_named(monkeypatch):
    """That which is lightest of the first sum is the heaviest of the second, and the other way round."""
    network = CostNetwork([[0.0, 1.0, 2.0]], [])
    sums = {1: [np.array([1.0, 90.0, 40.0])], 2: [np.array([90.0, 1.0, 40.0])]}
    with pytest.raises(InfeasibleError, match="the least any strategy needs is 40;"):
        minimise_within_peak(network, sums.get, _peak_of(sums), 30.0)
    with pytest.raises(InfeasibleError, match="found nothing that needs less than 90;"):
        minimise_within_peak(network, sums.get, _peak_of(sums), 30.0, patience=0.0)
    for seconds, known, found in ((2.0, (), 40), (0.0, (), 90), (0.0, [(2,)], 40)):
        monkeypatch.setattr("pase_mtf.search.peak._LIGHTENING", seconds)
        says = f"needs at least 1, the lightest that was found {found};"
        with pytest.raises(InfeasibleError, match=f"limit of 0 bytes per device: any strategy {says}"):
            minimise_within_peak(network, sums.get, _peak_of(sums), 0.5, known=known)


def _instances(seeds, most=400):
    """Network, sums, peak, copies, and (peak, cost) of all assignments, of networks in which layers meet."""
    for seed in seeds:
        network = random_network(seed, most)
        everything = _everything(network)
        if everything and network.edges:
            sums = _sums(network, seed)
            peak, copies = _with_copies(network, sums, seed)
            yield network, sums, peak, copies, [(peak(choice)[0], cost) for cost, choice in everything]


@pytest.mark.parametrize("in_order", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seeds", [range(0, 300, 25), pytest.param(range(300, 900, 7), marks=pytest.mark.slow)])
def test_what_there_is_beside_a_sum(seeds, in_order, monkeypatch):
    """What fits is found wherever there is something that does, and it is as good as is told; whether copies are
    estimated or not. With assignments in order few networks are too large to be searched to the end."""
    if not in_order:
        monkeypatch.setattr("pase_mtf.search.looking_on._MOST_IN_ORDER", 0)
    proven = searched = best = 0
    for network, sums, peak, copies, everything in _instances(seeds):
        needs = sorted({used for used, _ in everything})
        for part in (0.0, 0.02, 0.1, 0.3):
            limit = needs[int(part * (len(needs) - 1))]
            least = min(cost for used, cost in everything if used <= limit)
            slack = 1e-9 * max(1.0, abs(least))
            for given in ({"copies": copies}, {}):
                found = minimise_within_peak(network, sums.get, peak, limit, **given)
                assert peak(found.assignment)[0] <= limit
                assert found.lower_bound - slack <= least <= found.cost + slack
                assert found.cost <= least + found.gap * abs(found.cost) + slack
                searched += 1
                proven += found.optimal
                best += found.cost <= least + slack
        with pytest.raises(InfeasibleError) as refused:
            minimise_within_peak(network, sums.get, peak, 0.99 * needs[0], copies=copies)
        named = float(re.findall(r"\d+", str(refused.value))[-1])
        assert named in needs
        if in_order and "at least" not in str(refused.value):
            assert named == needs[0]
    assert searched
    assert best > (0.999 if in_order else 0.98) * searched
    assert proven > (0.999 if in_order else 0.2) * searched


@pytest.mark.parametrize("in_order", [True, False])
def test_a_looser_limit_is_no_worse(in_order, monkeypatch):
    if not in_order:
        monkeypatch.setattr("pase_mtf.search.looking_on._MOST_IN_ORDER", 0)
    for network, sums, peak, copies, everything in _instances(range(7, 300, 60)):
        needs, costs = sorted({used for used, _ in everything}), []
        for limit in needs[:len(needs) // 2:max(1, len(needs) // 16)]:
            costs.append(minimise_within_peak(network, sums.get, peak, limit, copies=copies).cost)
        assert all(after <= before + 1e-9 * max(1.0, abs(before)) for before, after in itertools.pairwise(costs))


def test_what_a_sum_rules_out_may_be_the_lightest():
    """Nobody looks at (1, 1, 1), whose only sum that is known lies above the limit, by as much as the peak allows."""
    network, peaks = CostNetwork([[0.0, 1.0]] * 3, []), {(0, 0, 0): 150.0, (1, 1, 1): 110.0}
    sums = {1: [np.array([30.0, 36.0])] * 3}
    with pytest.raises(InfeasibleError, match="at least 108, the lightest that was found 150;"):
        minimise_within_peak(network, sums.get, lambda choice: (peaks.get(tuple(choice), 200.0), 1), 100.0)


def test_no_room_for_the_order_loses_nothing(monkeypatch):
    """What was searched within one sum's limit before takes less memory than assignments in the order of costs. Nor is
    anything proven by an order that there is no room for."""
    looked, reached, in_order = 0, [], LookingOn._in_order

    def without_room(self):
        before = self._best, self._cost, self._bound, self._complete
        in_order(self)
        assert (self._best, self._cost, self._bound, self._complete) == before
        reached.append(before)
    monkeypatch.setattr(LookingOn, "_in_order", without_room)
    for seed in range(0, 300, 3):
        network = random_network(seed, 400)
        everything, sums = _everything(network), _sums(network, seed)
        if not everything:
            continue
        packed, peak = pack(network.normalized()), _peak_of(sums)
        room = packed.bytes + 1.6 * (40 * len(packed.unary) + 16 * packed.potentials)
        needs = sorted(peak(choice)[0] for _, choice in everything)
        with contextlib.suppress(InfeasibleError):
            minimise_within_peak(network, sums.get, peak, needs[len(needs) // 3], search_memory=room)
            looked += 1
    assert looked > 20
    assert reached


def test_an_order_of_costs_that_cancel_proves_nothing():
    """Beside 1e20 the 3 of the last assignment is rounded away: in order it comes after all others."""
    def diagonal(*costs):
        return np.where(np.eye(4, dtype=bool), costs, np.inf)
    every, sums = np.arange(4), [np.ones(4)] * 3
    network = CostNetwork([[-1.0, -0.5, -0.25, 1e20], [0.0, 0.0, 0.0, -1e20], [0.0] * 4], [
        NetworkEdge(0, 1, diagonal(0.0, 0.0, 0.0, -3.0), every, every),
        NetworkEdge(1, 2, diagonal(0.0, 0.0, 0.0, 0.0), every, every)])
    found = minimise_within_peak(network, lambda key: sums, lambda choice: (3.0 if any(choice) else 10.0, 0), 5.0,
                                 certificate=False)
    assert (found.assignment, found.cost, found.optimal) == ((3, 3, 3), -3.0, True)


def test_a_byte_above_the_limit_is_no_rounding():
    network, sums = CostNetwork([[0.0, 1.0]], []), {1: [np.array([2e9, 1e9])]}
    assert minimise_within_peak(network, sums.get, _peak_of(sums), 2e9).assignment == (0,)
    assert minimise_within_peak(network, sums.get, _peak_of(sums), 2e9 - 1).assignment == (1,)


def test_what_holds_nothing_of_a_sum_does_not_use_up_the_time():
    """Below zero bytes there is no limit to lower: the order of costs, which proves the optimum, has its time."""
    network, sums = CostNetwork([[0.0, 1.0, 2.0]], []), {1: [np.array([0.0, 90.0, 40.0])],
                                                         2: [np.array([90.0, 0.0, 40.0])]}
    for _ in range(2):  # what is compiled at first is not of its time
        found = minimise_within_peak(network, sums.get, _peak_of(sums), 50.0)
    assert (found.assignment, found.cost, found.optimal) == ((2,), 2.0, True)


def test_an_order_by_charges_that_dwarf_costs_proves_nothing():
    """Beside half a terabyte at a second a byte, 1e-10 of all is a hundred seconds; 9 fits as well as 10."""
    every, alike, most = np.arange(2), np.array([[0.0, np.inf], [np.inf, 0.0]]), 5e11
    network = CostNetwork([[10.0, 9.0], [0.0, 0.0], [0.0, 0.0]], [
        NetworkEdge(0, 1, alike, every, every), NetworkEdge(1, 2, alike, every, every)])
    sums = {0: [np.array([most - 3, most]), np.zeros(2), np.zeros(2)]}

    def within(sums_, limit, gap):
        raise InfeasibleError("nothing found", proven=False)
    nearby = Nearby(network, sums.get, _peak_of(sums), 100)
    nearby.look((0, 0, 0))
    tried = {0: Solution((0, 0, 0), 10.0, 5.0, 0.5, False, 0.0, {"multiplier": 1.0, "memory": most - 3})}
    found = LookingOn(network, within, sums.get, nearby, most, tried, 0.0).search(5.0)
    assert found.cost == 9.0 or not found.optimal


def test_what_is_forbidden_is_nothing_known():
    """However little it holds: it is not taken for what fits, nor for the lightest."""
    network, sums = CostNetwork([[0.0, np.inf]], []), {1: [np.array([9.0, 1.0])]}
    with pytest.raises(InfeasibleError, match="the least any strategy needs is 9;"):
        minimise_within_peak(network, sums.get, _peak_of(sums), 5.0, initial=(1,))
    network = CostNetwork([[0.0, 1.0, np.inf]], [])
    sums = {1: [np.array([1.0, 90.0, 40.0])], 2: [np.array([90.0, 1.0, 40.0])]}
    with pytest.raises(InfeasibleError, match="the least any strategy needs is 90;"):
        minimise_within_peak(network, sums.get, _peak_of(sums), 50.0, known=[(2,)])
