"""Curves of epochs by batch: what is read, what lies between, what is refused."""

import math

import pytest

from pase_mtf.epochs.curve import EpochCurve, Run
from pase_mtf.errors import DataError, UsageError


def _file(tmp_path, text):
    path = tmp_path / "curve.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_median_and_spread_of_what_was_measured(tmp_path):
    curve = EpochCurve.load(_file(
        tmp_path, "# by hand\nseed,batch,epochs,note\n0,32,4,a\n\n1,32,6,b\n2,32,5,c\n0,64,8,\n"))
    assert curve.name == "curve"
    assert curve.batches == (32, 64)
    found = curve.at(32)
    assert (found.median, found.low, found.high, found.at_least, found.source) == (5, 4, 6, False, "measured")


def test_between_two_batches_logarithms_lie_on_a_line():
    curve = EpochCurve((Run(16, 2.0), Run(64, 8.0)))
    found = curve.at(32)
    assert found.median == pytest.approx(4.0)  # halfway between 16 and 64, halfway between 2 and 8
    assert found.source == "interpolated"


def test_nothing_is_said_of_batches_outside_unless_asked_for():
    curve = EpochCurve((Run(16, 2.0), Run(64, 8.0)))
    assert curve.at(128) is None
    assert curve.at(8) is None
    found = curve.at(128, extrapolate=True)
    assert (found.median, found.source) == (pytest.approx(16.0), "extrapolated")
    assert curve.at(8, extrapolate=True).median == pytest.approx(1.0)
    assert EpochCurve((Run(16, 2.0),)).at(32, extrapolate=True) is None


def test_a_run_that_missed_its_target_takes_longer_than_any_that_reached_it():
    runs = (Run(8, 3.0, seed=0), Run(8, 2.0, reached=False, seed=1), Run(8, 4.0, seed=2))
    found = EpochCurve(runs).at(8)
    assert (found.median, found.at_least) == (4.0, False)  # 3, 4, and one of more
    assert found.high_at_least
    assert EpochCurve((*runs, Run(32, 5.0))).at(16).high_at_least
    assert not EpochCurve(runs[::2]).at(8).high_at_least
    runs += (Run(8, 2.0, reached=False, seed=3), Run(8, 2.0, reached=False, seed=4))
    found = EpochCurve((*runs, Run(32, 5.0))).at(8)
    assert found.at_least
    assert EpochCurve((*runs, Run(32, 5.0))).at(16).at_least


def test_batches_of_a_larger_model():
    curve = EpochCurve((Run(16, 2.0), Run(32, 3.0))).scaled(4)
    assert curve.batches == (64, 128)
    with pytest.raises(UsageError, match="makes batches of curve equal"):
        curve.scaled(0.001)
    with pytest.raises(UsageError, match="above 0"):
        curve.scaled(math.nan)


@pytest.mark.parametrize("batch", [0, -1, math.nan, math.inf, "32", True, None])
@pytest.mark.parametrize("extrapolate", [False, True])
def test_what_is_no_batch_is_told(batch, extrapolate):
    with pytest.raises(UsageError, match=r"batch=") as caught:
        EpochCurve((Run(16, 2.0), Run(64, 8.0))).at(batch, extrapolate=extrapolate)
    assert "\n" not in str(caught.value)


def test_epochs_beyond_all_numbers():
    curve = EpochCurve((Run(16, 2.0), Run(17, 8.0)))
    for batch in (10 ** 50, 10 ** 400):
        with pytest.raises(UsageError, match="too far beyond the batches 16 to 17"):
            curve.at(batch, extrapolate=True)
    assert curve.at(10 ** 50) is None
    for batch in (1e-4, 1e-300, 5e-324):
        with pytest.raises(UsageError, match="too far beyond the batches 16 to 17"):
            curve.at(batch, extrapolate=True)
    with pytest.raises(UsageError, match="too far beyond"):  # the spread alone
        EpochCurve((Run(16, 2.0), Run(17, 2.0), Run(17, 1e-9, seed=1))).at(400, extrapolate=True)


