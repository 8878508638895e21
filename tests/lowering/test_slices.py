"""Functions of slices where all of their dims are asked to be split: values and gradients are those of one device."""

import numpy as np
import pytest
from harness import device_names, evaluate, session
from nets import Builder, dim

from pase_mtf.compat import mtf, tf
from pase_mtf.errors import UsageError
from pase_mtf.lowering.lowering import PlanLowering
from pase_mtf.lowering.mesh_spec import MeshSpec
from pase_mtf.operations.flow import all_operations
from pase_mtf.operations.registry import splittable_dims

_ROWS, _COLUMNS, _DEPTH = dim("rows", 4), dim("columns", 8), dim("depth", 2)
_BLOCKS, _SIZE, _ALL, _PICKED = dim("blocks", 2), dim("size", 4), dim("all", 8), dim("picked", 6)


def _made(function, given, made, declared):
    """A function of slices of inputs, and the gradients of a weighted sum of all that it makes."""
    builder = Builder(tf.float64)
    inputs = [builder.input(f"x{number}", dims) for number, dims in enumerate(given)]
    outputs = mtf.slicewise(function, inputs, [mtf.Shape(dims) for dims in made], [tf.float64] * len(made), declared)
    loss = sum(mtf.reduce_sum(output * builder.input(f"w{number}", output.shape.dims))
               for number, output in enumerate(outputs))
    return builder, inputs, [*outputs, *mtf.gradients([loss], inputs)]


