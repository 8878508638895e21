"""Copies of a variable, compared as they are, and by what processes tell each other of them."""

import numpy as np
import pytest

from pase_mtf.compat import tf
from pase_mtf.launch.arms.replicas import differ, sketch, sketched, sketches_differ

VALUE = np.random.default_rng(0).normal(size=(300, 40)).astype(np.float32)
_ROUNDED = VALUE * np.random.default_rng(1).choice(np.float32([1 - 3e-7, 1 + 3e-7]), VALUE.shape)


def _planted(change):
    value = VALUE.copy()
    change(value)
    return value


@pytest.mark.parametrize(("other", "expected"), [
    (VALUE.copy(), False), (_ROUNDED, False), (np.full_like(VALUE, np.nan), False),
    (_planted(lambda value: value.__imul__(1.01)), True),  # a learning rate that is not the others'
    (_planted(lambda value: value[:100].__iadd__(0.01)), True),  # a part that got another gradient
    (_planted(lambda value: value[7].fill(0)), True)])
def test_what_differs(other, expected):
    assert differ([VALUE, VALUE, other]) is expected
    assert sketches_differ([sketch(VALUE), sketch(VALUE), sketch(other)]) is expected


def _on_devices(*values, dtype=tf.float32):
    with tf.Graph().as_default(), tf.Session() as session:
        return session.run([sketched(tf.cast(value, dtype)) for value in values])


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_sketches_of_devices(dtype):
    """Of a few numbers, whatever the array's size; and they tell what sketches of processes do."""
    assert not sketches_differ(_on_devices(VALUE, _ROUNDED))
    short, wide, other = VALUE[0], VALUE[:7, :37], VALUE + np.float32(0.02) * (VALUE > 1)
    for value in (short, wide, VALUE, np.float32(3)):
        made = _on_devices(value, value, 1.05 * value, dtype=dtype)
        assert {len(one) for one in made} == {len(sketch(VALUE))}
        assert not sketches_differ(made[:2])
        assert sketches_differ(made)
    assert sketches_differ(_on_devices(VALUE, other, dtype=dtype))


def test_nothing_to_compare():
    assert not differ([VALUE])
    assert not sketches_differ([])
    assert not sketches_differ([sketch(np.zeros((0, 3), np.float32))] * 2)
    assert not sketches_differ(_on_devices(*[np.zeros((0, 3), np.float32)] * 2))
