"""The loader that every entry point shares: what it takes, what it measures, what it says. Nothing is measured here."""

import dataclasses
import inspect
import subprocess
import sys

import platformdirs
import pytest

from pase_mtf.calibration import cache, calibrate, load
from pase_mtf.calibration.cache import cache_path, fingerprint, fingerprint_of_kernels
from pase_mtf.calibration.load import are_measured, load_machine
from pase_mtf.errors import FormatError, UsageError
from pase_mtf.launch.command_line import parse_command_line
from pase_mtf.launch.epochs.options import parser as epochs_parser
from pase_mtf.layout import __main__ as layout_command
from pase_mtf.layout.capture import swap_lowering
from pase_mtf.layout.find import find_layout
from pase_mtf.machine.kernel_table import save_tables
from pase_mtf.machine.kernel_times import KernelTimes
from pase_mtf.machine.kernels import Timing
from pase_mtf.machine.machine import KINDS, LOCAL, Link, Machine
from pase_mtf.pipeline.find import find_pipeline
from pase_mtf.runtime import Devices
from pase_mtf.strategy.find import find_strategy
from pase_mtf.strategy.strategy import evaluate_strategy

MEASURED = Machine("local", dict.fromkeys(KINDS, 2e10), 3e10, 1e9, 2e-6, (Link(8, 2e10, 5e-6),), shared_cores=True,
                   source="measured here")


@pytest.fixture
def calls(cache_dir, monkeypatch):
    """The numbers of devices that were measured, in an empty cache, with nothing announced yet."""
    found = []

    def measure(devices, kind="cpu", *, progress=True):
        found.append(devices)
        return dataclasses.replace(MEASURED, measured={"on": fingerprint(devices, kind)})

    monkeypatch.setattr(calibrate, "calibrate", measure)
    monkeypatch.setattr(load, "_announced", set())
    return found


def test_what_is_given(calls, tmp_path):
    MEASURED.save(tmp_path / "mine.json")
    assert load_machine(MEASURED) is MEASURED
    assert load_machine("h100") == Machine.load("h100")
    assert load_machine(tmp_path / "mine.json") == load_machine(str(tmp_path / "mine.json")) == MEASURED
    with pytest.raises(UsageError, match="did you mean 'h100'"):
        load_machine("h10")
    with pytest.raises(FormatError, match="check the path"):
        load_machine(tmp_path / "nothing.json")
    assert calls == []


def test_every_entry_point_takes_the_machine_at_hand_where_none_is_named():
    """Of the calls their default, of the commands what they are without --machine."""
    for function in (find_strategy, evaluate_strategy, find_pipeline, find_layout, swap_lowering, load_machine):
        assert inspect.signature(function).parameters["machine"].default == LOCAL, function
    assert parse_command_line(["--model=alexnet", "--mesh=2"]).machine == LOCAL
    assert layout_command._FLAGS["machine"].default == LOCAL
    assert epochs_parser("").parse_args(["project", "--curve=curve.csv"]).machine == LOCAL


def test_local_is_measured_once(calls, cache_dir):
    first = load_machine()
    assert cache_path(8).is_file()
    assert cache_dir in cache_path(8).parents
    assert load_machine("local") == load_machine(None) == first
    assert calls == [8]
    load_machine("local", 4)
    assert calls == [8, 4]
    load_machine("local", again=True)
    assert calls == [8, 4, 8]


