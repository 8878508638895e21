import math

import pytest

from pase_mtf.launch.losses import first_disagreement, tolerance


def test_rounding_agrees():
    assert first_disagreement({"a": [1.0, 0.5], "b": [1.0 + 2e-7, 0.5 - 3e-6]}) is None
    assert first_disagreement({"a": [1.0, 0.5], "b": [1.0 + 2e-7, 0.5 - 1e-4]}).step == 1


@pytest.mark.parametrize(("last", "other", "advice"), [
    (60.0, 70.0, "lower --learning_rate"), (9.5, 70.0, "report it"), (70.0, 9.5, "report it")])
def test_a_diverging_training_is_told_from_a_wrong_strategy(last, other, advice):
    found = first_disagreement({"a": [9.0, 9.0, last], "b": [9.0, 9.0, other]})
    assert found.step == 2
    assert advice in str(found)


def test_names_the_first_step_and_arm():
    found = first_disagreement({"a": [1.0, 1.0, 1.0], "b": [1.0, 1.0, 1.0], "c": [1.0, 1.01, 2.0]}, first_step=40)
    assert (found.step, found.arm, found.reference) == (41, "c", "a")
    assert "c 1.01, a 1" in str(found)


def test_tolerance_grows_but_not_without_end():
    assert tolerance(0) == 1e-5
    assert tolerance(0) < tolerance(10) < tolerance(100) <= tolerance(10**6) <= 0.05


@pytest.mark.parametrize(("one", "other", "same"), [
    (math.nan, math.nan, True), (math.inf, math.inf, True), (math.nan, 1.0, False), (1.0, math.nan, False),
    (math.inf, 1.0, False), (1.0, math.inf, False), (math.inf, -math.inf, False), (0.0, 0.0, True), (0.0, 1.0, False),
])
def test_what_is_not_finite(one, other, same):
    found = first_disagreement({"a": [one], "b": [other]})
    assert (found is None) == same
    assert found is None or "losses disagree" in str(found)


def test_measures_against_the_first_loss():
    """A batch that is learnt by heart has a loss near zero; a tenth of it is nothing."""
    early = [2.0] * 20
    assert first_disagreement({"a": [*early, 0.0011], "b": [*early, 0.0010]}) is None
    assert first_disagreement({"a": [*early, 0.5], "b": [*early, 0.61]}).step == 20


def test_compares_only_steps_that_both_have_done():
    assert first_disagreement({"a": [1.0, 2.0], "b": [1.0]}) is None
    assert first_disagreement({"a": [1.0], "b": [1.0, 9.0]}) is None
