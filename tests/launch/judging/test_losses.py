import math
from types import SimpleNamespace

import numpy as np
import pytest

from pase_mtf.launch.judging import judge
from pase_mtf.launch.judging.losses import (
    FIRST_NARROW,
    GROSS,
    STRICT_STEPS,
    Comparison,
    Update,
    first_difference,
    largest_update,
    relative_tolerance,
    slot_of,
    updates_of,
)
from pase_mtf.launch.judging.settling import Settled
from pase_mtf.runtime import Devices

EPSILON = float(np.finfo(np.float32).eps)


def test_series_that_grow_are_compared_as_whole_ones_are():
    """Piece by piece, every step once."""
    for wrong in (None, 3, 9):
        falling = [1.0 / (step + 1) for step in range(12)]
        whole = {"a": falling, "b": [*falling], "c": [1.0]}
        if wrong is not None:
            whole["b"][wrong] = 0.9
        grown, said = Comparison(40), []
        for begin, end in ((0, 1), (1, 5), (5, 5), (5, 12)):
            said.append(grown.go_on({arm: losses[begin:end] for arm, losses in whole.items()}))
            if said[-1]:
                break
            assert grown.steps == end
        assert said[-1] == first_difference(whole, first_step=40)
        assert (wrong is None) == (said[-1] is None)
    diverging = Comparison()
    assert diverging.go_on({"a": [9.0, 60.0], "b": [9.0, 70.0]}) is None
    assert diverging.go_on({"a": [9.0], "b": [1.0]}) is None  # where both have diverged nothing is compared any more
    assert diverging.steps == 3  # nor looked at again


def test_rounding_agrees():
    assert first_difference({"a": [1.0, 0.5], "b": [1.0 + 2e-7, 0.5 - 3e-6]}) is None
    assert "step 1" in first_difference({"a": [1.0, 0.5], "b": [1.0 + 2e-7, 0.5 - 1e-4]})


def test_names_the_first_step_and_arm():
    found = first_difference({"a": [1.0, 1.0, 1.0], "b": [1.0, 1.0, 1.0], "c": [1.0, 1.01, 2.0]}, first_step=40)
    assert found == "losses differ at step 41: c 1.01, a 1 (difference 1.0e-02, allowed 2.0e-05)"


def test_strict_while_rounding_can_be_bounded_and_silent_afterwards():
    assert relative_tolerance(0) == 1e-5
    assert relative_tolerance(1, FIRST_NARROW) == 2e-2
    assert relative_tolerance(STRICT_STEPS) < 1e-3
    assert relative_tolerance(STRICT_STEPS + 1) == relative_tolerance(10**6) == GROSS
    right = [1.0] * 31
    assert first_difference({"search": right, "data_parallel": [*right[:-1], 1.09]}) is None
    assert first_difference({"search": right, "data_parallel": [1.0, 1.0, 1.09]})


@pytest.mark.parametrize("wrong", [1.6, 0.4, math.nan, math.inf])
def test_what_is_grossly_different_is_suspicious_however_late(wrong):
    right = [1.0] * 31
    assert "step 30" in first_difference({"a": right, "b": [*right[:-1], wrong]})
    assert "step 30" in first_difference({"a": [*right[:-1], wrong], "b": right})


def test_where_all_diverge_nothing_is_compared():
    assert first_difference({"a": [9.0, 9.0, 60.0], "b": [9.0, 9.0, 70.0]}) is None
    assert first_difference({"a": [9.0, 9.0, math.nan], "b": [9.0, 9.0, math.inf]}) is None
    for one, other in ((9.5, 70.0), (70.0, 9.5)):
        assert "step 2" in first_difference({"a": [9.0, 9.0, one], "b": [9.0, 9.0, other]})


@pytest.mark.parametrize(("one", "other", "same"), [
    (math.nan, math.nan, True), (math.inf, math.inf, True), (math.nan, 1.0, False), (1.0, math.nan, False),
    (math.inf, 1.0, False), (1.0, math.inf, False), (math.inf, -math.inf, False), (0.0, 0.0, True), (0.0, 1.0, False),
])
def test_what_is_not_finite(one, other, same):
    found = first_difference({"a": [one], "b": [other]})
    assert (found is None) == same
    assert found is None or "losses differ" in found


def test_measures_against_the_first_loss():
    """A batch that is learnt by heart has a loss near zero; a tenth of it is nothing."""
    assert first_difference({"a": [2.0, 2.0, 0.000011], "b": [2.0, 2.0, 0.000010]}) is None
    assert "step 2" in first_difference({"a": [2.0, 2.0, 0.5], "b": [2.0, 2.0, 0.61]})


def test_compares_only_steps_that_both_have_done():
    assert first_difference({"a": [1.0, 2.0], "b": [1.0]}) is None
    assert first_difference({"a": [1.0], "b": [1.0, 9.0]}) is None
    assert first_difference({"a": [1.0], "nothing": []}) is None


def _updates(wrong, name="fc1/weights", share=1.0):
    """Updates of two variables, one of which is changed otherwise by that part of the change."""
    generator = np.random.default_rng(0)
    for variable, scale in (("conv1/filters", 1e-2), ("fc1/weights", 1e-4)):
        before = generator.standard_normal(1000).astype(np.float32)
        change = scale * generator.standard_normal(1000).astype(np.float32)
        noise = 1e-6 * change * generator.standard_normal(1000).astype(np.float32)
        other = generator.standard_normal(1000).astype(np.float32) * scale * (wrong if variable == name else 0.0)
        yield Update.of(variable, "", before, before + change, before + share * change + noise + other)


