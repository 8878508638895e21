"""find_strategy by measured kernels: of the machine at hand, where a clock that tells what it is asked to stands for
the machine's, or from a file."""

import contextlib
import math
import time

import platformdirs
import pytest

from pase_mtf import export_graph, find_strategy
from pase_mtf.calibration.cache import KERNEL_VERSION, fingerprint_of_kernels, kernels_path
from pase_mtf.calibration.load import load_machine
from pase_mtf.compat import mtf, tf
from pase_mtf.errors import FormatError, InfeasibleError, PaseError, UsageError
from pase_mtf.machine.kernel_file import load_times
from pase_mtf.machine.kernel_table import save_tables
from pase_mtf.machine.kernel_times import KernelTimes
from pase_mtf.machine.kernels import TINY, Timing
from pase_mtf.machine.references import REFERENCES
from pase_mtf.search import Solution
from pase_mtf.strategy import by_kernels, warm
from pase_mtf.strategy.experts import data_parallel
from pase_mtf.strategy.measured import MeasuredPrices
from pase_mtf.strategy.strategy import Strategy


@contextlib.contextmanager
def _built(inner="hidden"):
    """An mtf.Graph: two products and their update; the dim between them has this name."""
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        batch, io, hidden = mtf.Dimension("batch", 16), mtf.Dimension("io", 64), mtf.Dimension(inner, 128)
        x = mtf.import_tf_tensor(mesh, tf.zeros([16, 64]), mtf.Shape([batch, io]))
        w = mtf.get_variable(mesh, "w", mtf.Shape([io, hidden]))
        v = mtf.get_variable(mesh, "v", mtf.Shape([hidden, io]))
        y = mtf.einsum([mtf.relu(mtf.einsum([x, w], mtf.Shape([batch, hidden]))), v], mtf.Shape([batch, io]))
        loss = mtf.reduce_mean(mtf.square(y - x))
        mtf.optimize.SgdOptimizer(0.1).apply_grads(mtf.gradients([loss], [w, v]), [w.operation, v.operation])
        yield graph


@pytest.fixture(scope="module")
def program():
    with _built() as graph:
        yield graph


@pytest.fixture
def saved(cache_dir, timed_kernels, program, tmp_path):
    """A file with the kernels of the program's best strategy."""
    find_strategy(program, 4, prices="measured")
    save_tables(tmp_path / "mine.json", [load_times(kernels_path(4))])
    timed_kernels.clear()
    return tmp_path / "mine.json"


def test_by_the_machine_at_hand(cache_dir, timed_kernels, program, capsys):
    found = find_strategy(program, 4, prices="measured")
    kernels = found.search["kernels"]
    assert kernels["of_strategy"] == kernels["measured_of_strategy"] > 5
    assert kernels["rounds"] >= 1
    assert f"all {kernels['of_strategy']} kernels of it measured" in found.table()
    assert load_times(kernels_path(4)).on == fingerprint_of_kernels(4)
    assert "round 1: " in capsys.readouterr().err
    by_hand = find_strategy(program, 4, method="data_parallel", prices="measured")
    assert found.seconds <= by_hand.seconds * (1 + 1e-9)
    walked = find_strategy(program, 4, method="mcmc", prices="measured", seed=3)
    assert walked.seconds <= by_hand.seconds * (1 + 1e-9)
    assert walked.search["kernels"]["of_strategy"] == walked.search["kernels"]["measured_of_strategy"]
    assert "without a bound" in walked.table()


@pytest.mark.parametrize("method", ["exact", "mcmc"])
def test_to_compile_is_not_of_the_time_for_measuring(cache_dir, timed_kernels, program, monkeypatch, capsys, method):
    """Else a first search measures next to nothing, where nobody compiled before."""
    whole, late, compiled = time.perf_counter, [0.0], []

    def compile_kernels():
        compiled.append(len(timed_kernels))
        late[0] += 1000.0
    monkeypatch.setattr(time, "perf_counter", lambda: whole() + late[0])
    monkeypatch.setattr(warm, "_done", [])
    monkeypatch.setattr(warm, "compile_kernels", compile_kernels)
    found = find_strategy(program, 4, method=method, prices="measured", measure_seconds=60.0)
    kernels = found.search["kernels"]
    assert kernels["of_strategy"] == kernels["measured_of_strategy"] > 5
    find_strategy(program, 4, prices="measured")
    assert len(compiled) == 1


