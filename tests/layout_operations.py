"""Small graphs that between them use every operation of Mesh-TF in every way; inputs are constants.

Each makes the tensors whose values count, gradients included.
"""

from collections.abc import Callable

import numpy as np
from nets import Builder, dim

from pase_mtf.compat import mtf, tf

ops = mtf.ops
Made = list[mtf.Tensor]


def gradients(outputs: Made, inputs: Made) -> Made:
    """The outputs, and the gradients of a weighted sum of them."""
    loss = None
    for number, output in enumerate(outputs):
        weights = mtf.import_tf_tensor(output.mesh, tf.constant(np.cos(
            np.arange(output.shape.size) + number).reshape(output.shape.to_integer_list), output.dtype), output.shape)
        term = mtf.reduce_sum(output * weights)
        loss = term if loss is None else loss + term
    return [*outputs, *(g for g in mtf.gradients([loss], inputs) if g is not None)]


def pointwise(b: Builder) -> Made:
    x = b.input("x", [dim("x", 4), dim("y", 4), dim("z", 2)])
    made = [mtf.sin(x), mtf.tanh(x), mtf.relu(x), mtf.exp(x), mtf.square(x), mtf.sigmoid(x), -x, mtf.selu(x * 2.0)]
    made += [mtf.softplus(x + 1.0), mtf.leaky_relu(x), mtf.abs(x), mtf.to_float(mtf.cast(x, tf.int32))]
    return gradients(made[:-1], [x]) + made[-1:]


def slicewise(b: Builder) -> Made:
    x = b.input("x", [dim("x", 4), dim("y", 4), dim("z", 2)])
    made = mtf.slicewise(lambda t: (tf.nn.softmax(t), tf.reduce_sum(t, -1)), [x],
                         [x.shape, mtf.Shape([dim("x", 4), dim("y", 4)])], [x.dtype, x.dtype],
                         splittable_dims=[dim("x", 4), dim("y", 4)])
    return gradients(list(made), [x])


def slicewise_of_less(b: Builder) -> Made:
    """An input that lacks a dim: every slice holds a part of its gradient."""
    x, y = b.input("x", [dim("x", 4), dim("y", 4)]), b.input("y", [dim("y", 4)])
    return gradients([mtf.slicewise(lambda s, t: s * tf.sin(t), [x, y], x.shape, x.dtype,
                                    splittable_dims=x.shape.dims)], [x, y])


def slicewise_of_less_forward(b: Builder) -> Made:
    x, y = b.input("x", [dim("x", 4), dim("y", 4)]), b.input("y", [dim("y", 4)])
    return gradients([mtf.slicewise(lambda s, t: s * tf.sin(t), [x, y], x.shape, x.dtype,
                                    splittable_dims=x.shape.dims)], [x])


def _of_two(x: mtf.Tensor, y: mtf.Tensor) -> mtf.Tensor:
    return mtf.slicewise(lambda s, t: tf.sinh(s) * t, [x, y], x.shape, x.dtype, splittable_dims=x.shape.dims)


def _tripled(x: mtf.Tensor) -> mtf.Tensor:
    """Made anew on every device: what is imported whole is the same tensor on all."""
    return x * 3.0


def slicewise_of_what_is_made_of_another(b: Builder) -> Made:
    """Of x and a softmax of x: the gradient of x takes the way through that, too."""
    x = b.input("x", [dim("x", 4), dim("y", 4), dim("z", 2)])
    y = _tripled(x)
    return gradients([_of_two(y, mtf.softmax(y, dim("y", 4)))], [x])


def slicewise_of_sums_of_another(b: Builder) -> Made:
    x = b.input("x", [dim("x", 4), dim("y", 4), dim("z", 2)])
    y = _tripled(x)
    return gradients([_of_two(y, y - mtf.reduce_mean(y, reduced_dim=dim("x", 4)))], [x])


def slicewise_of_one_twice(b: Builder) -> Made:
    return gradients([_of_two(y := _tripled(b.input("x", [dim("x", 4), dim("y", 4)])), y)], [y])


def slicewise_of_another_shifted(b: Builder) -> Made:
    x = b.input("x", [dim("x", 4), dim("y", 4)])
    y = _tripled(x)
    return gradients([_of_two(y, mtf.shift(mtf.sin(y), 1, dim("y", 4), wrap=True))], [x])


