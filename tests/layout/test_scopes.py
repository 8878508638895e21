"""TensorFlow's variable scopes: the same names, in a time that does not grow with the graph."""

import random

import pytest

from pase_mtf.compat import tf, variable_scope
from pase_mtf.layout.scopes import quick_scopes


def _walk(rng, depth, names):
    """Opens scopes within the current one, by name, by default name and by object, some of them again."""
    kept = []
    for _ in range(rng.randrange(1, 5)):
        how = rng.choice(("name", "default", "default", "again"))
        if how == "again" and kept:
            scope = tf.variable_scope(rng.choice(kept))
        elif how == "default":
            scope = tf.variable_scope(None, default_name=rng.choice("ab"))
        else:
            scope = tf.variable_scope(rng.choice(("a", "a_1", "a/b", "a0", "a.")), reuse=tf.AUTO_REUSE)
        with scope as opened:
            names.append((opened.name, opened.original_name_scope))
            kept.append(opened)
            if depth:
                _walk(rng, depth - 1, names)


def _names(seed):
    names = []
    with tf.Graph().as_default():
        _walk(random.Random(seed), 4, names)
    return names


@pytest.mark.parametrize("seed", range(20))
def test_scopes_are_called_as_ever(seed):
    expected = _names(seed)
    with quick_scopes():
        assert _names(seed) == expected


@pytest.mark.parametrize("seed", range(3))
def test_scopes_opened_before_within_and_after(seed):
    names = {}
    for quick in (False, True):
        with tf.Graph().as_default():
            found = names[quick] = []
            _walk(random.Random(seed), 2, found)
            with quick_scopes() if quick else tf.name_scope(""):
                _walk(random.Random(seed), 2, found)
            _walk(random.Random(seed), 2, found)
    assert names[True] == names[False]


def test_what_was_left_is_forgotten():
    with tf.Graph().as_default(), quick_scopes(), tf.variable_scope("model"):
        for number in range(5):
            with tf.variable_scope(f"layer_{number}"):
                for inner in range(10):
                    with tf.variable_scope(f"operation_{inner}"):
                        pass
        # Leaving a scope looks at what stands below it only: the inner ones are gone with their layer.
        assert sorted(variable_scope.get_variable_scope_store().variable_scopes_count) == [
            "model", *(f"model/layer_{number}" for number in range(5))]
