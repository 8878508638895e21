"""What trying operations of unknown classes shows."""

import dataclasses
import re

import numpy as np
import own_operations as own
import pytest
from nets import Builder, dim

from pase_mtf.compat import mtf, tf
from pase_mtf.layout.legality import StockLegality
from pase_mtf.operations import trial
from pase_mtf.operations.registry import splittable_dims, trial_of
from pase_mtf.operations.trial import try_operation

# Far too large to be tried as they are.
BATCH, WIDTH = dim("batch", 4096), dim("width", 8192)


@pytest.fixture
def x():
    with tf.Graph().as_default():
        builder = Builder(tf.float32)
        yield mtf.import_tf_tensor(builder.mesh, tf.zeros([4096, 8192]), mtf.Shape([BATCH, WIDTH]))


def test_one_that_computes_element_by_element_splits_all(x):
    assert try_operation(own.Doubled(x)) == trial.Trial(("batch", "width"), contracted=((),), pending=((),))


def test_one_that_sums(x):
    found = try_operation(own.SumOver(x, WIDTH))
    assert found.splits == ("batch", "width")
    assert found.contracted == found.pending == (("width",),)
    assert found.reduced == ()


def test_one_that_pads_and_its_gradient(x):
    for name, size, other in (("width", 8192, "batch"), ("batch", 4096, "width")):
        padded = own.CustomPad(x, dim(name, size), (3, 1))
        found = try_operation(padded)
        assert found.splits == (other,)
        assert set(found.whole) == {name}
        gradient = own.CustomPadGradient(padded, padded.outputs[0])
        assert splittable_dims(gradient) == {other}


def test_what_lowers_to_wrong_values_is_found_out(x):
    found = try_operation(own.Centred(x))
    assert found.splits == ("batch",)
    assert found.whole == {"width": "tried, it gives wrong values"}


def test_pending_sums_that_it_cannot_read(x):
    found = try_operation(own.ScalarNote(mtf.reduce_sum(x)))
    assert (found.splits, found.reduced, found.untried) == ((), (0,), "")


def test_a_fixed_size_cannot_be_tried_small(x):
    assert "may be a size" in try_operation(own.FixedSize(x)).untried
    small = Builder(tf.float32).input("x", [dim("batch", 16), dim("width", 96)])
    found = try_operation(own.FixedSize(small, 48))
    assert found.untried == ""  # it is small enough to be tried as it is
    assert found.splits == ("batch", "width")


@pytest.mark.parametrize("end", [3, 20, 5000])
def test_numbers_that_are_places_are_not_taken_for_granted(x, end):
    """With 8 elements in the dim, all of them are before the place, split or not."""
    assert "width" not in try_operation(own.Masked(x, end)).splits
    small = Builder(tf.float32).input("x", [dim("batch", 16), dim("width", 32)])
    found = try_operation(own.Masked(small, 20))
    assert found.splits == ("batch",)
    assert found.whole == {"width": "tried, it gives wrong values"}


def test_what_cannot_be_compared_is_not_tried(x):
    assert "random" in try_operation(own.Noisy(x)).untried
    assert "no outputs" in try_operation(own.Silent(x)).untried


def test_dims_of_different_tensors_that_cannot_share_an_axis():
    class Outer(mtf.Operation):
        """Of two vectors the products of all pairs, summed."""

        def __init__(self, one, other):
            super().__init__([one, other], name="outer")
            self._outputs = [mtf.Tensor(self, mtf.Shape([]), one.dtype)]

        def lower(self, lowering):
            impl = lowering.mesh_impl(self)
            y = impl.slicewise(lambda s, t: tf.reduce_sum(s[:, None] * t), *(lowering.tensors[t] for t in self.inputs))
            axes = {impl.tensor_dimension_to_mesh_axis(dim) for t in self.inputs for dim in t.shape.dims} - {None}
            lowering.set_tensor_lowering(self.outputs[0], impl.allreduce(y, sorted(axes), "SUM") if axes else y)

    with tf.Graph().as_default():
        b = Builder(tf.float32)
        found = try_operation(Outer(b.input("x", [dim("x", 64)]), b.input("y", [dim("y", 64)])))
        assert found.splits == ("x", "y")
        assert found.apart == (("x", "y"),)