def _plainly(builder, function, given, made):
    """The same on one device, by TensorFlow alone."""
    def input_of(name, dims):
        return tf.constant(builder.values(name, [each.size for each in dims]))

    with tf.Graph().as_default():
        inputs = [input_of(f"x{number}", dims) for number, dims in enumerate(given)]
        outputs = function(*inputs)
        outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
        loss = sum(tf.reduce_sum(output * input_of(f"w{number}", dims))
                   for number, (output, dims) in enumerate(zip(outputs, made, strict=True)))
        gradients = tf.gradients(loss, inputs, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        with session() as run:
            return run.run([*outputs, *map(tf.convert_to_tensor, gradients)])


def _split(builder, dims):
    """Our lowering with all operations split along these dims, each over two devices."""
    spec = MeshSpec(tuple((frozenset([each.name]), 2) for each in dims), tuple(range(2 ** len(dims))))
    return PlanLowering(builder.graph, dict.fromkeys(all_operations(builder.graph), spec), device_names(8))


@pytest.mark.parametrize(("function", "given", "made", "split"), [
    (lambda t: tf.reduce_sum(tf.square(t), 1), [[_ROWS, _COLUMNS]], [[_ROWS]], {"rows"}),
    (lambda t: tf.tile(t[:, None], [1, 2]), [[_ROWS]], [[_ROWS, _DEPTH]], {"rows"}),
    (lambda t: tf.reshape(tf.sin(t), [-1]), [[_BLOCKS, _SIZE]], [[_ALL]], set()),
    (lambda t: (tf.tanh(t), tf.reduce_sum(tf.sin(t), 0)), [[_ROWS, _COLUMNS]], [[_ROWS, _COLUMNS], [_COLUMNS]],
     {"columns"}),
    (lambda t, u: t * tf.sin(u), [[_ROWS, _COLUMNS], [_COLUMNS]], [[_ROWS, _COLUMNS]], {"rows", "columns"}),
    (lambda t, u: tf.reduce_sum(t * tf.sin(u), 1), [[_ROWS, _COLUMNS], [_COLUMNS]], [[_ROWS]], {"rows"})])
def test_dims_that_a_function_makes_or_sums_up_stay_whole(function, given, made, split):
    """Whatever the program declares: of a sum over the rows that it has, every device would have a part."""
    declared = list(dict.fromkeys(each for dims in (*given, *made) for each in dims))
    with tf.Graph().as_default():
        builder, inputs, tensors = _made(function, given, made, declared)
        assert splittable_dims(tensors[0].operation) == split
        lowering = _split(builder, declared)
        assert lowering.mesh_impl(tensors[0].operation).partition(inputs[0].shape).block_shape(
            inputs[0].shape.to_integer_list) == tuple(
                each.size // (2 if each.name in split else 1) for each in inputs[0].shape.dims)
        found = evaluate(lowering, tensors)
    for value, wanted in zip(found, _plainly(builder, function, given, made), strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("split", [[], [_COLUMNS], [_PICKED], [_PICKED, _COLUMNS]])
def test_the_gradient_of_a_function_that_takes_rows(split):
    """TensorFlow gives it as rows and where they belong."""
    def function(rows, picked):
        return tf.sin(tf.gather(rows, tf.cast(10 * tf.abs(picked), tf.int32) % _ROWS.size))

    given, made = [[_ROWS, _COLUMNS], [_PICKED]], [[_PICKED, _COLUMNS]]
    with tf.Graph().as_default():
        builder, _, tensors = _made(function, given, made, [_PICKED, _COLUMNS])
        found = evaluate(_split(builder, split), tensors)
    for value, wanted in zip(found, _plainly(builder, function, given, made), strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-9, atol=1e-12)


def test_devices_that_hold_the_same_block_draw_the_same_numbers():
    with tf.Graph().as_default():
        builder = Builder(tf.float64)
        x, w = builder.input("x", [_ROWS]), builder.input("w", [_ROWS])
        y = mtf.slicewise(lambda t: t * tf.random.uniform(t.shape, dtype=t.dtype), [x], splittable_dims=[_ROWS])
        gradient, = mtf.gradients([mtf.reduce_sum(y * w)], [x])
        halves = [y * 1.0, gradient * 1.0]
        copies, split = MeshSpec(((frozenset(), 2),), (0, 1)), MeshSpec(((frozenset(["rows"]), 2),), (0, 1))
        plan = {**dict.fromkeys(all_operations(builder.graph), copies), **{half.operation: split for half in halves}}
        made, half, slope = evaluate(PlanLowering(builder.graph, plan, device_names(8)), [y, *halves])
    np.testing.assert_array_equal(half, made)
    np.testing.assert_allclose(slope * builder.values("x", [4]), made * builder.values("w", [4]), rtol=1e-9)


def test_blocks_that_are_joined_of_the_same_tensor_twice():
    with tf.Graph().as_default():
        builder = Builder(tf.float64)
        x = builder.input("x", [_BLOCKS, _SIZE])
        y = mtf.slicewise(lambda a, b: a[0] * b[0], [x, x], mtf.Shape([_ALL]), x.dtype, [_BLOCKS, _ALL])
        gradient, = mtf.gradients([mtf.reduce_sum(y * builder.input("w", [_ALL]))], [x])
        found, = evaluate(_split(builder, [_BLOCKS, _ALL]), [gradient])
    want = 2 * builder.values("x", [2, 4]) * builder.values("w", [8]).reshape(2, 4)
    np.testing.assert_allclose(found, want, rtol=1e-9)


def test_the_gradient_has_the_numbers_that_the_function_drew():
    def noisy(a, b):
        return a * b * tf.random.uniform(a.shape, dtype=a.dtype)

    with tf.Graph().as_default():
        builder = Builder(tf.float64)
        x = builder.input("x", [_ROWS])
        y = mtf.slicewise(noisy, [x, x], splittable_dims=[_ROWS])
        gradient, = mtf.gradients([mtf.reduce_sum(y)], [x])
        made, slope = evaluate(_split(builder, [_ROWS]), [y, gradient])
    np.testing.assert_allclose(slope * builder.values("x", [4]), 2 * made, rtol=1e-9)


def test_numbers_are_drawn_once_though_a_function_of_the_same_text_draws_none():
    """As tf.nn.dropout at a rate of 0."""
    def noisy(rate):
        def function(t):
            kept = t * (1.0 - rate)
            return kept * tf.random.uniform(t.shape, dtype=t.dtype) if rate else kept
        return function

    with tf.Graph().as_default():
        builder = Builder(tf.float64)
        y = builder.input("x", [_ROWS])
        for rate in (0.0, 0.5):
            y = mtf.slicewise(noisy(rate), [y], splittable_dims=[_ROWS])
        half = y * 1.0
        copies, split = MeshSpec(((frozenset(), 2),), (0, 1)), MeshSpec(((frozenset(["rows"]), 2),), (0, 1))
        plan = {**dict.fromkeys(all_operations(builder.graph), copies), half.operation: split}
        made, found = evaluate(PlanLowering(builder.graph, plan, device_names(8)), [y, half])
    np.testing.assert_array_equal(found, made)


@pytest.mark.parametrize("held", [float, lambda rate: np.array([rate])], ids=["number", "array"])
def test_functions_of_one_text_draw_by_their_own_rates(held):
    """With a rate of 0 TensorFlow draws no numbers, which tells nothing of the next function of that text."""
    def dropped(rate):
        return lambda t: tf.nn.dropout(t, rate=float(np.max(rate)))

    with tf.Graph().as_default():
        builder, wide = Builder(tf.float64), dim("wide", 64)
        x = builder.input("x", [wide])
        made = [mtf.slicewise(dropped(held(rate)), [x], splittable_dims=[wide]) for rate in (0.0, 0.5)]
        copies = MeshSpec(((frozenset(), 2),), (0, 1))
        lowering = PlanLowering(builder.graph, dict.fromkeys(all_operations(builder.graph), copies), device_names(8))
        slices = lowering.tensors[made[1]].to_laid_out_tensor().tensor_list
        with session() as run:
            one, other = run.run(slices)
    np.testing.assert_array_equal(one, other)
    assert (one == 0.0).any()


def test_numbers_that_the_backward_pass_would_draw_anew_are_refused():
    """`mtf.recompute_grad` calls a function of slices once more; random tensors of Mesh-TF stay as they were drawn."""
    def lowered(function):
        with tf.Graph().as_default():
            builder = Builder(tf.float64)
            x = builder.input("x", [_ROWS])
            y = mtf.recompute_grad(function, [x])
            gradient, = mtf.gradients([mtf.reduce_sum(y)], [x])
            return evaluate(_split(builder, [_ROWS]), [y, gradient])

    def sliced(function):
        return lambda t: mtf.slicewise(function, [t], splittable_dims=[_ROWS])

    with pytest.raises(UsageError, match=r"slicewise: draws random numbers, and mtf.recompute_grad computes it once"):
        lowered(sliced(lambda t: t * tf.random.uniform(t.shape, dtype=t.dtype)))
    for kept in (sliced(tf.sin), lambda t: mtf.dropout(t, True, rate=0.5)):
        made, slope = lowered(kept)
        assert made.shape == slope.shape == (4,)