def slicewise_of_another_renamed(b: Builder) -> Made:
    x = b.input("x", [dim("x", 4), dim("y", 4)])
    y = _tripled(x)
    renamed = mtf.softmax(mtf.rename_dimension(y, "y", "z"), dim("z", 4))
    return gradients([_of_two(y, mtf.rename_dimension(renamed, "z", "y"))], [x])


def slicewise_of_a_product_of_another(b: Builder) -> Made:
    """Stock Mesh-TF does not stop TensorFlow where a program stops a gradient."""
    x, w = b.input("x", [dim("x", 4), dim("y", 4)]), b.input("w", [dim("y", 4), dim("z", 4)])
    y = _tripled(x)
    other = mtf.rename_dimension(mtf.einsum([y, w], mtf.Shape([dim("x", 4), dim("z", 4)])), "z", "y")
    return gradients([_of_two(y, mtf.stop_gradient(other) + y)], [x, w])


def power_of_sums_of_another(b: Builder) -> Made:
    x = b.input("x", [dim("x", 4), dim("y", 4)])
    y = _tripled(x)
    return gradients([mtf.pow(mtf.abs(y) + 1.0, mtf.reduce_mean(y, reduced_dim=dim("y", 4)))], [x])


def slicewise_reduction(b: Builder) -> Made:
    """Declared splittable where the function sums, or makes, a dim."""
    x = b.input("x", [dim("x", 4), dim("y", 4)])
    y = mtf.slicewise(lambda t: tf.reduce_sum(t, 1), [x], mtf.Shape([dim("x", 4)]), x.dtype,
                      splittable_dims=x.shape.dims)
    z = mtf.slicewise(lambda t: tf.tile(t[:, None], [1, 4]), [y], mtf.Shape([dim("x", 4), dim("z", 4)]), x.dtype,
                      splittable_dims=[dim("x", 4), dim("z", 4)])
    return [y, z]


def binary(b: Builder) -> Made:
    x, y = b.input("x", [dim("x", 4), dim("y", 4)]), b.input("y", [dim("y", 4), dim("z", 2)])
    shape = mtf.Shape([dim("x", 4), dim("y", 4), dim("z", 2)])
    made = [mtf.add(x, y, output_shape=shape), mtf.multiply(x, y, output_shape=shape),
            mtf.minimum(x, y, output_shape=shape), mtf.maximum(x, b.input("w", [dim("y", 4)]))]
    made += [mtf.cast(mtf.less(x, y, output_shape=shape), x.dtype), x / b.input("v", [dim("y", 4)])]
    return gradients(made, [x, y])


def broadcast(b: Builder) -> Made:
    x = b.input("x", [dim("x", 4), dim("y", 4)])
    return gradients([mtf.broadcast(x, mtf.Shape([dim("y", 4), dim("new", 2), dim("x", 4)]))], [x])


def reductions(b: Builder) -> Made:
    x = b.input("x", [dim("x", 4), dim("y", 4), dim("z", 2)])
    made = [mtf.reduce_sum(x, reduced_dim=dim("y", 4)), mtf.reduce_mean(x, reduced_dim=dim("x", 4)),
            mtf.reduce_max(x, reduced_dim=dim("z", 2)), mtf.reduce_min(x, reduced_dim=dim("y", 4)),
            mtf.reduce_sum(x, output_shape=mtf.Shape([dim("z", 2)])), mtf.reduce_sum(x),
            mtf.reduce_logsumexp(x, dim("y", 4)), mtf.softmax(x, dim("z", 2))]
    whole = [mtf.reduce_all(mtf.greater(x, -9.0), reduced_dim=dim("y", 4)),
             mtf.reduce_any(mtf.greater(x, 1.0), reduced_dim=dim("x", 4))]
    return gradients(made, [x]) + [mtf.cast(t, x.dtype) for t in whole]


