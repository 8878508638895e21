"""Step times: given, between, composed; their files."""

import math

import numpy as np
import pytest

from pase_mtf.epochs.curve import Run
from pase_mtf.epochs.step_times import StepTimes
from pase_mtf.errors import DataError, FormatError, UsageError

_STEPS = {(1, 1): 0.8, (4, 1): 1.0, (16, 1): 2.0, (1, 2): 0.5}


def test_given_between_and_composed():
    steps = StepTimes(32, _STEPS)
    assert (steps.at(4, 1).seconds, steps.at(4, 1).source) == (1.0, "given")
    assert steps.at(8, 1).seconds == pytest.approx(2 ** 0.5)
    assert steps.at(8, 1).source == "interpolated"
    # SU_2 = 0.8 / 0.5, SE_4 = 0.8 / 1.0: 0.8 / (SU_2 * SE_4)
    assert steps.at(4, 2).seconds == pytest.approx(0.8 / (1.6 * 0.8))
    assert steps.at(4, 2).source == "composed"
    assert steps.at(8, 2).seconds == pytest.approx(0.5 * 2 ** 0.5 / 0.8)


def test_nothing_is_made_up():
    steps = StepTimes(32, _STEPS)
    assert steps.at(32, 1) is None  # more workers than were given
    assert steps.at(32, 2) is None
    assert steps.at(4, 8) is None


def test_files_give_back_what_was_written(tmp_path):
    path = tmp_path / "steps.json"
    steps = StepTimes(32, _STEPS, "measured here")
    steps.save(path)
    assert StepTimes.load(path) == steps
    assert StepTimes.load(path, 32) == steps
    with pytest.raises(UsageError, match="holds steps of 32 examples"):
        StepTimes.load(path, 64)
    steps.save(tmp_path / "steps")
    assert StepTimes.load(tmp_path / "steps") == steps
    StepTimes(32, {(np.int64(n), np.int32(m)): np.float32(s) for (n, m), s in _STEPS.items()}).save(path)
    assert StepTimes.load(path).seconds == pytest.approx(_STEPS)
    table = tmp_path / "steps.csv"
    table.write_text("ways,seconds,workers\n" + "".join(f"{m},{s},{n}\n" for (n, m), s in _STEPS.items()))
    assert StepTimes.load(table, 32).seconds == _STEPS
    with pytest.raises(UsageError, match=r"give worker_batch \(on the command line --worker_batch\)"):
        StepTimes.load(table)


@pytest.mark.parametrize(("worker_batch", "seconds", "source", "message"), [
    (4, 5, "", "seconds=5: give a dict"), (4, [(1, 1)], "", "give a dict"), (4, {}, "", "no step times"),
    (4, {(1, 1): "a"}, "", "a step of 'a' s"), (4, {(1, 1): True}, "", "a step of True s"),
    (4, {(1, 1): math.nan}, "", "a step of nan s"), (4, {5: 1.0}, "", "for 5: give"), (4, {"ab": 1.0}, "", "for 'ab'"),
    (4, {(1, 1, 1): 1.0}, "", "give seconds above 0"), (4, {("1", 1): 1.0}, "", "give seconds above 0"),
    (4, {(1.5, 1): 1.0}, "", "give seconds above 0"), (4.0, {(1, 1): 1.0}, "", "worker_batch=4.0"),
    (4, {(1, 1): 1.0}, 5, "source=5: say in words")])
def test_what_are_no_step_times(worker_batch, seconds, source, message):
    with pytest.raises(UsageError, match=message) as caught:
        StepTimes(worker_batch, seconds, source)
    assert "\n" not in str(caught.value)


def test_what_python_callers_give_is_checked():
    for path in (5, None, [], "a\0b"):
        with pytest.raises(UsageError, match="is no path"):
            StepTimes.load(path, 4)
    with pytest.raises(UsageError, match="at: workers='4': is no int"):
        StepTimes(32, _STEPS).at("4", 1)


@pytest.mark.parametrize(("text", "message"), [
    ("", "empty"), ("workers,seconds\n1,2\n", "write workers,ways,seconds"), ("workers,ways,seconds\n", "no steps"),
    ("workers,ways,seconds\n1,1\n", "line 2"), ("workers,ways,seconds\n1,1,0\n", "line 2"),
    ("workers,ways,seconds\n1,1,inf\n", "line 2"), ("workers,ways,seconds\n0,1,1\n", "line 2"),
    (f"workers,ways,seconds\n1,1{400 * '0'},1\n", "line 2"), (f"workers,ways,seconds\n1,1,{200_000 * '9'}\n", "larger"),
    ("workers,ways,seconds\n1,1,1\n1,1,2\n", "line 3.*twice")])
def test_what_is_no_table(tmp_path, text, message):
    path = tmp_path / "steps.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        StepTimes.load(path, 8)


def test_a_mix_that_stands_in_a_file_twice(tmp_path):
    path = tmp_path / "steps.json"
    StepTimes(32, {(1, 1): 0.5, (1, 2): 0.25}).save(path)
    text = path.read_text().replace('"ways": 2', '"ways": 1')
    path.write_text(text)
    with pytest.raises(FormatError, match=r"steps\.json: 1 workers with 1 devices each stand there twice; leave one"):
        StepTimes.load(path)
    path.write_text(text.replace("0.25", "0.5"))
    assert StepTimes.load(path).seconds == {(1, 1): 0.5}


@pytest.mark.parametrize("text", [
    "{}", "[", '{"format": "pase_mtf.step_times", "version": 1}',
    '{"format": "pase_mtf.step_times", "version": 1, "worker_batch": 0, "source": "", "steps": []}',
    '{"format": "pase_mtf.step_times", "version": 1, "worker_batch": 8, "source": "", "steps": [{"workers": 1}]}',
    '{"format": "pase_mtf.step_times", "version": 1, "worker_batch": 8, "source": "", "steps":'
    ' [{"workers": 1, "ways": 0, "seconds": 1.0}]}'])
def test_what_is_no_file_of_ours(tmp_path, text):
    path = tmp_path / "steps.json"
    path.write_text(text)
    with pytest.raises(FormatError, match=r"steps\.json") as caught:
        StepTimes.load(path)
    assert "\n" not in str(caught.value)


def test_integers_that_no_float_holds_are_no_amounts():
    with pytest.raises(UsageError, match="give seconds above 0"):
        StepTimes(4, {(1, 1): 10 ** 400})
    with pytest.raises(UsageError, match="epochs above 0"):
        Run(4, 10 ** 400)
    assert StepTimes(4, {(1, 1): 10 ** 30}).at(1, 1).seconds == 10 ** 30
