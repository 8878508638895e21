"""A limit of the largest of several sums, against brute force."""

import itertools
import re

import numpy as np
import pytest
from random_networks import random_network

from pase_mtf.errors import InfeasibleError
from pase_mtf.search.network import CostNetwork
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


@pytest.mark.parametrize("seeds", [range(0, 300, 15), pytest.param(range(0, 300, 3), marks=pytest.mark.slow)])
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
            assert network.cost(found.assignment) == pytest.approx(found.cost, abs=1e-9)
            slack = 1e-9 * max(1.0, abs(least))
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


@pytest.mark.parametrize("seeds", [range(0, 300, 15), pytest.param(range(0, 300, 3), marks=pytest.mark.slow)])
def test_what_is_found_costs_no_more_than_what_is_known(seeds):
    """Also where, without it, nothing that fits is found."""
    saved = cheaper = 0
    for seed in seeds:
        network = random_network(seed, 400)
        everything = _everything(network)
        peak = _peak_of(sums := _sums(network, seed))
        needs = sorted({peak(choice)[0] for _, choice in everything})
        for limit in (needs[0], needs[len(needs) // 3], needs[len(needs) // 2]) if needs else ():
            fitting = [(cost, choice) for cost, choice in everything if peak(choice)[0] <= limit]
            cost, known = fitting[len(fitting) // 2]
            found = minimise_within_peak(network, sums.get, peak, limit, initial=known)
            slack = 1e-9 * max(1.0, abs(cost))
            assert peak(found.assignment)[0] <= limit
            assert found.lower_bound - slack <= fitting[0][0] <= found.cost + slack <= cost + 2 * slack
            assert not found.optimal or found.cost <= fitting[0][0] + slack
            cheaper += found.cost < cost - slack
            try:
                saved += minimise_within_peak(network, sums.get, peak, limit).cost > found.cost + slack
            except InfeasibleError:
                saved += 1
    assert cheaper
    assert saved


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


def test_a_lighter_assignment_that_is_known_is_named():
    """That which is lightest of the first sum is the heaviest of the second, and the other way round."""
    network = CostNetwork([[0.0, 1.0, 2.0]], [])
    sums = {1: [np.array([1.0, 90.0, 40.0])], 2: [np.array([90.0, 1.0, 40.0])]}
    for known, says in (((), "found nothing that needs less than 90;"), ([(2,)], "found nothing .* less than 40;")):
        with pytest.raises(InfeasibleError, match=says):
            minimise_within_peak(network, sums.get, _peak_of(sums), 30.0, known=known)
    for known, says in (((), "needs at least 1, the lightest that was found 90;"),
                        ([(2,)], "needs at least 1, the lightest that was found 40;")):
        with pytest.raises(InfeasibleError, match=f"limit of 0 bytes per device: any strategy {says}"):
            minimise_within_peak(network, sums.get, _peak_of(sums), 0.5, known=known)


def test_what_there_is_beside_a_sum():
    """Known, more is found that fits, and cheaper; nothing more is proven by it."""
    better = worse = 0
    for seed in range(0, 300, 6):
        network = random_network(seed, 400)
        everything = _everything(network)
        if not everything or not network.edges:
            continue
        sums = _sums(network, seed)
        peak, copies = _with_copies(network, sums, seed)
        needs = sorted({peak(choice)[0] for _, choice in everything})
        limit = needs[len(needs) // 4]
        least = next(cost for cost, choice in everything if peak(choice)[0] <= limit)

        def cost_of(limit=limit, network=network, sums=sums, peak=peak, least=least, **given):
            try:
                found = minimise_within_peak(network, sums.get, peak, limit, **given)
            except InfeasibleError:
                return np.inf
            slack = 1e-9 * max(1.0, abs(least))
            assert peak(found.assignment)[0] <= limit
            assert found.lower_bound - slack <= least <= found.cost + slack
            assert not found.optimal or found.cost <= least + slack
            return found.cost
        knowing, blind = cost_of(copies=copies), cost_of()
        better += knowing < blind - 1e-9
        worse += knowing > blind + 1e-9
    assert better > 2 * worse