def einsums(b: Builder) -> Made:
    x, y = b.input("x", [dim("x", 4), dim("y", 4)]), b.input("y", [dim("y", 4), dim("z", 2)])
    w = b.input("w", [dim("z", 2), dim("v", 2)])
    made = [mtf.einsum([x, y], [dim("x", 4), dim("z", 2)]), mtf.einsum([x, y, w], [dim("v", 2), dim("x", 4)]),
            mtf.einsum([x, y], [dim("x", 4), dim("y", 4), dim("z", 2)]), mtf.einsum([x], [dim("y", 4)])]
    return gradients(made, [x, y, w])


def einsum_of_integers(b: Builder) -> Made:
    x, y = b.labels("x", [dim("x", 4), dim("y", 4)], 9), b.labels("y", [dim("y", 4), dim("z", 2)], 9)
    return [mtf.einsum([x, y], [dim("x", 4), dim("z", 2)]),
            mtf.einsum([x, x], [dim("x", 4), dim("new", 2)])]


def two_sizes(b: Builder) -> Made:
    """One name with two sizes, in two tensors and in one einsum."""
    x, y = b.input("x", [dim("x", 4), dim("y", 4)]), b.input("y", [dim("x", 6), dim("z", 2)])
    return gradients([mtf.einsum([x, mtf.reduce_sum(y, reduced_dim=dim("x", 6))], [dim("y", 4), dim("z", 2)]),
                      mtf.tanh(y), mtf.einsum([x, y], [dim("y", 4), dim("z", 2)])], [x, y])


def two_sizes_apart(b: Builder) -> Made:
    x, y = b.input("x", [dim("x", 4), dim("y", 4)]), b.input("y", [dim("x", 6), dim("z", 3)])
    return gradients([mtf.tanh(y), mtf.exp(x)], [x, y])


def joining(b: Builder) -> Made:
    x, y = b.input("x", [dim("x", 4), dim("y", 4)]), b.input("y", [dim("x", 4), dim("y", 2)])
    made = [mtf.concat([x, y], "y"), mtf.stack([x, x * 2.0], "new", 1), mtf.slice(x, 1, 2, "y")]
    made += [mtf.pad(x, [2, 2], "y"), *mtf.unstack(y, dim("y", 2))]
    return gradients(made, [x, y])


def splitting(b: Builder) -> Made:
    x = b.input("x", [dim("x", 4), dim("y", 4), dim("z", 4)])
    return gradients([*mtf.split(x, dim("y", 4), [1, 3]), *mtf.split(x, dim("z", 4), 2)], [x])


def _pooled(b: Builder, size: int, window: int, dims: int, kind: str, gradient: bool) -> Made:
    spatial = [dim(name, size) for name in ("d", "h", "w")[3 - dims:]]
    x = b.input("x", [dim("x", 4), *spatial[:1], *(dim(s.name, 4) for s in spatial[1:]), dim("c", 2)])
    ksize = (window,) + (2,) * (dims - 1)
    y = ops.PoolOperation(x, ksize, ksize, f"{kind}_{dims}D").outputs[0]
    return gradients([y], [x]) if gradient else [y]


def max_pool_2d(b: Builder) -> Made:
    return _pooled(b, 8, 2, 2, "MAX", True)


def average_pool_2d(b: Builder) -> Made:
    return _pooled(b, 4, 2, 2, "AVG", True)


def max_pool_3d(b: Builder) -> Made:
    return _pooled(b, 4, 2, 3, "MAX", True)


def average_pool_3d(b: Builder) -> Made:
    return _pooled(b, 4, 2, 3, "AVG", True)


def pool_with_a_rest(b: Builder) -> Made:
    """Windows of 3 on 14: what is left over at the end of every half would be lost."""
    return _pooled(b, 14, 3, 2, "MAX", False)


def _convolved(b: Builder, dims: int, transposed: bool, padding: str, stride: int) -> Made:
    spatial = [dim(name, 4) for name in ("d", "h", "w")[3 - dims:]]
    taps = [dim(f"f{name.name}", 2) for name in spatial]
    x = b.input("x", [dim("x", 2), dim("y", 2), *spatial, dim("in", 4)])
    channels = [dim("out", 4), dim("in", 4)] if transposed else [dim("in", 4), dim("out", 4)]
    kernel = b.input("f", [*taps, *channels])
    make = {(2, False): ops.Conv2dOperation, (3, False): ops.Conv3dOperation,
            (2, True): ops.Conv2dTransposeOperation, (3, True): ops.Conv3dTransposeOperation}[dims, transposed]
    return gradients([make(x, kernel, [1, *[stride] * dims, 1], padding).outputs[0]], [x, kernel])


