"""Projections against Pal et al.'s formulas, by hand."""

import dataclasses
import json

import numpy as np
import pytest
from matplotlib.figure import Figure

from pase_mtf import EpochCurve, StepTimes, project_training
from pase_mtf.epochs.curve import Run
from pase_mtf.epochs.picture import draw_projection
from pase_mtf.epochs.report import projection_text, ratio_text, spread_text
from pase_mtf.errors import UsageError

# Two devices to a worker take a step in 1 / 1.4 of the time; 2, 4, 8 workers are as efficient as 1, 0.9, 0.8, 0.7.
_SU_2 = 1.4
_SE = {1: 1.0, 2: 0.9, 4: 0.8, 8: 0.7}
_EPOCHS = {1: 4.0, 2: 4.0, 4: 5.0, 8: 9.0}  # by workers of 32 examples


def _curve(epochs=None):
    return EpochCurve(tuple(Run(32 * workers, value) for workers, value in (epochs or _EPOCHS).items()))


def _steps():
    return StepTimes(32, {**{(workers, 1): 0.1 / scaling for workers, scaling in _SE.items()}, (1, 2): 0.1 / _SU_2})


def test_speedups_are_those_of_the_formulas():
    projection = project_training(_curve(), _steps(), [1, 2, 4, 8], [1, 2])
    one = projection.points[0].data_parallel
    for point in projection.points:
        alone = point.data_parallel
        devices = point.devices
        speedup = _SE[devices] * devices * _EPOCHS[1] / _EPOCHS[devices]  # SE_N * N * E_1 / E_N
        assert alone.ahead_of(one).value == pytest.approx(speedup)
        if devices > 1:
            workers = devices // 2
            hybrid = next(mix for mix in point.mixes if mix.ways == 2)
            speedup = _SU_2 * _SE[workers] * workers * _EPOCHS[1] / _EPOCHS[workers]  # SU_M * SE_N * N * E_1 / E_N
            assert hybrid.ahead_of(one).value == pytest.approx(speedup)
            # Hybrid is ahead once SU_M exceeds M * (SE_MN / SE_N) * (E_N / E_MN), here with M*N devices in all.
            threshold = 2 * (_SE[devices] / _SE[workers]) * (_EPOCHS[workers] / _EPOCHS[devices])
            assert point.hybrid == (threshold < _SU_2)
            assert (point.best.ways == 2) == (threshold < _SU_2)


def test_the_number_of_devices_from_which_hybrid_is_ahead():
    # On 4: 1.4 < 2 * (0.8 / 0.9) * (4 / 5) = 1.42; on 8: 1.4 > 2 * (0.7 / 0.8) * (5 / 9) = 0.97.
    projection = project_training(_curve(), _steps(), [8, 1, 2, 4], [1, 2])
    assert [point.hybrid for point in projection.points] == [False, False, False, True]
    assert projection.hybrid_from == 8
    point = projection.points[-1]
    assert point.gain.value == pytest.approx(1.4 / (2 * (0.7 / 0.8) * (5 / 9)))
    assert project_training(_curve(), _steps(), [1, 2, 4], [1, 2]).hybrid_from is None


def test_a_hybrid_that_falls_behind_again_is_not_ahead_from_there_on():
    # Ahead on 4 devices, behind on 8, where data parallelism takes no more epochs than the hybrid does.
    projection = project_training(_curve({1: 4.0, 2: 4.0, 4: 9.0, 8: 9.0}), _steps(), [2, 4, 8], [1, 2])
    assert [point.hybrid for point in projection.points] == [False, True, False]
    assert projection.hybrid_from is None