def test_updates_that_differ_by_rounding():
    assert largest_update(_updates(0.0), EPSILON, 0.02) is None


@pytest.mark.parametrize("name", ["fc1/weights", "conv1/filters"])
def test_a_wrong_update_of_one_variable(name):
    assert name in largest_update(_updates(0.5, name), EPSILON, 0.02)


def test_a_variable_whose_gradient_is_rounding_alone():
    """Its updates have nothing to do with each other, and nothing with the loss."""
    updates = [*_updates(0.0), Update("key/bias", "", 0.0, 1e-8, 1.4e-8)]
    assert largest_update(updates, EPSILON, 0.02) is None


def _adam(gradient, rounding, wrong=0.0, lost=0.0):
    """A variable and its slots before and after Adam's first step, of a gradient and of what another order of summation
    makes of it; `wrong` shards of it get the gradient of others, `lost` is the part of a gradient that is not added."""
    def values(gradient, variable):
        return {"scale": variable - 0.003 * gradient / (np.abs(gradient) + 1e-8), "scale/adam_m": 0.1 * gradient,
                "scale/adam_v": 0.001 * gradient ** 2}
    ones = np.ones_like(gradient)
    other = (1.0 - lost) * gradient + rounding
    found = values(other, ones)
    if wrong:
        found["scale"] = found["scale"].copy()
        found["scale"][:int(wrong * len(ones))] = found["scale"][::-1][:int(wrong * len(ones))]
    return values(np.zeros_like(gradient), ones), values(gradient, ones), found


def _gradient(smallest):
    """Of 128 elements, one of which has next to none."""
    gradient = np.random.default_rng(1).standard_normal(128)
    gradient[17] = smallest
    return gradient, 1e-7 * np.random.default_rng(2).standard_normal(128)


@pytest.mark.parametrize("smallest", [3e-8, 1e-7, 1e-6])
def test_an_element_without_gradient_goes_either_way(smallest):
    """Adam divides by the size of a gradient, and so makes a whole step of its rounding."""
    gradient, rounding = _gradient(smallest)
    rounding[17] = -2.0 * smallest
    before, expected, found = _adam(gradient, rounding)
    scale = Update.of("scale", "", before["scale"], expected["scale"], found["scale"])
    assert scale.difference > 0.05 * scale.change
    assert largest_update(updates_of(before, expected, found), EPSILON, 0.02) is None


@pytest.mark.parametrize(("wrong", "lost"), [(0.125, 0.0), (0.0, 0.5), (0.0, 0.05)])
def test_adam_hides_no_fault(wrong, lost):
    """Neither parts of a variable in the wrong place, nor gradients that were not added up (which Adam's first update
    shows nothing of: its slots do)."""
    gradient, rounding = _gradient(1e-6)
    assert "scale" in largest_update(updates_of(*_adam(gradient, rounding, wrong, lost)), EPSILON, 0.02)


def test_slots_of_optimizers():
    assert slot_of(["fc1/weights", "fc1/weights/adam_m", "fc1/weights_slot_vr", "fc1/bias"]) == {
        "fc1/weights": "", "fc1/weights/adam_m": "/adam_m", "fc1/weights_slot_vr": "_slot_vr", "fc1/bias": ""}


@pytest.mark.parametrize(("kind", "rounded", "settles"), [("cpu", True, True), ("gpu", True, False),
                                                         ("gpu", False, True)])
def test_products_in_tf32_are_no_suspicion(monkeypatch, kind, rounded, settles):
    """First losses that are a thousandth apart: too far for float32, and what TF32 does on GPUs."""
    asked = []
    monkeypatch.setattr("pase_mtf.compat.tf.config.experimental.tensor_float_32_execution_enabled", lambda: rounded)
    monkeypatch.setattr(judge, "settle", lambda plan, strategies, names, batches, board: asked.append(names) or Settled(
        {}, 1.0, 3))
    plan = SimpleNamespace(devices=Devices(kind, (f"/device:{kind.upper()}:0",), "one"), checkpoint=None,
                           first_step=0, config=SimpleNamespace(dtype="float32"))
    arms = [SimpleNamespace(name=name) for name in ("search", "data_parallel")]
    found = judge.Judge(plan, {}, arms, SimpleNamespace(batches=lambda first: iter(())))
    losses = {"search": [2.0], "data_parallel": [2.002]}
    assert found.check(SimpleNamespace(losses=lambda arm, since: losses[arm][since:], first_step=0)) is None
    assert bool(asked) == settles


def test_an_update_that_is_no_number_is_the_one_that_is_named():
    updates = [Update(name, "", 1.0, 1e-2, difference) for name, difference in (
        ("a", 1e-9), ("b", math.nan), ("c", 2e-9))]
    assert "changes b otherwise" in largest_update(updates, EPSILON, 0.02)


def test_a_small_loss_that_doubles_has_not_diverged():
    """Of a training that is resumed late the next batch may have several times the loss of the first."""
    before = [0.05, 0.31, 0.28]
    assert first_difference({"search": before, "the run before": before}) is None
    assert "step 1" in first_difference({"search": [0.05, 0.9, 2.5], "the run before": before})