def conv2d(b: Builder) -> Made:
    return _convolved(b, 2, False, "SAME", 1)


def conv2d_strided(b: Builder) -> Made:
    return _convolved(b, 2, False, "SAME", 2)


def conv3d(b: Builder) -> Made:
    return _convolved(b, 3, False, "SAME", 1)


def conv2d_transpose(b: Builder) -> Made:
    return _convolved(b, 2, True, "SAME", 2)


def conv3d_transpose(b: Builder) -> Made:
    return _convolved(b, 3, True, "SAME", 2)


def conv_same_channels(b: Builder) -> Made:
    """In and out channels of one name and two sizes."""
    x = b.input("x", [dim("x", 4), dim("h", 2), dim("w", 2), dim("c", 4)])
    kernel = b.input("f", [dim("fh", 1), dim("fw", 1), dim("c", 4), dim("c", 8)])
    return gradients([ops.Conv2dOperation(x, kernel, [1, 1, 1, 1], "SAME").outputs[0]], [x, kernel])


def conv_backward_alone(b: Builder) -> Made:
    """The gradients of a convolution without the convolution: they declare the spatial dims splittable."""
    x = b.input("x", [dim("x", 4), dim("h", 4), dim("w", 4), dim("in", 2)])
    dy = b.input("dy", [dim("x", 4), dim("h", 4), dim("w", 4), dim("out", 2)])
    kernel = b.input("f", [dim("fh", 2), dim("fw", 2), dim("in", 2), dim("out", 2)])
    return [ops.conv2d_backprop_input(x.shape, kernel, dy, [1, 1, 1, 1], "SAME"),
            ops.conv2d_backprop_filter(x, kernel.shape, dy, [1, 1, 1, 1], "SAME")]


def blocks_2d(b: Builder) -> Made:
    """A convolution over an image split into blocks, as mtf.layers.conv2d_with_blocks does it: halo exchange."""
    x = b.input("x", [dim("x", 2), dim("hb", 4), dim("wb", 2), dim("h", 2), dim("w", 4), dim("in", 2)])
    kernel = b.input("f", [dim("fh", 3), dim("fw", 3), dim("in", 2), dim("out", 2)])
    y = mtf.halo_exchange(x, dim("hb", 4), dim("h", 2), 1)
    y = mtf.halo_exchange(y, dim("wb", 2), dim("w", 4), 1)
    return gradients([ops.Conv2dOperation(y, kernel, [1, 1, 1, 1], "VALID").outputs[0]], [x, kernel])


def blocks_3d(b: Builder) -> Made:
    x = b.input("x", [dim("x", 2), dim("db", 2), dim("hb", 2), dim("d", 2), dim("h", 2), dim("w", 2), dim("in", 2)])
    kernel = b.input("f", [dim("fd", 3), dim("fh", 3), dim("fw", 3), dim("in", 2), dim("out", 2)])
    y = mtf.halo_exchange(x, dim("db", 2), dim("d", 2), 1)
    y = mtf.pad(mtf.halo_exchange(y, dim("hb", 2), dim("h", 2), 1), [1, 1], "w")
    return gradients([ops.Conv3dOperation(y, kernel, [1, 1, 1, 1, 1], "VALID").outputs[0]], [x, kernel])


def halos(b: Builder) -> Made:
    x = b.input("x", [dim("blocks", 4), dim("size", 4), dim("z", 2)])
    made = [mtf.halo_exchange(x, dim("blocks", 4), dim("size", 4), 3),
            mtf.halo_exchange(x, dim("blocks", 4), dim("size", 4), 1, wrap=True),
            mtf.left_halo_exchange(x, dim("blocks", 4), dim("size", 4), 2)]
    return gradients(made, [x])


def shifts(b: Builder) -> Made:
    x = b.input("x", [dim("x", 8), dim("y", 4)])
    made = [mtf.shift(x, offset, dim("x", 8), wrap) for offset in (1, 2, 3, 4, 5, 7, 9, -1, -3, -4, -6, -9)
            for wrap in (True, False)]
    return gradients(made, [x])