def test_at_scale_both_have_their_own_best_number_of_devices():
    projection = project_training(_curve(), _steps(), [1, 2, 4, 8], [1, 2])
    # Alone: 1, 1.8, 2.56, 2.49 times as fast as one; hybrid on 8: 1.4 * 0.8 * 4 * 4 / 5 = 3.58.
    assert projection.best_alone.devices == 4
    assert not projection.alone_still_gains
    assert project_training(_curve(), _steps(), [1, 2, 4], [1, 2]).alone_still_gains
    assert projection.best_of_all.devices == 8
    assert projection.gain_at_scale.value == pytest.approx(3.584 / 2.56)


def test_spread_is_that_of_the_worst_and_the_best_runs():
    curve = EpochCurve((Run(32, 3.0, seed=0), Run(32, 4.0, seed=1), Run(32, 5.0, seed=2),
                        Run(64, 6.0, seed=0), Run(64, 8.0, seed=1), Run(64, 9.0, seed=2)))
    gain = project_training(curve, _steps(), [2], [1, 2]).points[0].gain
    ratio = (0.1 / 0.9 / 2) / (0.1 / 1.4)  # of seconds an example: two workers of one, and one worker of two
    assert gain.value == pytest.approx(ratio * 8 / 4)
    assert (gain.low, gain.high) == (pytest.approx(ratio * 6 / 5), pytest.approx(ratio * 9 / 3))


def test_an_end_of_the_spread_that_rests_on_a_run_without_its_target_is_open():
    """That run ended at its cap, which is no number of epochs to the target."""
    missed = Run(32, 30.0, False, 2)
    runs = (Run(32, 3.0, True, 0), Run(32, 3.1, True, 1), missed)
    rival = project_training(EpochCurve((Run(16, 2.0), *runs)), StepTimes(16, {(2, 1): 0.1, (1, 2): 0.1 / _SU_2}), [2],
                             [1, 2])
    assert rival.points[0].best.ways == 2
    assert spread_text(rival.points[0].gain) == "1.05 to > 10.50"
    assert ratio_text(rival.points[0].gain) == "1.08"  # that of the median, which reached it
    assert "note: < and > in a spread" in projection_text(rival)
    itself = project_training(EpochCurve((*runs, Run(64, 9.0))), _steps(), [2], [1, 2])
    assert itself.points[0].best.ways == 2
    assert spread_text(itself.points[0].gain) == "< 0.23 to 2.33"
    reached = dataclasses.replace(missed, reached=True)
    known = project_training(EpochCurve((Run(16, 2.0), *runs[:2], reached)), rival.steps, [2], [1, 2])
    assert "in a spread" not in projection_text(known)


def test_what_never_reached_its_target_is_a_bound():
    curve = EpochCurve((Run(32, 4.0), Run(64, 4.0, reached=False)))
    projection = project_training(curve, _steps(), [2], [1, 2])
    point = projection.points[0]
    assert point.best.ways == 2  # though its rival may be done first, where it takes hardly longer than it was given
    assert point.gain.at_least
    assert ratio_text(point.gain) == "> 0.78"
    assert point.hybrid is None  # "more than 0.78" may be less than 1
    assert projection.hybrid_from is None
    assert "hybrid is" not in projection_text(projection)


def test_a_bound_above_one_is_ahead():
    curve = EpochCurve((Run(32, 4.0), Run(64, 8.0, reached=False)))
    projection = project_training(curve, _steps(), [2], [1, 2])
    assert ratio_text(projection.points[0].gain) == "> 1.56"
    assert projection.points[0].hybrid
    assert projection.hybrid_from == 2


def test_of_two_bounds_neither_is_ahead():
    curve = EpochCurve((Run(32, 4.0, reached=False), Run(64, 9.0, reached=False)))
    projection = project_training(curve, _steps(), [2], [1, 2])
    point = projection.points[0]
    assert point.best.ways == 2
    assert point.gain.value > 1.0
    assert not point.hybrid
    assert projection.hybrid_from is None
    assert "hybrid is" not in projection_text(projection)
    assert "unknown" in projection_text(projection)


