"""Searches that measure what matters, against all strategies with everything measured."""

import copy
import dataclasses
import itertools
import math
import pickle
import random
import time

import pytest
from pretended_meter import PretendedMeter
from small_graphs import perceptron

from pase_mtf.cost.kernels import KnownKernels
from pase_mtf.errors import InfeasibleError, UsageError
from pase_mtf.graph.configurations import Configuration, enumerate_configurations
from pase_mtf.machine.kernels import Block, Kernel
from pase_mtf.strategy.experts import data_parallel, expert
from pase_mtf.strategy.measured import MeasuredPrices
from pase_mtf.strategy.measuring import measure
from pase_mtf.strategy.within import solve_within

_DEVICES = PretendedMeter.devices


def _block(operand, configuration):
    return Block("float32", tuple(size // configuration.shards(name) for name, size in zip(
        operand.dims, operand.shape, strict=True)))


class _Source:
    """The kernels of a perceptron: one for every operation, and one for every move."""

    def __init__(self, graph):
        self._graph, self.untraced = graph, {}

    def layer(self, number, configuration):
        found = {}
        for operation in self._graph.layers[number].operations:
            blocks = [_block(operand, configuration) for operand in (*operation.inputs, *operation.outputs)]
            name = "MatMul" if operation.kind == "matmul" else "Sub"
            kernel = Kernel(name, tuple(blocks[:2]), tuple(blocks[2:]) or (blocks[0],))
            counts = found.setdefault(operation.phase, {})
            counts[kernel] = counts.get(kernel, 0) + 1
        return found

    def alike(self, number):
        return number

    def move(self, source, target, shape, itemsize):
        if source == target:
            return {}
        blocks = [Block("float32", partition.block_shape(shape)) for partition in (source, target)]
        return {Kernel("ConcatV2", (blocks[0],), (blocks[1],)): len(target.devices)}


def _everything_measured(graph):
    """Seconds of every strategy."""
    source, meter = _Source(graph), PretendedMeter()
    known = KnownKernels(graph, source)
    offered = [enumerate_configurations(layer, _DEVICES) for layer in graph.layers]
    found = {}
    for configurations in itertools.product(*offered):
        known.look(configurations)
        kernels = known.kernels(configurations)
        meter.measure(list(kernels))
        found[configurations] = sum(meter.times.get(kernel).seconds * times for kernel, times in kernels.items())
    return found, len(meter.asked)


@pytest.fixture(scope="module")
def graph():
    return perceptron((16, 256, 16), 4)


@pytest.fixture(scope="module")
def everything(graph):
    return _everything_measured(graph)


def test_the_optimum_is_proven_with_few_kernels(graph, everything):
    meter = PretendedMeter()
    found = MeasuredPrices(graph, _Source(graph), meter).find(prove=True)
    seconds, kernels = everything
    assert found.search["optimal"]
    assert found.search["gap"] == 0.0
    assert found.seconds == pytest.approx(min(seconds.values()))
    assert seconds[found.configurations] == pytest.approx(found.seconds)
    assert len(meter.asked) < kernels
    report = found.search["kernels"]
    assert report["of_strategy"] == report["measured_of_strategy"]
    assert report["rounds"] >= 1


@pytest.mark.parametrize("limit", [0, 10, 40])
def test_with_little_time_the_gap_is_told(graph, everything, limit):
    seconds, _ = everything
    found = MeasuredPrices(graph, _Source(graph), PretendedMeter(limit)).find(prove=True)
    assert not found.search["optimal"] or found.search["gap"] == 0.0
    assert 0.0 < found.search["lower_bound"] <= min(seconds.values()) * (1 + 1e-9)
    assert found.search["gap"] == pytest.approx(
        max(0.0, found.seconds / found.search["lower_bound"] - 1.0), abs=1e-6)