def test_it_is_tried_once_and_left_as_it_is(x, monkeypatch):
    made = []
    monkeypatch.setattr(trial, "_bench", lambda operation, original=trial._bench: (
        made.append(operation), original(operation))[1])
    operations = [own.CustomPad(x, WIDTH, (3, 1)) for _ in range(3)] + [own.CustomPad(x, WIDTH, (2, 2))]
    before = [dict(vars(operation)) for operation in operations]
    count = len(x.graph.operations)
    for operation in operations:
        assert trial_of(operation).splits == ("batch",)
    assert made == [operations[0], operations[3]]
    assert [dict(vars(operation)) for operation in operations] == before
    assert len(x.graph.operations) == count


def test_known_classes_are_not_tried(x):
    assert trial_of(mtf.tanh(x).operation) is None


def test_integers_are_indices_that_there_are():
    class Row(mtf.Operation):
        """Rows of a table by their number: what is not in a slice is not found."""

        def __init__(self, table, rows):
            super().__init__([table, rows], name="row")
            self._outputs = [mtf.Tensor(self, mtf.Shape([*rows.shape.dims, table.shape.dims[1]]), table.dtype)]

        def lower(self, lowering):
            lowering.set_tensor_lowering(self.outputs[0], lowering.mesh_impl(self).slicewise(
                tf.gather, *(lowering.tensors[t] for t in self.inputs)))

    with tf.Graph().as_default():
        b = Builder(tf.float32)
        found = try_operation(Row(b.input("t", [dim("vocab", 64), dim("width", 64)]),
                                  b.labels("i", [dim("batch", 64)], 64)))
        assert set(found.splits) == {"width", "batch"}
        assert set(found.whole) == {"vocab"}


class _Folded(mtf.Operation):
    """Undoes a padding; of the dim it keeps what it was before."""

    def __init__(self, x, dim, margin):
        super().__init__([x], name="folded")
        self._dim, self._margin = dim, margin
        self._outputs = [mtf.Tensor(self, mtf.Shape([
            dim if other.name == dim.name else other for other in x.shape.dims]), x.dtype)]

    def lower(self, lowering):
        def fold(t):
            first, inner, last = tf.split(t, [self._margin, self._dim.size, self._margin], axis=1)
            return inner + tf.reduce_sum(first, 1, keepdims=True) + tf.reduce_sum(last, 1, keepdims=True)
        lowering.set_tensor_lowering(self.outputs[0], lowering.mesh_impl(self).slicewise(
            fold, lowering.tensors[self.inputs[0]]))


class _Twice(mtf.Operation):
    """Adds a tensor to either half of one that is twice as long."""

    def __init__(self, x, y):
        super().__init__([x, y], name="twice")
        self._outputs = [mtf.Tensor(self, y.shape, y.dtype)]

    def lower(self, lowering):
        lowering.set_tensor_lowering(self.outputs[0], lowering.mesh_impl(self).slicewise(
            lambda x, y: y + tf.concat([x, x], axis=1), *(lowering.tensors[t] for t in self.inputs)))


@pytest.mark.parametrize("make", [
    lambda given: _Folded(given(8194), WIDTH, 1), lambda given: _Twice(given(4096), given(8192))])
def test_a_dim_of_two_sizes_is_tried_with_two(make):
    """As far apart as they are, or in the same ratio: with one small size for both they do not lower."""
    with tf.Graph().as_default():
        mesh = Builder(tf.float32).mesh
        found = try_operation(make(lambda width: mtf.import_tf_tensor(
            mesh, tf.zeros([4096, width]), mtf.Shape([BATCH, dim("width", width)]))))
        assert (found.splits, set(found.whole), found.untried) == (("batch",), {"width"}, "")