def test_data_parallelism_that_never_reached_its_target_is_not_known_to_be_best():
    """Compared with itself: its row says nothing, and what is known of fewer devices counts."""
    curve = EpochCurve((Run(16, 2.0), Run(32, 3.0), Run(64, 6.0), Run(128, 30.0, reached=False),
                        Run(256, 30.0, reached=False)))
    steps = StepTimes(16, {(workers, ways): 0.1 / (1.0, 1.7)[ways - 1] for workers in (1, 2, 4, 8, 16)
                           for ways in (1, 2)})
    projection = project_training(curve, steps, [1, 2, 4, 8, 16], [1, 2])
    last = projection.points[-1]
    assert last.best is last.data_parallel
    assert not last.gain.is_known
    assert ratio_text(last.gain) == "unknown"
    assert projection.hybrid_from == 2
    assert "hybrid is ahead of data parallelism alone from 2 devices on" in projection_text(projection)


def test_two_batches_that_both_end_at_the_cap_are_not_one():
    """Their epochs are equal, and nothing is known of either."""
    curve = EpochCurve((Run(32, 30.0, reached=False), Run(64, 30.0, reached=False)))
    gain = project_training(curve, StepTimes(32, {(2, 1): 0.1, (1, 2): 0.04}), [2], [1, 2]).points[0].gain
    assert gain.value == pytest.approx(1.25)
    assert not gain.is_known


def test_what_is_left_out_all_the_same_asks_for_no_flag_that_was_given():
    curve = EpochCurve((Run(32, 2.0), Run(32, 8.0, reached=False, seed=1), Run(64, 4.0)))
    text = projection_text(project_training(curve, _steps(), [4], [1], extrapolate=True))
    assert "from 4 devices on, are left out (no slope tells them, as where a run missed the target)" in text
    assert "--extrapolate" not in text


def test_batches_beyond_the_curve_are_left_out_and_said():
    projection = project_training(_curve({1: 4.0, 2: 4.0}), _steps(), [4], [1, 2])
    point = projection.points[0]
    assert list(point.unknown) == [1]
    assert point.gain is None
    assert point.best.ways == 2
    assert "to 64; mixes of larger ones, from 4 devices on, are left out (--extrapolate)" in projection_text(projection)
    bold = project_training(_curve({1: 4.0, 2: 8.0}), _steps(), [4], [1, 2], extrapolate=True)
    assert bold.points[0].data_parallel.epochs.median == pytest.approx(16.0)
    assert "~16.00" in projection_text(bold)


def test_batches_below_the_curve_are_said_as_such():
    curve, steps = EpochCurve((Run(128, 4.0), Run(256, 6.0))), _steps()
    few = projection_text(project_training(curve, steps, [1, 2, 4, 8], [1, 2]))
    assert "128 to 256; mixes of smaller ones, on up to 4 devices, are left out" in few  # two workers with two each
    both = projection_text(project_training(curve, steps, [1, 2, 4, 8, 16], [1, 2]))
    assert "mixes of smaller ones, on up to 4 devices, and of larger ones, from 16 devices on, are left out" in both
    assert "larger" not in few
    assert "no step of 16" not in both  # its batch is why it is left out


def test_steps_that_are_not_known_are_said():
    projection = project_training(_curve(), StepTimes(32, {(1, 1): 0.1}), [2], [1, 2])
    assert projection.points[0].best is None
    text = projection_text(projection)
    assert "no step of 2 workers with 1 devices each" in text
    assert "unknown" in text


def test_json_holds_all_mixes():
    data = project_training(_curve(), _steps(), [1, 2], [1, 2]).to_json(examples=3600 * 32)
    assert [point["devices"] for point in data["points"]] == [1, 2]
    assert [mix["ways"] for mix in data["points"][1]["mixes"]] == [1, 2]
    assert data["points"][0]["mixes"][0]["hours"] == pytest.approx(0.1 * 4.0)