def test_what_python_callers_give_is_checked():
    curve = EpochCurve((Run(16, 2.0), Run(64, 8.0)))
    with pytest.raises(UsageError, match="scaled: factor='4': is no float"):
        curve.scaled("4")
    with pytest.raises(UsageError, match="at: extrapolate=1: is no bool"):
        curve.at(128, extrapolate=1)
    for path in (0, None, [], "a\0b"):  # 0 would be the standard input
        with pytest.raises(UsageError, match="is no path"):
            EpochCurve.load(path)


@pytest.mark.parametrize(("text", "message"), [
    ("", "empty"), ("batch,seed\n1,2\n", "no column 'epochs'"), ("batch,epochs,batch\n1,2,3\n", "more than one column"),
    ("batch,epochs\n", "holds no runs"), ("batch,epochs\n32\n", "line 2 has 1 values"),
    ("batch,epochs\n32,4\nx,5\n", "line 3: 'x,5' is no run"), ("batch,epochs\n0,4\n", "line 2"),
    ("batch,epochs\n32,nan\n", "line 2"), ("batch,epochs\n32,-1\n", "line 2"), ("batch,epochs\n2.5,1\n", "line 2"),
    (f"batch,epochs\n1{400 * '0'},4\n", "line 2"), (200_000 * "x", "field larger than"),
    (f"batch,epochs\n32,{200_000 * '9'}\n", "field larger than"), ("batch,epochs,reached\n32,4,maybe\n", "line 2"),
    ("batch,epochs,seed\n32,4,0\n32,5,0\n", "line 3.*twice"),
    ('# by hand\nbatch,epochs,note\n32,4,a\n\n64,5,"a\n128,6,b\n', "line 5: no CSV .unexpected end of data.; mend"),
    ("batch,epochs,seed\n32,4,a\n", "line 2.*a whole seed"), ("batch,epochs,seed\n32,4,\n", "line 2.*a whole seed"),
    ('batch,epochs,note\n32,4,"a\n64,5,"b"\n', "line 2: no CSV")])
def test_what_is_no_curve_is_told_with_its_line(tmp_path, text, message):
    with pytest.raises(DataError, match=message) as caught:
        EpochCurve.load(_file(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(DataError, match="cannot read"):
        EpochCurve.load(tmp_path / "none.csv")
    path = tmp_path / "bytes.csv"
    path.write_bytes(b"batch,epochs\n\xff\xfe,3\n")
    with pytest.raises(DataError, match="not UTF-8"):
        EpochCurve.load(path)


def test_runs_that_make_no_sense():
    for runs in ((), [Run(1, 1.0)], (1,)):
        with pytest.raises(UsageError):
            EpochCurve(runs)
    for batch, epochs in ((1, math.inf), (10 ** 400, 1.0), (1, "2"), ("1", 2.0), (1.5, 2.0), (True, 2.0), (1, None)):
        with pytest.raises(UsageError, match="above 0"):
            Run(batch, epochs)


def test_beyond_the_curve_the_least_is_no_more_than_the_most():
    curve = EpochCurve((Run(16, 2.0), Run(16, 8.0, seed=1), Run(32, 3.0), Run(32, 4.0, seed=1)))
    for batch in (4, 128):
        found = curve.at(batch, extrapolate=True)
        assert found.low <= found.median <= found.high
    assert curve.at(128, extrapolate=True).low == pytest.approx(27 / 64)
    missed = EpochCurve((Run(16, 5.0), Run(32, 30.0, reached=False)))
    assert missed.at(8, extrapolate=True) is None  # "at least 30" there makes it at most 0.83 here
    assert missed.at(64, extrapolate=True).at_least
    partly = (Run(16, 2.0), Run(16, 3.0, seed=1), Run(16, 8.0, reached=False, seed=2), Run(32, 4.0))
    assert not EpochCurve(partly).at(16).at_least
    assert EpochCurve(partly).at(128, extrapolate=True) is None
    assert EpochCurve(partly).at(8, extrapolate=True).high_at_least


def test_what_says_neither_yes_nor_no_is_no_run():
    for wrong in ({"reached": "no"}, {"reached": None}, {"seed": "1"}, {"seed": 1.5}, {"seed": True}):
        with pytest.raises(UsageError, match="give True or False"):
            Run(32, 4.0, **wrong)
