"""In how many microbatches a batch is computed and which blocks again: the search over both, beside trying all."""

import dataclasses
import itertools
import math
import random

import pytest

from pase_mtf.errors import InfeasibleError
from pase_mtf.launch.arms.program import exported
from pase_mtf.launch.options import Options
from pase_mtf.launch.plan import resolve
from pase_mtf.launch.reports.fitting import Choice, Fitting
from pase_mtf.launch.strategies import fitting
from pase_mtf.launch.strategies.fitting import cheapest_counts, fitting_program
from pase_mtf.machine.machine import Machine
from pase_mtf.models.blocks import blocks_of, choices_of, sets_of
from pase_mtf.strategy.within import Priced, StrategiesWithin


def _made_up(seed):
    """Numbers of microbatches, counts, what a step of them takes (more of what is computed again takes longer, and so
    do multiples of microbatches, though not more of them), and what a device holds."""
    generator = random.Random(seed)
    pieces = generator.choice([(1,), (1, 2, 4), (1, 2, 3, 4, 6, 12), (2,)])
    most = tuple(generator.randint(1, 3) for _ in range(generator.randint(0, 4)))
    costs = [[generator.random() for _ in range(count)] for count in most]
    saved = [[generator.random() for _ in range(count)] for count in most]
    of_prime = {2: generator.random(), 3: generator.random()}

    def bound(counts):
        number, cut = counts[0], 1.0
        for prime, seconds in of_prime.items():
            while number % prime == 0:
                number, cut = number // prime, cut + seconds
        return cut + sum(sum(row[:count]) for row, count in zip(costs, counts[1:], strict=True))

    def needed(counts):
        return 1.0 / counts[0] + sum(map(sum, saved)) - sum(
            sum(row[:count]) for row, count in zip(saved, counts[1:], strict=True))

    def price(counts, limit):
        """A strategy that is a fifth slower needs nine tenths."""
        if needed(counts) <= limit:
            return Priced(bound(counts), bound(counts), needed(counts))
        if 0.9 * needed(counts) <= limit:
            return Priced(1.2 * bound(counts), 1.2 * bound(counts), 0.9 * needed(counts))
        return Priced(math.inf, math.inf, math.nan)
    return pieces, most, bound, price, needed((pieces[0], *(0,) * len(most)))


@pytest.mark.parametrize("seed", range(40))
def test_it_is_the_cheapest_of_all_and_proven(seed):
    pieces, most, bound, price, whole = _made_up(seed)
    limit, priced = random.Random(seed).uniform(0.05, 1.1) * whole, []

    def once(counts):
        priced.append(counts)
        return price(counts, limit)
    known, least = cheapest_counts(pieces, most, bound, once)
    every = {counts: price(counts, limit).seconds for counts in itertools.product(
        pieces, *(range(count + 1) for count in most))}
    assert min(entry.seconds for entry in known.values()) == min(every.values()) == least
    assert len(set(priced)) == len(priced) <= len(every)


def test_thirds_may_be_faster_than_halves():
    """What does not divide each other is no bound for each other."""
    seconds = {1: 1.0, 2: 3.0, 3: 2.0, 6: 3.5}
    known, least = cheapest_counts(tuple(seconds), (), lambda counts: seconds[counts[0]], lambda counts: Priced(
        *[math.inf if counts == (1,) else seconds[counts[0]]] * 2, 1.0))
    assert min(known, key=known.__getitem__) == (3,)
    assert least == 2.0
    assert (6,) not in known


def test_what_fits_is_left_as_it_is():
    pieces, most, bound, price, whole = _made_up(3)
    known, least = cheapest_counts(pieces, most, bound, lambda counts: price(counts, whole))
    begin = (pieces[0], *(0,) * len(most))
    assert set(known) == {begin, (pieces[0], *most)}
    assert least == known[begin].seconds


def test_without_time_the_bound_is_one():
    pieces, most, bound, price, whole = _made_up(5)
    begin = (pieces[0], *(0,) * len(most))
    known, least = cheapest_counts(pieces, most, bound, lambda counts: price(counts, 0.5 * whole), time_limit=0.0)
    assert least == bound(begin) < min(entry.seconds for entry in known.values()) < math.inf
    known, least = cheapest_counts((1, 2, 4), (2, 1), lambda counts: 1.0 * counts[0],
                                   lambda counts: Priced(math.inf, 1.0 * counts[0], math.nan), time_limit=0.0)
    assert set(known) == {(1, 0, 0), (1, 2, 1)}
    assert least == 1.0  # which proves nothing