def shift_by_data(b: Builder) -> Made:
    x = b.input("x", [dim("x", 4), dim("y", 4)])
    return gradients([mtf.dynamic_shift(x, b.labels("n", [dim("y", 4)], 3), dim("x", 4), wrap)
                      for wrap in (True, False)], [x])


def sums_along(b: Builder) -> Made:
    x = b.input("x", [dim("x", 4), dim("y", 4)])
    return gradients([mtf.cumsum(x, dim("x", 4)), mtf.cumsum(x, dim("y", 4), exclusive=True)], [x])


def top(b: Builder) -> Made:
    x = b.input("x", [dim("x", 4), dim("y", 8), dim("z", 2)])
    made, indices = [], []
    for size in (1, 2, 6):
        value, index = mtf.top_k(x, dim("y", 8), dim(f"k{size}", size))
        made.append(value)
        indices.append(index)
    value, index = mtf.top_1(x, dim("x", 4))
    return [*gradients([*made, value], [x]), *indices, index]


def one_hot(b: Builder) -> Made:
    x = b.labels("x", [dim("x", 4), dim("y", 2)], 8)
    table = b.input("t", [dim("rows", 8), dim("z", 2)])
    return [mtf.one_hot(x, dim("hot", 8), dtype=b.dtype), *gradients([mtf.gather(table, x, dim("rows", 8))], [table])]


def one_hot_int64(b: Builder) -> Made:
    x = b.labels("x", [dim("x", 4), dim("y", 2)], 8, tf.int64)
    return [mtf.one_hot(x, dim("hot", 8), dtype=b.dtype)]


def sources(b: Builder) -> Made:
    x, y = dim("x", 4), dim("y", 2)
    return [mtf.range(b.mesh, x, b.dtype), mtf.constant(b.mesh, 3.0, mtf.Shape([x, y]), b.dtype),
            mtf.zeros_like(b.input("x", [x, y])), mtf.cast(mtf.range(b.mesh, y, tf.bfloat16), b.dtype),
            mtf.import_fully_replicated(b.mesh, tf.constant(b.values("z", [4, 2])), [x, y])]


def hidden_names(b: Builder) -> Made:
    x = b.input("x", [dim("x", 4), dim("y", 4)])
    return gradients([mtf.reshape(mtf.tanh(mtf.anonymize(x)), x.shape), mtf.anonymize(x)], [x])


def _reshaped(*steps: list[tuple[str, int]]) -> Callable[[Builder], Made]:
    def build(b: Builder) -> Made:
        first, *rest = [mtf.Shape([dim(*entry) for entry in step]) for step in steps]
        x = y = b.input("x", first.dims)
        made = []
        for shape in rest:
            y = mtf.reshape(y, shape)
            made.append(y)
        return gradients(made, [x])
    return build


rename = _reshaped([("x", 4), ("z", 2)], [("y", 4), ("z", 2)])
rename_inner = _reshaped([("z", 4), ("x", 4)], [("z", 4), ("y", 4)])
merge = _reshaped([("x", 4), ("y", 4), ("z", 2)], [("xy", 16), ("z", 2)])
merge_kept = _reshaped([("x", 4), ("y", 4), ("z", 2)], [("x", 16), ("z", 2)])
part = _reshaped([("x", 8), ("z", 4)], [("x", 2), ("y", 4), ("z", 4)])
part_inner = _reshaped([("x", 8), ("z", 4)], [("y", 2), ("x", 4), ("z", 4)])
swap = _reshaped([("x", 4), ("y", 4)], [("y", 4), ("x", 4)])
rotate = _reshaped([("x", 4), ("y", 4), ("z", 4)], [("y", 4), ("z", 4), ("x", 4)])
odd = _reshaped([("x", 6), ("y", 4)], [("y", 4), ("x", 6)])
ones = _reshaped([("x", 1), ("y", 4)], [("y", 4), ("x", 1)], [("u", 1), ("v", 4), ("w", 1)])