def test_nothing_is_called_ahead_where_nothing_is_compiled(monkeypatch):
    """With NUMBA_DISABLE_JIT: what is large so that all is compiled would take an hour."""
    called = []
    monkeypatch.setattr(warm, "_done", [])
    monkeypatch.setattr(warm, "seconds_now", lambda: 0.0)
    monkeypatch.setattr(warm, "compile_kernels", lambda: called.append("compiled"))
    warm.ready(called.append)
    assert called == []


def test_by_a_file(saved, timed_kernels, program, tmp_path):
    there = find_strategy(program, 4, machine=saved)
    here = find_strategy(program, 4, prices="measured")
    assert there.configurations == here.configurations
    assert there.seconds == pytest.approx(here.seconds, rel=1e-3)
    assert set(timed_kernels) == set(REFERENCES)  # those that a search here begins with
    there.save(tmp_path / "strategy.json")
    assert Strategy.load(tmp_path / "strategy.json").verdict == there.verdict
    with pytest.raises(InfeasibleError):
        find_strategy(program, 4, machine=str(saved), memory_limit=1.0)
    text = (tmp_path / "strategy.json").read_text().replace('"of_strategy": ', '"of_strategy": "many", "rest": ')
    (tmp_path / "strategy.json").write_text(text)
    with pytest.raises(FormatError, match="kernels of"):
        Strategy.load(tmp_path / "strategy.json")


@pytest.mark.parametrize(("arguments", "says"), [
    ({"prices": "mesured"}, "did you mean 'measured'"), ({"simulate": 3}, "simulate is for roofline prices"),
    ({"idle": True}, "idle is for roofline prices"), ({"time_limit": 3.0}, "time_limit is for roofline prices"),
    ({"method": "pase"}, "is for roofline prices"), ({"measure_seconds": 0.0}, "measure_seconds=0.0"),
    ({"machine": "h100"}, "'h100' is neither"), ({"devices": 2}, "holds kernels of 4 devices, not of 2")])
def test_what_measured_prices_cannot(saved, program, arguments, says):
    with pytest.raises(PaseError, match=says):
        find_strategy(program, **{"devices": 4, "prices": "measured", "machine": str(saved), **arguments})


def test_who_does_not_price_by_kernels(saved, program):
    with pytest.raises(UsageError, match="give what it was exported from"):
        find_strategy(export_graph(program), 4, machine=str(saved))
    with pytest.raises(UsageError, match="holds kernel times"):
        load_machine(str(saved), 4)


@pytest.mark.parametrize("how", [{"method": "expert"}, {"method": "mcmc", "start_from": "expert"}])
def test_a_mesh_for_more_devices_is_refused_before_anything_is_measured(cache_dir, timed_kernels, how):
    with _built("heads") as graph, pytest.raises(UsageError, match="needs 16 devices, there are 4"):
        find_strategy(graph, 4, prices="measured", mesh=[("rows", 4), ("cols", 4)], **how)
    assert not timed_kernels


@pytest.mark.parametrize(("older", "told"), [(0, False), (1, True)])
def test_a_file_of_another_way_of_timing_is_said(tmp_path, capsys, older, told):
    path = tmp_path / "mine.json"
    save_tables(path, [KernelTimes({**fingerprint_of_kernels(8), "version": KERNEL_VERSION - older},
                                   {TINY: Timing(1e-5)})])
    by_kernels.kernel_times(str(path), 8)
    known, *notes = capsys.readouterr().err.splitlines()
    assert known == f"kernels: 1 are known, from {path}; none is measured here"
    assert [note.startswith(f"note: {path}: its kernels were timed in another way (version {KERNEL_VERSION - 1}, "
                            f"today's is {KERNEL_VERSION})")
            for note in notes] == [True] * told