@pytest.mark.parametrize(("fits", "late"), [((16, 2), True), ((2, 0), False), (None, True)])
def test_the_most_microbatches_come_first_when_half_of_the_time_is_over(monkeypatch, fits, late):
    """Every program takes a second of eight, four of which are over when two numbers of microbatches are done."""
    now, asked = [0.0], []
    monkeypatch.setattr("pase_mtf.launch.strategies.fitting.time.monotonic", lambda: now[0])

    def price(counts):
        asked.append(counts)
        now[0] += 1.0
        return Priced(*[1.0 * counts[0] if counts == fits else math.inf] * 2, math.nan)
    known, least = cheapest_counts((1, 2, 4, 8, 16), (2,), lambda counts: 1.0 * counts[0], price, time_limit=8.0)
    assert asked[:3] == [(1, 0), (1, 2), (2, 0)]
    assert now[0] <= 8.0
    if late:
        assert asked[3:6] == [(2, 2), (16, 2), (16, 0) if fits is None else (4, 0)]
    assert min(entry.seconds for entry in known.values()) == (math.inf if fits is None else fits[0])
    assert math.isfinite(least)  # what was not looked at may fit


def test_what_a_search_has_not_proven_is_part_of_the_gap():
    known, least = cheapest_counts((1,), (1,), lambda counts: 1.0 + counts[1],
                                   lambda counts: Priced(3.0, 2.5, 1.0) if counts == (1, 1) else
                                   Priced(4.0, 1.5, 1.0))
    assert (min(entry.seconds for entry in known.values()), least) == (3.0, 1.5)


def _plan(model, mesh, batch, **options):
    return resolve(Options(model=model, mesh=mesh, batch=batch, preset="tiny", devices="cpu", machine="1080ti",
                           **options))


def _searched(plan):
    """The strategies of all programs of a run, each searched by itself."""
    offered = sets_of(choices_of(blocks_of(exported(plan)[1]))) if plan.options.recomputed is None else [()]
    return {Choice(number, blocks): StrategiesWithin(
        exported(plan.in_microbatches(number).recomputing(blocks))[0], plan.machine, plan.devices.count, 5.0)
        for number in range(1, plan.options.batch + 1) if plan.options.batch % number == 0 for blocks in offered}


@pytest.mark.slow
def test_programs_of_a_model_beside_all_of_them():
    """On one device there is one strategy each, and every limit has a fastest program that is known."""
    plan = _plan("rnnlm", "1", 1536, microbatches="auto", recompute="auto")
    every = _searched(plan)
    assert {choice.blocks for choice in every} == {(), ("lstm",)}
    need = {choice: found.free.nbytes for choice, found in every.items()}
    fewest = 0
    for limit in (max(need.values()), (need[1, ()] + need[1, ("lstm",)]) / 2, need[2, ()], need[4, ("lstm",)]):
        fits = {choice: found.free.seconds for choice, found in every.items() if need[choice] <= limit}
        found = fitting_program(_plan("rnnlm", "1", 1536, microbatches="auto", recompute="auto",
                                      memory_limit=str(math.ceil(limit))), plan.machine)
        assert found.choice == min(fits, key=fits.__getitem__)
        assert (found.seconds, found.gap) == (fits[found.choice], 0.0)
        assert "proven to be the fastest" in found.text()
        if min(fits).microbatches < found.choice.microbatches:
            fewest += 1
            assert f"in {min(fits).microbatches}: {1e3 * fits[min(fits)]:.2f} ms" in found.text()
    assert fewest == 2  # what fits in fewer microbatches computes a block again, which takes longer


@pytest.mark.parametrize(("prices", "says"), [
    ("roofline", "proven to be the fastest of 1 programs looked at"),
    ("measured", "proven to be the fastest of 1 programs looked at, by the rates of the machine")])
def test_by_which_prices_a_program_is_the_fastest_is_said(prices, says):
    plan = _plan("alexnet", "1", 4, microbatches="auto", memory_limit="1GB")
    plan = dataclasses.replace(plan, options=dataclasses.replace(plan.options, prices=prices))
    assert fitting_program(plan, plan.machine).text().endswith(says)


@pytest.mark.parametrize(("bound", "gap", "says"), [
    (2.0, 0.0, "proven to be the fastest of 1"), (1.0, 1.0, "; at most 100 % above the fastest of 1"),
    (0.0, math.inf, "; the fastest of 1")])
def test_how_far_a_program_may_be_from_the_fastest(bound, gap, says):
    choice = Choice(2, ())
    found = Fitting(choice, True, None, {choice: Priced(2.0, bound, 1e9)}, bound, 2.0, 1e9)
    assert found.gap == gap
    assert says in found.text()


@pytest.mark.parametrize(("model", "mesh", "batch", "flags", "says"), [
    ("alexnet", "1", 4, {"recompute": "auto"}, "take --microbatches=auto, a smaller --batch or --preset,"),
    ("alexnet", "1", 4, {"recompute": "auto", "microbatches": "4"}, "; take a smaller --batch or --preset,"),
    ("alexnet", "1", 4, {"microbatches": "auto"}, "4 microbatches; take --recompute=auto, a smaller --batch or"),
    ("alexnet", "1", 1, {"microbatches": "auto", "recompute": "all"}, "one microbatch; take a smaller --preset,"),
    ("alexnet", "2", 4, {"microbatches": "auto", "strategy": "data_parallel", "recompute": "all"},
     "2 microbatches; take a smaller --batch or --preset, more devices, or a larger --memory_limit"),
    ("alexnet", "2", 2, {"recompute": "auto", "strategy": "data_parallel"}, "; take a smaller --preset,"),
    ("densenet121", "1", 4, {"recompute": "auto"}, "are computed again; take a smaller --batch or --preset,"),
    ("densenet121", "1", 4, {"microbatches": "auto"}, "in one microbatch (densenet121 normalises over the batch); take "
     "--recompute=auto, a smaller --batch or --preset, more devices, or a larger --memory_limit")])