def partial_sums(b: Builder) -> Made:
    """Sums that are added, reshaped, passed on, and differentiated by TensorFlow."""
    x, w = b.input("x", [dim("x", 4), dim("y", 4)]), b.input("w", [dim("y", 4), dim("z", 2)])
    v = b.input("v", [dim("y", 4), dim("z", 2)])
    shape = mtf.Shape([dim("x", 4), dim("z", 2)])
    one, other = mtf.einsum([x, w], shape), mtf.einsum([x, v], shape)
    made = [mtf.selu(one), one + other, mtf.reshape(one + other, [dim("xz", 8)]), mtf.stop_gradient(one) * one]
    return gradients(made, [x, w])


def partial_sums_added(b: Builder) -> Made:
    """Two sums over different dims: their sum is a partial sum only where both are, over one axis."""
    x, w = b.input("x", [dim("x", 4), dim("y", 4)]), b.input("w", [dim("x", 4), dim("z", 2)])
    return gradients([mtf.softplus(mtf.reduce_sum(x, reduced_dim=dim("y", 4)) + mtf.reduce_sum(
        w, reduced_dim=dim("z", 2)))], [x, w])


def dependencies(b: Builder) -> Made:
    x = b.input("x", [dim("x", 4), dim("y", 4)])
    return gradients([mtf.depend(x, [mtf.reduce_sum(x, reduced_dim=dim("y", 4))])], [x])


def functions_of_their_own(b: Builder) -> Made:
    x, w = b.input("x", [dim("x", 4), dim("y", 4)]), b.input("w", [dim("y", 4), dim("z", 4)])

    def dense(t: mtf.Tensor, u: mtf.Tensor) -> mtf.Tensor:
        return mtf.sigmoid(mtf.einsum([t, u], [dim("x", 4), dim("z", 4)]))

    y = mtf.recompute_grad(dense, [x, w])
    y = mtf.custom_gradient(lambda t: mtf.sign(t) * t,
                            lambda explicit_inputs, output_grads, **_: [output_grads[0] * 0.5], [y])
    y = mtf.Print(y, [y], "nothing")
    return gradients([y], [x, w])


def _counting(steps: int) -> Callable:
    return lambda count, *_: mtf.less(count, steps)


def loop(b: Builder) -> Made:
    x, w = b.input("x", [dim("x", 4), dim("y", 4)]), b.input("w", [dim("y", 4), dim("z", 4)])

    def body(count: mtf.Tensor, state: mtf.Tensor) -> Made:
        made = mtf.tanh(mtf.einsum([state, w], [dim("x", 4), dim("z", 4)]))
        return [count + 1, mtf.rename_dimension(made, "z", "y")]
    return mtf.while_loop(_counting(3), body, [mtf.constant(b.mesh, 0, dtype=tf.int32), x])


def loop_with_sums(b: Builder) -> Made:
    """A loop variable that is a sum over a dim: split, the next iteration would see a part of it."""
    x = b.input("x", [dim("x", 4), dim("y", 4)])

    def body(count: mtf.Tensor, state: mtf.Tensor, total: mtf.Tensor) -> Made:
        return [count + 1, state * 0.5, mtf.reduce_sum(state + total, reduced_dim=dim("y", 4))]
    zero = mtf.zeros(b.mesh, [dim("x", 4)], b.dtype)
    return mtf.while_loop(_counting(3), body, [mtf.constant(b.mesh, 0, dtype=tf.int32), x, zero])


def loop_with_accumulators(b: Builder) -> Made:
    x = b.input("x", [dim("x", 4), dim("y", 4)])

    def body(count: mtf.Tensor) -> Made:
        scaled = x * mtf.cast(count + 1, b.dtype)
        return [count + 1, mtf.reduce_sum(scaled, reduced_dim=dim("y", 4)), mtf.tanh(scaled)]
    return mtf.while_loop(_counting(3), body, [mtf.constant(b.mesh, 0, dtype=tf.int32)], has_accumulators=True)


def loop_around_a_sum(b: Builder) -> Made:
    """A sum that a loop reads first and others read later."""
    x = b.input("x", [dim("x", 4), dim("y", 4)])
    total = mtf.reduce_sum(x, reduced_dim=dim("y", 4))

    def body(count: mtf.Tensor, state: mtf.Tensor) -> Made:
        return [count + 1, state + mtf.tanh(total)]
    zero = mtf.zeros(b.mesh, [dim("x", 4)], b.dtype)
    looped = mtf.while_loop(_counting(3), body, [mtf.constant(b.mesh, 0, dtype=tf.int32), zero])
    return [*looped, mtf.exp(total)]


