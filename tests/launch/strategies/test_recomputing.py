"""Which blocks are computed again: the search over their sets, beside trying all of them."""

import itertools
import math
import random

import pytest

from pase_mtf.launch.strategies.recomputing import cheapest_counts
from pase_mtf.strategy.within import Priced


def _made_up(seed):
    """Counts, what a step of them takes (more of what is computed again takes longer), and what a device holds."""
    generator = random.Random(seed)
    most = tuple(generator.randint(1, 3) for _ in range(generator.randint(1, 4)))
    costs = [[generator.random() for _ in range(count)] for count in most]
    saved = [[generator.random() for _ in range(count)] for count in most]

    def bound(counts):
        return 1.0 + sum(sum(row[:count]) for row, count in zip(costs, counts, strict=True))

    def needed(counts):
        return sum(map(sum, saved)) - sum(sum(row[:count]) for row, count in zip(saved, counts, strict=True))

    def price(counts, limit):
        """A strategy that is a fifth slower needs nine tenths."""
        if needed(counts) <= limit:
            return Priced(bound(counts), bound(counts), needed(counts))
        if 0.9 * needed(counts) <= limit:
            return Priced(1.2 * bound(counts), 1.2 * bound(counts), 0.9 * needed(counts))
        return Priced(math.inf, math.inf, math.nan)
    return most, bound, price, needed((0,) * len(most))


@pytest.mark.parametrize("seed", range(20))
def test_it_is_the_cheapest_of_all_and_proven(seed):
    most, bound, price, whole = _made_up(seed)
    limit, priced = random.Random(seed).uniform(0.05, 1.1) * whole, []

    def once(counts):
        priced.append(counts)
        return price(counts, limit)
    known, least = cheapest_counts(most, bound, once)
    every = {counts: price(counts, limit).seconds for counts in itertools.product(
        *(range(count + 1) for count in most))}
    assert min(entry.seconds for entry in known.values()) == min(every.values()) == least
    assert len(set(priced)) == len(priced) <= len(every)


def test_what_fits_is_left_as_it_is():
    most, bound, price, whole = _made_up(3)
    known, least = cheapest_counts(most, bound, lambda counts: price(counts, whole))
    assert set(known) == {(0,) * len(most), most}
    assert least == known[(0,) * len(most)].seconds


def test_without_time_the_bound_is_one():
    most, bound, price, whole = _made_up(5)
    known, least = cheapest_counts(most, bound, lambda counts: price(counts, 0.5 * whole), time_limit=0.0)
    assert len(known) == 2
    assert least == bound((0,) * len(most)) < min(entry.seconds for entry in known.values())


def test_what_a_search_has_not_proven_is_part_of_the_gap():
    known, least = cheapest_counts((1,), lambda counts: 1.0 + counts[0],
                                   lambda counts: Priced(3.0, 2.5, 1.0) if counts == (1,) else
                                   Priced(4.0, 1.5, 1.0))
    assert (min(entry.seconds for entry in known.values()), least) == (3.0, 1.5)