def test_a_truncated_cache_is_measured_again(calls):
    first = load_machine()
    text = cache_path(8).read_text()
    cache_path(8).write_text(text[:len(text) // 2])
    assert load_machine() == first
    assert calls == [8, 8]
    assert cache_path(8).read_text() == text


@pytest.mark.parametrize(("name", "value"), [
    ("cores", lambda: 77.0), ("processor_name", lambda: "abacus"), ("tensorflow_version", lambda: "9.9"),
    ("VERSION", -1)])
def test_other_circumstances_are_measured_again(calls, monkeypatch, name, value):
    load_machine()
    monkeypatch.setattr(cache, name, value)
    load_machine()
    load_machine()
    assert calls == [8, 8]


def test_a_file_of_other_circumstances_is_not_believed(calls):
    load_machine()
    Machine.load(cache_path(8))
    dataclasses.replace(MEASURED, measured={"on": {"cores": 3}}).save(cache_path(8))
    load_machine()
    assert calls == [8, 8]


def test_it_says_so_once(calls, capsys):
    load_machine()
    said = capsys.readouterr()
    assert said.out == ""
    before, after = said.err.splitlines()
    assert before == "machine: local is measured first, for 8 cpu devices (some seconds, once)"
    assert after == f"machine: local, measured here, kept in {cache_path(8)}"
    load_machine()
    assert capsys.readouterr().err == ""
    load._announced.clear()
    load_machine()
    assert capsys.readouterr().err == f"{after}\n"


def test_no_place_for_the_cache(calls, monkeypatch, tmp_path, capsys):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert load_machine().rates == MEASURED.rates
    assert "cannot be kept in" in capsys.readouterr().err
    load_machine()
    assert calls == [8, 8]


def test_without_tensorflow_the_data_sheets_are_named(calls, monkeypatch):
    monkeypatch.setattr(load, "tensorflow_version", lambda: None)
    with pytest.raises(UsageError, match=r"TensorFlow.*not installed.*1080ti.*h100, .*h200"):
        load_machine("local")
    assert calls == []


def test_errors(calls):
    with pytest.raises(UsageError, match="at least one"):
        load_machine("local", 0)
    with pytest.raises(UsageError, match="did you mean 'gpu'"):
        load_machine("local", 1, "gpus")
    assert calls == []


def test_a_kept_measurement_is_read_without_tensorflow(calls):
    load_machine()
    code = ("import sys; from pase_mtf.calibration.load import load_machine; machine = load_machine('local', 8); "
            "assert not {'tensorflow', 'scipy.optimize'} & set(sys.modules); print(machine.source)")
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert found.stdout == "measured here\n"
    assert found.stderr == f"machine: local, measured here, kept in {cache_path(8)}\n"


_MEASURES = """
import sys, time
from pase_mtf.calibration import cache
with cache.measuring_alone(lambda: None):
    print("measures", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("ends", ["finished", "killed"])
def test_one_waits_while_another_measures(calls, capsys, ends):
    """A word on the console, and then the other's numbers; the machine is measured anew where the other was killed."""
    other = subprocess.Popen([sys.executable, "-c", _MEASURES], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                             text=True)
    try:
        assert other.stdout.readline() == "measures\n"

        def announced(line, announce=load._announce):
            announce(line)
            if "waited for" in line:
                assert calls == []
                if ends == "finished":
                    cache.write_cached(dataclasses.replace(MEASURED, measured={"on": fingerprint(4, "cpu")}), 4)
                    other.stdin.close()
                else:
                    other.kill()
        before = cache.seconds_waited()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(load, "_announce", announced)
            assert load_machine("local", 4).measured["on"]["devices"] == 4
        assert cache.seconds_waited() > before
    finally:
        other.kill()
        other.wait()
        other.stdout.close()
    assert calls == ([] if ends == "finished" else [4])
    assert "machine: local is measured by another run, which is waited for\n" in capsys.readouterr().err


def test_measures_where_nothing_can_be_locked(calls, cache_dir):
    cache_dir.rmdir()
    cache_dir.write_text("no folder")
    assert load_machine("local", 4)
    assert calls == [4]


def test_prices_are_those_that_there_are_of_a_machine(tmp_path):
    kernels = tmp_path / "kernels.json"
    save_tables(kernels, [KernelTimes(fingerprint_of_kernels(8), {})])
    assert not are_measured(None, "h100")
    assert not are_measured("roofline", "local")
    assert are_measured("measured", "local")
    assert are_measured(None, kernels)
    assert are_measured("measured", kernels)
    with pytest.raises(UsageError, match=r"prices=roofline: .*kernels\.json holds the times of kernels"):
        are_measured("roofline", kernels)
    with pytest.raises(UsageError, match="did you mean 'measured'"):
        are_measured("mesured", "h100")
    with pytest.raises(UsageError, match=r"^--prices=mesured: unknown"):
        are_measured("mesured", "h100", "--prices")


def test_machines_are_measured_again_where_kernels_are_timed_in_another_way(cache_dir, monkeypatch):
    before = cache.cache_path(2)
    monkeypatch.setattr(cache, "KERNEL_VERSION", cache.KERNEL_VERSION + 1)
    assert cache.cache_path(2) != before


def test_more_devices_than_can_be_driven_are_not_measured(calls):
    with pytest.raises(UsageError, match="at most 1024 virtual"):
        load_machine("local", 10 ** 6)
    assert calls == []


def test_gpus_of_a_list_are_measured_and_not_the_first(cache_dir, monkeypatch):
    """Recorded numbers stand for the devices."""
    asked = []

    class Timer:
        def __init__(self, devices, kind, expected, over):
            if expected is None:
                asked.append(over)

        def time(self, kernels, progress):
            yield {kernel: Timing(5e-6 + 1e-13 * kernel.flops + 1e-12 * kernel.nbytes) for kernel in kernels}

    monkeypatch.setattr(calibrate, "KernelTimer", Timer)
    monkeypatch.setattr(calibrate, "gpu_bytes", lambda devices: {
        "/device:GPU:0": 16e9, "/device:GPU:1": 80e9}[devices.names[0]])
    monkeypatch.setattr("pase_mtf.compat.tf.config.list_physical_devices", lambda kind: [kind] * 2)
    monkeypatch.setattr(cache, "gpu_names", lambda: ["T4", "A100"])
    monkeypatch.setattr(load, "_announced", set())
    listed = Devices("gpu", ("/device:GPU:1",), "A100")
    machine = load_machine("local", 1, "gpu", over=listed)
    assert (asked, machine.memory_bytes, machine.measured["on"]["gpus"]) == ([listed], 80e9, ["A100"])
    first = load_machine("local", 1, "gpu", over=Devices.first(1, "gpu"))
    assert (asked, first.memory_bytes, first.measured["on"]["gpus"]) == ([listed, None], 16e9, ["T4"])


def test_without_a_home_folder_a_line_says_what_to_set(calls, monkeypatch):
    def unknown(*_, **__):
        raise RuntimeError("could not determine the home directory for '~/.cache'")
    monkeypatch.setattr(platformdirs, "user_cache_path", unknown)
    for ask in (load_machine, cache.kernel_tables, cache.traces_path, lambda: cache.kernels_path(2)):
        with pytest.raises(UsageError, match="set HOME, or XDG_CACHE_HOME"):
            ask()
    assert calls == []
