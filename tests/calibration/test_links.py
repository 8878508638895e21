"""Links between processes: which there are, and that they are measured through servers, here of this process."""

import pytest
from cluster_runs import two_servers

from pase_mtf.calibration import calibrate, load
from pase_mtf.calibration.cache import PROCESSES, cache_path, fingerprint
from pase_mtf.calibration.calibrate import calibrate_processes
from pase_mtf.calibration.links import between_processes, measure_links, neighbours
from pase_mtf.calibration.load import load_machine
from pase_mtf.machine.kernels import Timing
from pase_mtf.machine.machine import Link, Machine
from pase_mtf.runtime import Devices


def _over(count, *tasks):
    return Devices.over_tasks(count, "cpu", tasks)


@pytest.mark.parametrize(("devices", "groups", "levels"), [
    (Devices.first(4, "cpu"), (4,), ()),
    (_over(1, "a:1"), (1,), ()),
    (_over(4, "a:1", "b:1", "c:1", "d:1"), (4,), ((1, 4),)),
    (_over(4, "a:1", "a:2", "a:3", "a:4"), (4,), ((1, 4),)),
    (_over(4, "a:1", "b:1"), (2, 4), ((2, 4),)),
    (_over(8, "a:1", "a:2", "b:1", "b:2"), (2, 4, 8), ((2, 4), (4, 8))),
    (_over(4, "a:1", "a:2", "b:1", "b:2"), (2, 4), ((1, 2), (2, 4))),
    # Hosts with different numbers of processes, or with processes that do not follow each other, are no level.
    (_over(3, "a:1", "a:2", "b:1"), (3,), ((1, 3),)),
    (_over(4, "a:1", "b:1", "a:2", "b:2"), (4,), ((1, 4),))])
def test_levels_of_links(devices, groups, levels):
    assert devices.link_groups == groups
    assert between_processes(devices) == levels


def test_every_device_sends_to_one_and_hears_of_one():
    assert neighbours(4, 1, 4) == [1, 2, 3, 0]
    assert neighbours(8, 2, 4) == [2, 3, 0, 1, 6, 7, 4, 5]
    assert neighbours(8, 4, 8) == [4, 5, 6, 7, 0, 1, 2, 3]


@pytest.fixture(scope="module")
def served():
    yield from two_servers()


def test_links_are_measured_through_servers(served):
    done = []
    link, = measure_links(served, done.append)
    assert (link.devices, done) == (4, [1])
    assert link.bandwidth > 0
    assert link.latency > 0


def test_a_machine_of_processes(served, monkeypatch, cache_dir, capsys):
    """With a clock that tells what it is asked to: rates of a device while all are busy, and a level for each kind of
    link; kept for these hosts, and for no others."""
    asked = []

    class Timer:
        def __init__(self, devices, kind, expected, over):
            asked.append((devices, kind, over))

        def time(self, kernels, progress):
            yield {kernel: Timing(1e-6 + 1e-10 * kernel.flops + 1e-9 * kernel.nbytes) for kernel in kernels}

    monkeypatch.setattr(calibrate, "KernelTimer", Timer)
    monkeypatch.setattr(calibrate, "measure_links", lambda devices, progress: (Link(4, 25e6, 2e-3),))
    monkeypatch.setattr(load, "_announced", set())
    machine = load_machine("local", 4, over=served)
    assert asked == [(4, "cpu", served)]
    assert not machine.shared_cores
    assert [link.devices for link in machine.links] == [2, 4]
    assert machine.links[1] == Link(4, 25e6, 2e-3)
    assert machine.measured["on"] == fingerprint(4, "cpu", served)
    assert machine.measured["on"][PROCESSES] == ["127.0.0.1"] * 2
    said = capsys.readouterr().err
    assert "for 4 cpu devices of 2 processes" in said
    assert "over 2 processes on 1 host" in said
    assert "a link of 4 devices: 25 MB/s each, 2 ms a message" in said
    # The ports of the next run are others.
    again = Devices.over_tasks(4, "cpu", ("127.0.0.1:1", "127.0.0.1:2"))
    assert load_machine("local", 4, over=again) == machine == Machine.load(cache_path(4, "cpu", again))
    others = {cache_path(4), cache_path(4, "cpu", _over(4, "a:1", "b:1")), cache_path(4, "cpu", again)}
    assert len(others) == 3
    assert len(asked) == 1


@pytest.mark.slow
def test_everything_is_measured_over_processes(served):
    machine = calibrate_processes(served, progress=False)
    assert [link.devices for link in machine.links] == [2, 4]
    assert {"matmul", "filter gradient", "copy"} <= set(machine.rates)
    machine.check_devices(4)
    assert not machine.shared_cores