_PLACE = 20


def _before_place(t):
    return t * tf.cast(tf.range(t.shape[-1]) < 20, t.dtype)


class _ByName(own.Same):
    def lower(self, lowering):
        self._set(lowering, lambda t: t * tf.cast(tf.range(t.shape[-1]) < _PLACE, t.dtype))


class _ByHelper(own.Same):
    def lower(self, lowering):
        self._set(lowering, _before_place)


class _ByClass(own.Same):
    place = 20

    def lower(self, lowering):
        self._set(lowering, lambda t: t * tf.cast(tf.range(t.shape[-1]) < self.place, t.dtype))


class _ByArray(own.Same):
    def __init__(self, x):
        super().__init__(x)
        self._place = np.array([20])

    def lower(self, lowering):
        self._set(lowering, lambda t: t * tf.cast(tf.range(t.shape[-1]) < int(self._place[0]), t.dtype))


class _ByFloat(own.Same):
    def lower(self, lowering):
        self._set(lowering, lambda t: t * tf.cast(tf.cast(tf.range(t.shape[-1]), tf.float32) < 19.5, t.dtype))


class _ByFraction(own.Same):
    def lower(self, lowering):
        self._set(lowering, lambda t: t * tf.cast(tf.cast(tf.range(t.shape[-1]), tf.float32) < 7.5, t.dtype))


class _ByArrayOfFloats(own.Same):
    def __init__(self, x):
        super().__init__(x)
        self._place = np.array([20.0, np.inf], np.float32)

    def lower(self, lowering):
        self._set(lowering, lambda t: t * tf.cast(tf.range(t.shape[-1]) < int(self._place[0]), t.dtype))


_PLACES = np.arange(20, 32, dtype=np.int32)


def _masking(t):
    return tf.cast(tf.range(t.shape[-1]) < 20, t.dtype)


def _masked(t):
    return t * _masking(t)


class _ByHelperOfHelper(own.Same):
    def lower(self, lowering):
        self._set(lowering, _masked)


class _ByLongArray(own.Same):
    def lower(self, lowering):
        self._set(lowering, lambda t: t * tf.cast(tf.reduce_all(tf.not_equal(
            tf.range(t.shape[-1])[:, None], _PLACES), 1), t.dtype))


class _ByCall(own.Same):
    def __call__(self, t):
        return t * tf.cast(tf.range(t.shape[-1]) < 20, t.dtype)

    def lower(self, lowering):
        self._set(lowering, lambda t: self(t))


class _ByModule(own.Same):
    def lower(self, lowering):
        self._set(lowering, lambda t: t * tf.cast(tf.range(t.shape[-1]) < own.PLACE, t.dtype))


@dataclasses.dataclass
class _Settings:
    place: int = 20


class _ByObject(own.Same):
    def __init__(self, x):
        super().__init__(x)
        self._settings = _Settings()

    def lower(self, lowering):
        self._set(lowering, lambda t: t * tf.cast(tf.range(t.shape[-1]) < self._settings.place, t.dtype))