def test_gpus_are_not_priced(cache_dir):
    with pytest.raises(UsageError, match="those of CPUs only"):
        by_kernels.kernel_times("local", 2, "gpu")


def test_operations_that_nobody_knows_are_said(cache_dir, timed_kernels, program, monkeypatch, capsys):
    from pase_mtf.lowering import kernels
    trace = kernels.GraphKernels._trace

    def failing(self, operation, spec, lower, again=()):
        if "einsum" in operation.name:
            raise kernels._UntracedError("EinsumOperation: no reason at all")
        return trace(self, operation, spec, lower, again)

    monkeypatch.setattr(kernels.GraphKernels, "_trace", failing)
    found = find_strategy(program, 4, prices="measured")
    assert found.search["kernels"]["untraced"] == ["EinsumOperation: no reason at all"]
    assert ("note: 1 operation could not be lowered or timed alone, and is estimated: EinsumOperation: no reason at all"
            in capsys.readouterr().err)


def test_telling_says_what_begins_and_now_and_then_how_far_it_is(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(by_kernels.time, "monotonic", lambda: now[0])
    tell = by_kernels.Telling("alexnet")
    for seconds, text in ((0, "round 1: 90 to measure"), (1, "round 1: 24 of 90"), (3, "round 1: 48 of 90"),
                          (1, "round 1: 72 of 90"), (0, "round 2: 3 to measure")):
        now[0] += seconds
        tell(text)
    assert capsys.readouterr().err.splitlines() == [
        "alexnet: round 1: 90 to measure", "alexnet: round 1: 48 of 90", "alexnet: round 2: 3 to measure"]
    tell.note("one")
    tell.note("another")
    assert capsys.readouterr().err.splitlines() == ["alexnet: note: one", "alexnet: note: another"]


def test_a_chain_that_has_no_time_finds_nothing_that_costs_more_than_its_start(cache_dir, timed_kernels, program,
                                                                               monkeypatch):
    """What was not looked at seems cheap until it is: here it takes a thousand times as long."""
    from pase_mtf.lowering import kernels
    start, layer = data_parallel(export_graph(program), 4), kernels.GraphKernels.layer

    def trapped(self, number, configuration):
        times = 1 if configuration == start[number] else 1000
        return {phase: {kernel: times * count for kernel, count in counts.items()}
                for phase, counts in layer(self, number, configuration).items()}

    def walked(network, method, **_):
        choice = tuple(len(vector) - 1 for vector in network.vectors)
        return Solution(choice, network.cost(choice), -math.inf, math.inf, False, 0.0, {})
    monkeypatch.setattr(kernels.GraphKernels, "layer", trapped)
    monkeypatch.setattr("pase_mtf.strategy.measured.solve", walked)
    found = find_strategy(program, 4, method="mcmc", prices="measured", measure_seconds=1e-9)
    assert found.configurations == start


def test_data_parallelism_is_not_taken_for_as_good_because_it_is_estimated_too_low(cache_dir, timed_kernels, program,
                                                                                  monkeypatch):
    """Where strategies are weighed against others what was not measured counts for more than its estimate."""
    by_hand, wary = data_parallel(export_graph(program), 4), MeasuredPrices.wary_seconds
    assert find_strategy(program, 4, prices="measured", simple_within=1e3).configurations == by_hand
    monkeypatch.setattr(MeasuredPrices, "wary_seconds", lambda self, one: wary(self, one) * (
        1e6 if tuple(one) == by_hand else 1.0))
    found = find_strategy(program, 4, prices="measured", simple_within=1e3)
    assert found.configurations != by_hand
    assert "simpler" not in found.search


def test_without_a_home_folder_kernels_of_a_file_are_priced_by(saved, program, monkeypatch):
    """None is measured, and what operations become need not be kept."""
    def unknown(*_, **__):
        raise RuntimeError("could not determine the home directory for '~/.cache'")
    expected = find_strategy(program, 4, machine=saved)
    monkeypatch.setattr(platformdirs, "user_cache_path", unknown)
    assert find_strategy(program, 4, machine=saved).seconds == pytest.approx(expected.seconds)