def test_without_a_proof_a_strategy_of_measured_kernels(graph, everything):
    seconds, _ = everything
    found = MeasuredPrices(graph, _Source(graph), PretendedMeter()).find()
    assert seconds[found.configurations] == pytest.approx(found.seconds)
    assert found.seconds <= min(seconds.values()) * (1 + found.search["gap"]) * (1 + 1e-9)


def test_a_later_run_does_not_measure_for_as_long_as_the_first(graph):
    """Nothing at all here; whatever it is told, the first one has to."""
    first = PretendedMeter()
    found = MeasuredPrices(graph, _Source(graph), first).find(seconds=1e9, later_seconds=0.0)
    assert found.search["kernels"]["measured_of_strategy"] == found.search["kernels"]["of_strategy"]
    known = KnownKernels(graph, _Source(graph))
    known.look(found.configurations)
    _, *all_but_one = known.kernels(found.configurations)
    for seconds, again in ((None, True), (0.0, False)):
        later = PretendedMeter()
        later.measure(all_but_one)
        told = MeasuredPrices(graph, _Source(graph), later).find(seconds=1e9, later_seconds=seconds)
        assert (len(later.asked) > len(all_but_one)) is again
        assert told.search["lower_bound"] <= told.seconds


def test_what_was_disturbed_is_timed_again_for_as_long_as_a_later_search_may(graph, monkeypatch):
    """All arms of a run together: who trains again wants to train."""
    now, given, meter = [0.0], [], PretendedMeter()
    monkeypatch.setattr("pase_mtf.strategy.measured.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("pase_mtf.strategy.measuring.time.perf_counter", lambda: now[0])
    MeasuredPrices(graph, _Source(graph), meter).find()

    def again(kernels, seconds=math.inf, progress=None):
        given.append(seconds)
        now[0] += 0.3
        return 0

    meter.measure_again = again
    prices = MeasuredPrices(graph, _Source(graph), meter)
    found = prices.find(seconds=1e9, later_seconds=0.5)
    for _ in range(2):
        prices.evaluate(found.configurations, "again", seconds=1e9)
    assert given == pytest.approx([0.5, 0.2])


@pytest.mark.parametrize(("prove", "expected"), [(False, 0), (True, 1)])
def test_to_prove_takes_no_longer_than_to_find(graph, monkeypatch, prove, expected):
    """However many seconds there are, unless a proof is what was asked for; and it says how far it is."""
    told, now, looks = [], [0.0], []
    monkeypatch.setattr("pase_mtf.strategy.measured.time.perf_counter", lambda: now[0])
    meter = PretendedMeter()
    measure = meter.measure

    def slow(kernels, *given, **more):
        now[0] += 1.0 if not looks else 1e3  # a proof takes a thousand times as long
        return measure(kernels, *given, **more)

    def tell(text):
        told.append(text)
        if text.startswith("proof: "):
            looks.append(now[0])
    meter.measure = slow
    found = MeasuredPrices(graph, _Source(graph), meter, tell).find(seconds=1e9, prove=prove)
    assert found.search["optimal"] is bool(expected)
    assert looks[0] > 0.0
    assert all(begun <= 2 * looks[0] for begun in looks[:-1]) is not prove
    assert "proof: no step takes less than " in "".join(told)


def test_what_was_not_measured_counts_for_more_than_its_estimate(graph, everything):
    """Of many strategies that one seems cheapest of which most is estimated too low."""
    offered = [enumerate_configurations(layer, _DEVICES) for layer in graph.layers]
    by_hand = data_parallel(graph, _DEVICES)
    for limit, some in ((math.inf, False), (12, True)):
        prices = MeasuredPrices(graph, _Source(graph), PretendedMeter(limit))
        found = prices.evaluate(by_hand, "data parallel")
        assert prices.wary_seconds(by_hand) == pytest.approx(found.seconds)  # all of it is known
        told = [(prices.evaluate(configurations, "one").seconds, prices.wary_seconds(configurations))
                for configurations in itertools.islice(itertools.product(*offered), 60)]
        assert all(wary >= seconds * (1 - 1e-9) for seconds, wary in told)
        assert any(wary > 1.01 * seconds for seconds, wary in told) is some


class _Traps(_Source):
    """Whatever people would not write costs a thousand times what it seems to."""

    def layer(self, number, configuration):
        by_hand = (data_parallel(self._graph, _DEVICES)[number], expert(self._graph, _DEVICES)[number])
        times = 1 if configuration in by_hand else 1000
        return {phase: {kernel: times * count for kernel, count in counts.items()}
                for phase, counts in super().layer(number, configuration).items()}


def test_no_strategy_of_people_is_cheaper():
    """However little time there was: what was not looked at seems cheap until it is."""
    graph = perceptron((256, 1024, 256), 256)
    prices = MeasuredPrices(graph, _Traps(graph), PretendedMeter())
    found = prices.find(seconds=1e-9)
    for by_hand in (data_parallel(graph, _DEVICES), expert(graph, _DEVICES)):
        assert found.seconds <= prices.evaluate(by_hand, "by hand").seconds * (1 + 1e-9)


class _OutOfMemory(PretendedMeter):
    """Cannot time large products, of which it knows no better than that they may be quick."""

    def missing(self, kernels):
        return [kernel for kernel in super().missing(kernels) if kernel not in self.failed]

    def measure(self, kernels, *given, **more):
        self.failed.update({kernel: "too large" for kernel in self.missing(kernels) if more.get("factor") is None
                            and kernel.operation == "MatMul" and kernel.nbytes > 1 << 20})
        return super().measure(self.missing(kernels), *given, **more)


def test_what_cannot_be_measured_is_not_taken_for_quick():
    graph = perceptron((256, 1024, 256), 256)
    prices = MeasuredPrices(graph, _Source(graph), _OutOfMemory())
    found = prices.find(prove=True)
    for by_hand in (data_parallel(graph, _DEVICES), expert(graph, _DEVICES)):
        assert prices.wary_seconds(found.configurations) <= prices.wary_seconds(by_hand) * (1 + 1e-9)


def test_a_strategy_by_what_is_known_later(graph, everything):
    """All of its kernels are measured now; when it was found, none was."""
    seconds, _ = everything
    meter = PretendedMeter(0)
    prices = MeasuredPrices(graph, _Source(graph), meter)
    early = prices.find()
    meter._left = math.inf
    prices.evaluate(early.configurations, "the same")
    later = prices.again(early)
    assert later.seconds == pytest.approx(seconds[early.configurations])
    assert later.search["kernels"]["measured_of_strategy"] > early.search["kernels"]["measured_of_strategy"]
    # Rounds and seconds are those of its search, and so is what that looked at.
    assert {name: later.search["kernels"][name] for name in ("seen", "measured", "rounds", "seconds")} == {
        name: early.search["kernels"][name] for name in ("seen", "measured", "rounds", "seconds")}
    assert later.search["gap"] == pytest.approx(later.seconds / later.search["lower_bound"] - 1.0)
    by_hand = data_parallel(graph, _DEVICES)
    prices.evaluate(by_hand, "data_parallel")
    instead = prices.again(early, by_hand)
    assert (instead.name, instead.seconds) == (early.name, pytest.approx(seconds[by_hand]))


class _Hastening(PretendedMeter):
    """From some moment on kernels take a fiftieth: faster than anything before."""

    fast = False

    def measure(self, kernels, *given, **more):
        new = self.missing(kernels)
        count = super().measure(kernels, *given, **more)
        if self.fast:
            self.times.update({kernel: dataclasses.replace(timing, seconds=timing.seconds / 50)
                               for kernel in new if (timing := self.times.get(kernel))})
        return count


def _bound_of(prices, memory_limit=None):
    """By all that is known now."""
    return prices._solve(prices._priced(bounds=True), memory_limit, math.inf).lower_bound


def test_what_is_measured_last_counts_for_the_bound(graph, monkeypatch):
    """It may be faster than anything that the search by bounds knew of, and so may what nobody measured."""
    monkeypatch.setattr("pase_mtf.strategy.measured._FIRST_TIME", 2.0)  # no proof is tried
    meter = _Hastening()
    prices = MeasuredPrices(graph, _Source(graph), meter)
    tighten, before = prices._tighten, []

    def then_faster(*given):
        solution = tighten(*given)
        before.append((solution.lower_bound, len(meter.asked)))
        meter.fast = True
        return solution
    monkeypatch.setattr(prices, "_tighten", then_faster)
    found = prices.find()
    (bound, asked), = before
    assert len(meter.asked) > asked
    assert found.seconds < bound  # which was one as far as kernels were known
    assert found.search["lower_bound"] == pytest.approx(_bound_of(prices))
    assert found.search["gap"] == pytest.approx(found.seconds / found.search["lower_bound"] - 1.0)
    assert found.search["gap"] > 0.0
    assert not found.search["optimal"]


@pytest.mark.parametrize("share", [None, 2.0])
def test_a_proof_holds_until_kernels_turn_out_to_be_faster(share, monkeypatch):
    for name in ("_SEARCH_SECONDS", "_SECONDS_WITHIN"):  # a slow machine has to find the same bound twice
        monkeypatch.setattr(f"pase_mtf.strategy.measured.{name}", 60.0)
    graph, draw = perceptron((64, 512, 64, 512), 16), random.Random(0)
    prices = MeasuredPrices(graph, _Source(graph), meter := _Hastening())
    limit = share and share * prices.find(prove=True).memory_bytes
    early = prices.find(prove=True, memory_limit=limit)
    assert (early.search["optimal"], early.search.get("memory_limit")) == (True, limit)
    assert "proven optimal, unless kernels that were not timed are faster" in early.verdict
    assert prices.again(early).search["optimal"]
    offered = [enumerate_configurations(layer, _DEVICES) for layer in graph.layers]
    meter.fast = True
    for _ in range(150):
        prices.evaluate(list(map(draw.choice, offered)), "one")
    later = prices.again(early)
    assert later.seconds == pytest.approx(early.seconds)
    assert later.search["lower_bound"] == pytest.approx(_bound_of(prices, limit))
    assert not later.search["optimal"]
    assert later.search["gap"] == pytest.approx(later.seconds / later.search["lower_bound"] - 1.0)
    assert later.search["gap"] > 0.0


@pytest.mark.parametrize("faster", [False, True])
def test_a_bound_is_not_lower_for_want_of_time(monkeypatch, faster):
    """A search that has not come far leaves of the bound before what still holds."""
    graph, draw = perceptron((64, 512, 64, 512), 16), random.Random(0)
    meter, limits = _Hastening(), []
    prices = MeasuredPrices(graph, _Source(graph), meter)
    early = prices.find(prove=True)
    assert early.search["optimal"]
    prices._bounds[None] = prices._bounds[None]._replace(took=7.0)
    solve = prices._solve

    def hurried(priced, memory_limit, end):
        limits.append(end - time.perf_counter())
        return dataclasses.replace(solve(priced, memory_limit, end), lower_bound=1e-12)
    meter.fast = faster
    offered, before = [enumerate_configurations(layer, _DEVICES) for layer in graph.layers], len(meter.times)
    for _ in range(4):
        prices.evaluate(list(map(draw.choice, offered)), "one")
    assert len(meter.times) > before
    monkeypatch.setattr(prices, "_solve", hurried)
    monkeypatch.setattr("pase_mtf.strategy.measured.time.perf_counter", lambda: 100.0)
    later = prices.again(early)
    monkeypatch.undo()
    bound = later.search["lower_bound"]
    assert bound <= _bound_of(prices) * (1 + 1e-9)
    if faster:
        assert not later.search["optimal"]
        assert limits == [pytest.approx(7.0)]
        assert 1e-12 < bound < early.search["lower_bound"]  # as much less as what has fallen most
    else:
        assert later.search["optimal"]
        assert bound == pytest.approx(early.search["lower_bound"])
        assert not limits


def test_alternatives_that_only_seem_cheaper_are_called_unmeasured(graph, everything):
    seconds, _ = everything
    prices = MeasuredPrices(graph, _Source(graph), PretendedMeter())
    costliest = max(seconds, key=seconds.get)
    found = prices.evaluate(costliest, "given")
    for number in range(len(graph.layers)):
        rows = [line.split() for line in found.explain(number, 100).splitlines()[3:]]
        cheaper = [row for row in rows if float(next(cell for cell in row if cell[0] in "+-")) < 0]
        assert all(row[-2:] == ["not", "measured"] for row in cheaper)
    assert cheaper
    # Once all that differs is measured, nothing is left to say.
    beside = next(other for other in sorted(seconds, key=seconds.get)
                  if sum(one != two for one, two in zip(other, costliest, strict=True)) == 1)
    prices.evaluate(beside, "given")
    number, = (number for number in range(len(beside)) if beside[number] != costliest[number])
    row, = (line for line in prices.evaluate(costliest, "given").explain(number, 100).splitlines()
            if line.startswith(f"{beside[number]} "))
    assert "measured" not in row
    for told, why in (({"simulated_rank": 2}, "chosen by simulated steps"),
                      ({"memory_limit": 1.0}, "beyond the memory limit")):
        again = dataclasses.replace(found, search={**found.search, **told})
        assert any(line.startswith(f"{beside[number]} ") and line.endswith(why)
                   for line in again.explain(number, 100).splitlines())


def test_strategies_by_kernels_are_copied_and_pickled(graph):
    found = MeasuredPrices(graph, _Source(graph), PretendedMeter()).find()
    for again in (copy.copy(found), copy.deepcopy(found)):
        assert again == found
        assert again.explain(0) == found.explain(0)
    assert again.search is not found.search
    again = pickle.loads(pickle.dumps(found))
    assert again == found
    assert str(again) == str(found)
    with pytest.raises(UsageError, match="knows no prices"):
        again.explain(0)


def test_given_strategies(graph, everything):
    seconds, _ = everything
    prices = MeasuredPrices(graph, _Source(graph), PretendedMeter())
    by_hand = data_parallel(graph, _DEVICES)
    found = prices.evaluate(by_hand, "data_parallel")
    assert found.seconds == pytest.approx(seconds[by_hand])
    assert found.search["kernels"]["of_strategy"] == found.search["kernels"]["measured_of_strategy"]
    # Alternatives of its layers are priced as well, if only by a model.
    assert "batch" in found.explain(0)


def test_shares_of_steps(graph):
    meter = PretendedMeter()
    prices = MeasuredPrices(graph, _Source(graph), meter)
    strategies = [write(graph, _DEVICES) for write in (data_parallel, expert)]
    assert prices.shares(strategies) == {}  # of what was not measured nothing is known
    for strategy in strategies:
        prices.evaluate(strategy, "given")
    alone = [prices.shares([strategy]) for strategy in strategies]
    for shares, strategy in zip(alone, strategies, strict=True):
        assert sum(shares.values()) == pytest.approx(1.0)
        run, step = prices._known.kernels(strategy), prices._cost(strategy)
        assert shares == pytest.approx({kernel: count * meter.times.get(kernel).seconds / step
                                        for kernel, count in run.items()})
    assert alone[0] != alone[1]
    assert prices.shares(strategies) == pytest.approx(
        {kernel: sum(one.get(kernel, 0.0) for one in alone) / 2 for kernel in alone[0].keys() | alone[1].keys()})
    assert prices.shares([]) == {}


def test_strategies_for_more_devices_are_refused_before_anything_is_measured(graph):
    meter = PretendedMeter()
    prices = MeasuredPrices(graph, _Source(graph), meter)
    for price in (prices.evaluate, prices.improve):
        with pytest.raises(UsageError, match="needs 8 devices, there are 4"):
            price([Configuration((("", 8),))] * len(graph.layers), "given")
    assert not meter.asked


def test_data_parallelism_where_it_is_as_good(graph, everything):
    seconds, _ = everything
    found = MeasuredPrices(graph, _Source(graph), PretendedMeter()).find(prove=True, simple_within=1e3)
    assert found.configurations == data_parallel(graph, _DEVICES)
    assert found.search["simpler"] == "data_parallel"
    assert found.seconds == pytest.approx(seconds[found.configurations])


@pytest.mark.parametrize("batch", [4, 6])
def test_data_parallelism_that_is_taken_instead_tells_its_own_kernels(batch):
    """Over three of the devices, where six examples do not split over four."""
    graph = perceptron((16, 256, 16, 8), batch)
    prices = MeasuredPrices(graph, _Source(graph), PretendedMeter())
    best, taken = prices.find(), prices.find(simple_within=1e3)
    assert taken.search["kernels"]["of_strategy"] == taken.search["kernels"]["measured_of_strategy"]
    alone = prices.evaluate(data_parallel(graph, 3 if batch == 6 else _DEVICES), "data_parallel")
    assert taken.configurations == alone.configurations
    assert taken.search["kernels"] == alone.search["kernels"]
    assert taken.search["kernels"]["of_strategy"] != best.search["kernels"]["of_strategy"]


@pytest.mark.parametrize("disturbed", [0, 2])
def test_what_was_timed_while_others_slowed_the_machine_is_said(disturbed):
    told, meter = [], PretendedMeter()
    kernels = [Kernel("Sub", (Block("float32", (size,)),) * 2, (Block("float32", (size,)),)) for size in (2, 3, 5)]

    class Slowed(PretendedMeter):
        def measure(self, *arguments):
            self.disturbed += disturbed
            return super().measure(*arguments)

    meter.__class__ = Slowed
    assert measure(meter, kernels, math.inf, "round 1", told.append) == 3
    assert ("2 of 3 kernels were timed meanwhile" in told[-1]) == (disturbed > 0)


def test_what_was_proven_is_proven_by_a_later_search(graph):
    """It finds all in the table, and measures nothing."""
    meter = PretendedMeter()
    first = MeasuredPrices(graph, _Source(graph), meter).find(prove=True)
    assert first.search["optimal"]
    asked = len(meter.asked)
    later = MeasuredPrices(graph, _Source(graph), meter).find()
    assert later.search["optimal"]
    assert later.search["gap"] == 0.0
    assert (later.seconds, len(meter.asked)) == (pytest.approx(first.seconds), asked)


def test_a_limit_without_end_is_none(graph):
    found = MeasuredPrices(graph, _Source(graph), PretendedMeter()).find(memory_limit=math.inf)
    assert "memory_limit" not in found.search


def test_what_was_proven_without_end_of_memory_is_not_searched_again(graph, monkeypatch):
    prices = MeasuredPrices(graph, _Source(graph), PretendedMeter())
    found = prices.find(prove=True, memory_limit=math.inf)
    assert found.search["optimal"]
    monkeypatch.setattr(prices, "_solve_by_bounds", None)  # nobody is to call it
    again = prices.again(found)
    assert again.search["optimal"]
    assert again.search["lower_bound"] == found.search["lower_bound"]


def test_what_keeps_a_limit_is_kept_where_later_searches_find_nothing(graph, monkeypatch):
    """They have other prices, and less time."""
    prices, given = MeasuredPrices(graph, _Source(graph), PretendedMeter()), []
    limit = 2.0 * prices.find().memory_bytes

    def hurried(*arguments, known, **options):
        given.append(known)
        if len(given) > 1 and known is None:
            raise InfeasibleError("no assignment found in time", proven=False)
        return solve_within(*arguments, known=known, **options)
    monkeypatch.setattr("pase_mtf.strategy.measured.solve_within", hurried)
    assert prices.find(memory_limit=limit).memory_bytes <= limit
    assert given[0] is None