class _ByObjectOfItsSize(_ByObject):
    def __init__(self, x):
        super().__init__(x)
        self._settings = _Settings(32)

    def lower(self, lowering):
        self._set(lowering, lambda t: t * tf.cast(tf.range(t.shape[-1]) < self._settings.place // 2, t.dtype))


class _ByDimOfObject(_ByObject):
    def __init__(self, x):
        super().__init__(x)
        self._settings = _Settings(dim("width", 32))

    def lower(self, lowering):
        self._set(lowering, lambda t: t * tf.cast(tf.range(t.shape[-1]) < self._settings.place.size // 2, t.dtype))


class _Places:
    place = 20


class _ByClassOfObject(_ByObject):
    def __init__(self, x):
        super().__init__(x)
        self._settings = _Places()


@pytest.mark.parametrize("cls", [
    _ByName, _ByHelper, _ByClass, _ByArray, _ByFloat, _ByFraction, _ByArrayOfFloats, _ByHelperOfHelper, _ByLongArray,
    _ByCall, _ByModule, _ByObject, _ByObjectOfItsSize, _ByDimOfObject, _ByClassOfObject])
def test_numbers_that_stand_beside_the_text_of_a_class_are_not_taken_for_granted(cls):
    """With a width of 8 all would be before place 20, and a split of the width come out right."""
    with tf.Graph().as_default():
        found = try_operation(cls(Builder(tf.float32).input("x", [dim("batch", 16), dim("width", 32)])))
    assert (found.splits, set(found.whole)) == (("batch",), {"width"})


class _Reversed(own.Same):
    """Reverses the dims whose places an array holds."""

    def __init__(self, x, places):
        super().__init__(x)
        self._places = np.array(places)

    def lower(self, lowering):
        self._set(lowering, lambda t: tf.reverse(t, self._places))


def test_operations_that_differ_in_a_small_array_are_tried_each(x):
    assert try_operation(_Reversed(x, [0])).splits == ("width",)
    assert try_operation(_Reversed(x, [1])).splits == ("batch",)


class _LooksAtItsName(own.Same):
    def lower(self, lowering):
        if re.match("decoder", self.name):
            raise ValueError(self.name)
        self._set(lowering, lambda t: 2.0 * t)


def test_numbers_of_pythons_own_modules_are_no_sizes(x):
    """`re` keeps 512 patterns, and has flags of 128 and more."""
    found = try_operation(_LooksAtItsName(x))
    assert (found.splits, found.untried) == (("batch", "width"), "")


class _MeanOfAll(mtf.Operation):
    """Divides by the number of devices: right where all of them have a part of their own."""

    def __init__(self, x):
        super().__init__([x], name="mean_of_all")
        self._outputs = [mtf.Tensor(self, mtf.Shape([]), x.dtype)]

    def lower(self, lowering):
        x, impl = self.inputs[0], lowering.mesh_impl(self)
        y = impl.slicewise(tf.reduce_mean, lowering.tensors[x])
        axis = impl.tensor_dimension_to_mesh_axis(x.shape.dims[0])
        if axis is not None:
            y = impl.slicewise(lambda t: t / impl.size, impl.allreduce(y, [axis], "SUM"))
        lowering.set_tensor_lowering(self.outputs[0], y)


def test_what_is_right_only_on_a_mesh_of_one_axis_is_not_known_to_be():
    with tf.Graph().as_default():
        b = Builder(tf.float32)
        operation = _MeanOfAll(b.input("x", [dim("batch", 64)]))
        found = try_operation(operation)
        problem = StockLegality(b.graph, operation.outputs).problem({"batch": 0}, (2, 4))
    assert (found.splits, found.alone) == ((), ("batch",))
    assert found.whole == {"batch": "where the mesh has other axes: tried, it gives wrong values"}
    assert problem is not None
    assert not problem.known


class _Alternating(own.Same):
    """Changes the sign of every other element, counted from the beginning of the slice."""

    def lower(self, lowering):
        self._set(lowering, lambda t: t * tf.cast(1 - 2 * (tf.range(t.shape[-1]) % 2), t.dtype))


@pytest.mark.parametrize("width", [8, 28, 8192])
def test_shards_that_begin_at_an_odd_place_are_tried(width):
    with tf.Graph().as_default():
        found = try_operation(_Alternating(Builder(tf.float32).input("x", [dim("batch", 4), dim("width", width)])))
    assert found.splits == ("batch",)
    assert found.whole == {"width": "tried, it gives wrong values"}


class _Filtered(own.Same):
    """Adds to every element its neighbours in the last dim, each by its factor."""

    def __init__(self, x, taps):
        super().__init__(x)
        self._taps = np.array(taps, np.float32)

    def lower(self, lowering):
        before, here, after = map(float, self._taps)
        self._set(lowering, lambda t: here * t + before * tf.pad(t[:, :-1], [[0, 0], [1, 0]])
                  + after * tf.pad(t[:, 1:], [[0, 0], [0, 1]]))


def test_operations_that_differ_in_floating_point_numbers_are_tried_each(x):
    assert try_operation(_Filtered(x, [0.0, 1.0, 0.0])).splits == ("batch", "width")
    assert try_operation(_Filtered(x, [0.25, 0.5, 0.25])).splits == ("batch",)


class _FilteredByAFunction(own.Same):
    """As `_Filtered`; the factors are what its function has of its surroundings."""

    def __init__(self, x, taps):
        super().__init__(x)
        taps = np.array(taps, np.float32)
        self._function = lambda t: (
            float(taps[1]) * t + float(taps[0]) * tf.pad(t[:, :-1], [[0, 0], [1, 0]])
            + float(taps[2]) * tf.pad(t[:, 1:], [[0, 0], [0, 1]]))

    def lower(self, lowering):
        self._set(lowering, self._function)


def test_operations_whose_functions_hold_other_arrays_are_tried_each(x):
    assert try_operation(_FilteredByAFunction(x, [0.0, 1.0, 0.0])).splits == ("batch", "width")
    assert try_operation(_FilteredByAFunction(x, [0.25, 0.5, 0.25])).splits == ("batch",)


@pytest.mark.parametrize("kind", [int, np.int64])
def test_a_place_that_is_the_size_of_another_dim_is_not_taken_for_granted(x, kind):
    """With one small size for both dims, all elements would be before the place, split or not."""
    found = try_operation(own.Masked(x, kind(4096)))
    assert (found.splits, found.untried) == (("batch",), "")
    assert found.whole == {"width": "tried, it gives wrong values"}


def _within(function):
    return lambda t: function(t)


class _FilteredWithin(_FilteredByAFunction):
    """Its function stands behind others."""

    def __init__(self, x, taps):
        super().__init__(x, taps)
        self._function = _within(_within(_within(self._function)))


def test_operations_that_differ_in_an_array_deep_within_are_tried_each(x):
    assert try_operation(_FilteredWithin(x, [0.0, 1.0, 0.0])).splits == ("batch", "width")
    assert try_operation(_FilteredWithin(x, [0.25, 0.5, 0.25])).splits == ("batch",)


@pytest.mark.slow
def test_a_place_is_seen_among_many_sizes():
    """Each twice as large as the one before, five dims were too large to be tried, and all of one size were."""
    dims = [dim(name, size) for name, size in (("a", 16), ("b", 24), ("c", 32), ("d", 48), ("width", 64))]
    with tf.Graph().as_default():
        x = mtf.import_tf_tensor(Builder(tf.float32).mesh, tf.zeros([16, 24, 32, 48, 64]), mtf.Shape(dims))
        found = try_operation(own.Masked(x, 48))
    assert (found.splits, set(found.whole)) == (("a", "b", "c", "d"), {"width"})


@pytest.mark.slow
def test_a_place_is_seen_among_more_sizes_than_can_be_told_apart():
    """All in order they are too large to be tried; those beyond the place are larger than it all the same."""
    sizes = {"a": 16, "b": 24, "c": 32, "e": 40, "d": 48, "width": 64}
    with tf.Graph().as_default():
        x = mtf.import_tf_tensor(Builder(tf.float32).mesh, tf.placeholder(tf.float32, list(sizes.values())),
                                 mtf.Shape([dim(name, size) for name, size in sizes.items()]))
        found = try_operation(own.Masked(x, 48))
    assert (found.splits, set(found.whole)) == (("a", "b", "c", "e", "d"), {"width"})