def test_what_does_not_fit_is_told_what_may_help_and_nothing_else(monkeypatch, model, mesh, batch, flags, says):
    """Which depends on what the flags left open, and on what the model and its batch have."""
    monkeypatch.setattr(fitting, "cheapest_counts", lambda pieces, most, *_: (
        {(pieces[0], *(0 for _ in most)): Priced(math.inf, math.inf, math.nan)}, math.inf))
    plan = _plan(model, mesh, batch, memory_limit="1kB", **flags)
    with pytest.raises(InfeasibleError) as caught:
        fitting_program(plan, plan.machine)
    assert says in str(caught.value)


def test_to_compile_is_not_of_the_time_for_looking(monkeypatch):
    """Else the first run on a machine finds nothing."""
    now, ends = [0.0], []
    monkeypatch.setattr(fitting.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(fitting, "ready", lambda tell: now.append(now.pop() + 100.0))

    class Programs(fitting._Programs):
        def __init__(self, *settings):
            super().__init__(*settings)
            ends.append(settings[-1])
    monkeypatch.setattr(fitting, "_Programs", Programs)
    plan = _plan("alexnet", "1", 4, microbatches="auto", memory_limit="1GB")
    assert fitting_program(plan, plan.machine).choice.microbatches == 1
    assert ends == [160.0]


@pytest.mark.parametrize(("model", "mesh", "batch", "recompute"), [
    pytest.param("rnnlm", "4", 12, "auto", marks=pytest.mark.slow), ("alexnet", "12", 24, "none")])
def test_more_is_never_faster_without_a_limit(model, mesh, batch, recompute):
    every = _searched(_plan(model, mesh, batch, recompute=recompute))
    for less, more in itertools.permutations(every, 2):
        if more.microbatches % less.microbatches == 0 and set(less.blocks) <= set(more.blocks):
            assert every[less].free.seconds < every[more].free.seconds


def test_not_all_blocks_are_not_called_all(monkeypatch):
    monkeypatch.setattr("pase_mtf.launch.reports.fitting.frontier_of", lambda *_: ())
    tried = {Choice(2, blocks): Priced(1.0, 1.0, 1.0, object()) for blocks in ((), ("a",), ("a", "b"))}
    for of, named in ((3, ["nothing computed again"]), (2, ["nothing computed again", "all blocks computed again"])):
        assert list(Fitting(Choice(2, ("a",)), True, of, tried, 1.0, 1.0, 1.0).frontiers()) == named


def test_lines_by_rates_are_not_drawn_beside_one_by_measured_kernels(monkeypatch):
    monkeypatch.setattr("pase_mtf.launch.reports.fitting.frontier_of", lambda *_: ())
    tried = {Choice(1, blocks): Priced(1.0, 1.0, 1.0, object()) for blocks in ((), ("a",))}
    for measured, drawn in ((False, ["nothing computed again"]), (True, [])):
        assert list(Fitting(Choice(1, ("a",)), False, 1, tried, 1.0, 1.0, 1.0, measured).frontiers()) == drawn


@pytest.mark.parametrize(("count", "says"), [
    (6, "whichever of 6 blocks are computed again"),
    (7, "whichever of 7 blocks, the first of each kind first, are computed again")])
def test_sets_of_blocks_that_were_not_offered_are_not_ruled_out(count, says):
    names = [f"mixed{number}" for number in range(1, count + 1)]
    assert says in fitting._nothing_fits(_plan("alexnet", "1", 4, recompute="auto"), 1e3, (1,), names, True,
                                              Machine.load("1080ti"))


def test_a_larger_limit_than_a_device_has_is_no_advice():
    """Nothing that holds more is trained; it may be searched."""
    for search_only, last in ((False, "a smaller --batch or --preset, or more devices"),
                              (True, "more devices, or a larger --memory_limit")):
        plan = _plan("alexnet", "1", 4, microbatches="auto", search_only=search_only)
        assert fitting._nothing_fits(plan, 1e3, (1,), None, True, Machine.load("1080ti")).endswith(last)


def test_a_larger_limit_is_advice_only_below_what_a_device_holds():
    machine = Machine.load("1080ti")
    for limit, larger in (("1GB", True), (str(int(machine.memory_bytes)), False), ("100GB", False)):
        plan = _plan("alexnet", "1", 4, microbatches="auto", memory_limit=limit)
        text = fitting._nothing_fits(plan, 1e3, (1,), None, True, machine)
        assert ("larger --memory_limit" in text) == larger
