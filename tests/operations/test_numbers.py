"""Numbers that operations of unknown classes hold: a trial of small sizes grants no split that a place forbids."""

import functools
import types

import numpy as np
import own_operations as own
import pytest
from nets import Builder, dim

from pase_mtf.compat import mtf, tf
from pase_mtf.operations.trial import try_operation


class _Applied(own.Same):
    """Computes by a function that it is given."""

    def __init__(self, x, function):
        super().__init__(x)
        self._function = function

    def lower(self, lowering):
        self._set(lowering, lambda t: self._function(t))


_SIXTEEN = 16
_PLACE, _SETTINGS, _WHERE = dim("place", 20), types.SimpleNamespace(place=dim("width", 32)), slice(20)


def _before(t, end):
    return t * tf.cast(tf.range(t.shape[-1]) < end, t.dtype)


def _before_default(t, *, end=16):
    return _before(t, end)


@functools.cache
def _cached_place():
    return 20


class _Masking:
    def __call__(self, t):
        return _before(t, 20)


@pytest.mark.parametrize("function", [
    lambda t: _before(t, 16), lambda t: _before(t, _SIXTEEN), _before_default,
    functools.partial(_before, end=np.array(16, np.int32))], ids=["literal", "global", "default", "array"])
def test_a_size_that_is_the_same_in_a_copy_is_not_taken_for_granted(function):
    """The batch has 16, too: with a batch of 8 and a width of 16 all would be before place 16."""
    with tf.Graph().as_default():
        found = try_operation(_Applied(Builder(tf.float32).input("x", [dim("batch", 16), dim("width", 32)]), function))
    assert (found.splits, set(found.whole)) == (("batch",), {"width"})


@pytest.mark.parametrize("function", [
    lambda t, place=_PLACE: _before(t, place.size),
    lambda t, settings=_SETTINGS: _before(t, settings.place.size // 2),
    lambda t, where=_WHERE: _before(t, where.stop),
    lambda t: _before(t, _cached_place()), _Masking()], ids=["dim", "dim of object", "slice", "cached", "callable"])
def test_numbers_that_are_no_plain_ones_are_not_taken_for_granted(function):
    with tf.Graph().as_default():
        found = try_operation(_Applied(Builder(tf.float32).input("x", [dim("batch", 16), dim("width", 32)]), function))
    assert (found.splits, set(found.whole)) == (("batch",), {"width"})


class _MaskedGradient(mtf.Operation):
    """Masks where the operation does that it is the gradient of."""

    def __init__(self, forward, dy):
        super().__init__([*forward.inputs, *forward.outputs, dy], name="masked_gradient")
        self._forward = forward
        self._outputs = [mtf.Tensor(self, dy.shape, dy.dtype)]

    def lower(self, lowering):
        lowering.set_tensor_lowering(self.outputs[0], lowering.mesh_impl(self).slicewise(
            lambda t: _before(t, self._forward._end), lowering.tensors[self.inputs[2]]))


def test_numbers_of_the_operation_of_a_gradient_are_not_taken_for_granted():
    with tf.Graph().as_default():
        forward = own.Masked(Builder(tf.float32).input("x", [dim("batch", 16), dim("width", 32)]), 20)
        found = try_operation(_MaskedGradient(forward, forward.outputs[0]))
    assert (found.splits, set(found.whole)) == (("batch",), {"width"})


@pytest.mark.parametrize("function", [
    lambda t: _before(t, 8), lambda t: tf.roll(t, 8, -1), lambda t: tf.roll(t, -16, -1)],
    ids=["place", "roll", "negative"])
def test_the_size_of_copies_and_numbers_below_zero_are_not_taken_for_granted(function):
    """In a copy of width 8 all is before place 8, and to roll by 8 or by -16 changes nothing."""
    with tf.Graph().as_default():
        found = try_operation(_Applied(Builder(tf.float32).input("x", [dim("batch", 16), dim("width", 32)]), function))
    assert (found.splits, set(found.whole)) == (("batch",), {"width"})


def test_a_place_that_is_a_dim_as_small_as_copies_is_not_taken_for_granted():
    with tf.Graph().as_default():
        found = try_operation(own.Masked(Builder(tf.float32).input("x", [dim("heads", 8), dim("width", 32)]), 8))
    assert (found.splits, set(found.whole)) == (("heads",), {"width"})


class _Places:
    first = 20

    @staticmethod
    def before(t):
        return _before(t, 20)


_OUTER = types.ModuleType("outer")
_OUTER.inner = types.ModuleType("outer.inner")
_OUTER.inner.place = 20
_COMPILED = tf.function(lambda t: _before(t, 20), autograph=False)


class _Helper:
    def masked(self, t):
        return _before(t, 20)

    @property
    def place(self):
        return 20


_HELPER = _Helper()


@pytest.mark.parametrize("function", [
    lambda t: _before(t, _Places.first), lambda t: _Places.before(t), lambda t: _before(t, _OUTER.inner.place),
    lambda t: _COMPILED(t), lambda t, helper=_HELPER: helper.masked(t),
    lambda t, helper=_HELPER: _before(t, helper.place)],
    ids=["class", "static method", "module in a module", "of TensorFlow", "method", "property"])
def test_numbers_behind_classes_modules_and_objects_are_not_taken_for_granted(function):
    with tf.Graph().as_default():
        found = try_operation(_Applied(Builder(tf.float32).input("x", [dim("batch", 16), dim("width", 32)]), function))
    assert (found.splits, set(found.whole)) == (("batch",), {"width"})