def test_numbers_that_are_none():
    for arguments in ([0], [], [1.5], [10 ** 400], [2 ** 31]):
        with pytest.raises(UsageError):
            project_training(_curve(), _steps(), arguments)


def test_a_hybrid_that_never_reached_its_target_is_not_known_to_be_behind():
    for least, known in ((4.0, None), (40.0, False)):  # 40 epochs are too many already
        curve = EpochCurve((Run(32, least, reached=False), Run(64, 9.0)))
        projection = project_training(curve, _steps(), [2], [1, 2])
        assert projection.points[0].best.ways == 1
        assert projection.points[0].hybrid is known
        assert ("hybrid is not ahead" in projection_text(projection)) == (known is False)


def test_numbers_of_numpy_are_json_too():
    curve = EpochCurve(tuple(Run(batch, epochs, np.bool_(True), np.int64(0)) for batch, epochs in zip(
        np.array([32, 64]), np.array([4.0, 5.0], np.float32), strict=True)))
    steps = StepTimes(32, {(np.int64(1), 1): np.float32(0.5), (2, 1): 0.75})
    data = json.loads(json.dumps(project_training(curve, steps, [1, 2], [1]).to_json(examples=64)))
    assert [run["batch"] for run in data["runs"]] == [32, 64]
    assert [point["mixes"][0]["step_seconds"] for point in data["points"]] == [0.5, 0.75]


def test_alone_that_missed_its_target_on_more_devices_may_be_done_first_there():
    def projection(least):
        runs = (Run(32, 4.0), Run(64, 6.0), Run(128, 9.0), Run(256, least, reached=False))
        return project_training(EpochCurve(runs), _steps(), [1, 2, 4, 8], [1, 2])
    found = projection(12.0)
    assert found.best_alone.devices == 4
    assert found.alone_still_gains
    assert "more devices might do better" in projection_text(found)
    assert not projection(40.0).alone_still_gains  # 40 epochs are too many already


def test_a_mix_that_missed_its_target_is_hollow():
    axes = Figure().subplots()
    curve = EpochCurve((Run(32, 4.0), Run(64, 8.0, reached=False)))
    draw_projection(axes, project_training(curve, _steps(), [1, 2], [1]))
    assert [list(line.get_xdata()) for line in axes.lines if line.get_markerfacecolor() == "white"] == [[2]]


def test_the_shortest_training_may_be_one_that_missed_its_target():
    def told(least):
        runs = (Run(32, 4.0), Run(64, 6.0), Run(128, 9.0), Run(256, least, reached=False))
        return projection_text(project_training(EpochCurve(runs), _steps(), [1, 2, 4, 8], [1, 2]), 10_000)
    assert "0.0174 hours on 8 devices (one that missed the target might take less)" in told(11.0)
    assert "might take less" not in told(12.0)  # 0.0067 s an example, and 0.0063 is known


def test_where_no_hybrid_is_known_it_is_not_known_to_be_behind():
    curve = _curve({1: 4.0, 2: 4.0, 4: 9.0, 8: 20.0})
    steps = StepTimes(32, {**{(workers, 1): 0.1 for workers in (1, 2, 4, 8)}, (2, 2): 0.06})
    unknown = project_training(curve, steps, [4, 8], [1, 2])  # no step of four workers with two devices each
    assert [point.hybrid for point in unknown.points] == [True, None]
    assert "hybrid is ahead of data parallelism alone from 4 devices on" in projection_text(unknown)
    every = project_training(curve, _steps(), range(4, 9), [1, 2])  # two devices to a worker: of 5 and 7 there are none
    assert [point.hybrid for point in every.points] == [True, None, True, None, True]
    assert every.hybrid_from == 4


def test_where_no_hybrid_is_known_at_all_none_is_said_to_be_behind():
    steps = StepTimes(32, {(workers, 1): 0.1 for workers in (1, 2, 4)})
    assert "hybrid is" not in projection_text(project_training(_curve(), steps, [1, 2, 4], [1, 2]))