def loop_that_prints_a_sum(b: Builder) -> Made:
    """A sum that a loop prints and others read later."""
    x = b.input("x", [dim("x", 4), dim("y", 4)])
    total = mtf.reduce_sum(x, reduced_dim=dim("y", 4))

    def body(count: mtf.Tensor, state: mtf.Tensor) -> Made:
        return [count + 1, mtf.Print(state + 1.0, [total], "nothing")]
    zero = mtf.zeros(b.mesh, [dim("x", 4)], b.dtype)
    looped = mtf.while_loop(_counting(3), body, [mtf.constant(b.mesh, 0, dtype=tf.int32), zero])
    return [*looped, mtf.exp(total)]


def loop_with_gradients_of_slices(b: Builder) -> Made:
    """Of an input that lacks a split dim every device has a part of the gradient: the loop hands it out, and nothing in
    it reads it."""
    x, slope = b.input("x", [dim("x", 4), dim("y", 4)]), b.input("slope", [dim("y", 4)])

    def body(count: mtf.Tensor) -> Made:
        scaled = x * mtf.cast(count + 1, b.dtype)
        made = mtf.slicewise(lambda s, t: tf.nn.relu(s) - t * tf.nn.relu(-s), [scaled, slope], x.shape, x.dtype,
                             splittable_dims=x.shape.dims)
        return [count + 1, *mtf.gradients([mtf.reduce_sum(mtf.square(made))], [slope])]
    return mtf.while_loop(_counting(3), body, [mtf.constant(b.mesh, 0, dtype=tf.int32)], has_accumulators=True)


def sum_that_other_splits_finish(b: Builder) -> Made:
    """A reshape moves slices of a pending sum, and finishes it, where the dims it makes are split as well."""
    x, w = b.input("x", [dim("x", 4), dim("io", 4)]), b.input("w", [dim("io", 4), dim("hidden", 8)])
    h = mtf.einsum([x, w], [dim("x", 4), dim("hidden", 8)])
    return gradients([mtf.elu(mtf.reshape(h, [dim("x", 4), dim("heads", 4), dim("dk", 2)]))], [x, w])


def sums_that_differ(b: Builder) -> Made:
    """Two sums of which one is over more axes than the other are finished before they are added."""
    x = b.input("x", [dim("x", 4), dim("y", 4), dim("z", 4)])
    one = mtf.reduce_sum(x, output_shape=[dim("x", 4), dim("z", 4)])
    other = mtf.einsum([x, b.input("w", [dim("y", 4), dim("k", 4), dim("z", 4)]),
                        b.input("v", [dim("k", 4)])], [dim("x", 4), dim("z", 4)])
    return gradients([mtf.elu(one + other)], [x])


def loop_condition(b: Builder) -> Made:
    x = b.input("x", [dim("x", 4), dim("y", 4)])
    return mtf.while_loop(lambda _, t: mtf.less(mtf.reduce_sum(mtf.square(t)), 100.0),
                          lambda count, t: [count + 1, t * 2.0], [mtf.constant(b.mesh, 0, dtype=tf.int32), x])


def layers(b: Builder) -> Made:
    x = b.input("x", [dim("x", 4), dim("y", 4)])
    w = b.input("w", [dim("y", 4), dim("classes", 8)])
    logits = mtf.einsum([x, w], [dim("x", 4), dim("classes", 8)])
    targets = mtf.one_hot(b.labels("l", [dim("x", 4)], 8), dim("classes", 8), dtype=b.dtype)
    loss = mtf.layers.softmax_cross_entropy_with_logits(logits, targets, dim("classes", 8), z_loss=1e-3)
    return gradients([loss, mtf.log_softmax(logits, dim("classes", 8))], [x, w])


# TensorFlow has no three-dimensional pooling of float64 on CPUs.
FLOAT32 = ("max_pool_3d", "average_pool_3d")

CASES: dict[str, Callable[[Builder], Made]] = {
    name: value for name, value in list(globals().items())
    if callable(value) and not name.startswith("_") and name not in ("Callable", "Builder", "dim", "gradients", "Made")}
