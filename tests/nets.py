"""Small nets that between them use every kind of Mesh-TF operation, and random plans for them."""

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable

import harness
import numpy as np

from pase_mtf.compat import mtf, tf
from pase_mtf.lowering.mesh_spec import MeshSpec
from pase_mtf.operations.flow import all_operations
from pase_mtf.operations.registry import splittable_dims

ops = mtf.ops


@dataclasses.dataclass
class Net:
    """A model with a loss; its inputs are constants, so that a step needs no feed.

    Attributes:
      graph, mesh: of Mesh-TF.
      loss: a scalar.
      outputs: further tensors whose values are to agree.
      updates: the optimizer's operations.
      gradients: of the trainable variables, where the net makes them itself.
      global_step: the number of the step, which random numbers follow; None: there is none.
    """

    graph: mtf.Graph
    mesh: mtf.Mesh
    loss: mtf.Tensor
    outputs: list[mtf.Tensor] = dataclasses.field(default_factory=list)
    updates: list[mtf.Operation] = dataclasses.field(default_factory=list)
    gradients: list[mtf.Tensor] = dataclasses.field(default_factory=list)
    global_step: object = None


class Builder:
    """What the nets are written with: dims by name, variables and inputs with fixed random values."""

    def __init__(self, dtype: tf.DType):
        self.graph = mtf.Graph()
        self.mesh = mtf.Mesh(self.graph, "mesh")
        self.dtype = dtype
        # Variables stay wide, as those of models do.
        self.kept = mtf.VariableDType(*[tf.float32 if dtype == tf.bfloat16 else dtype] * 2, dtype)

    def values(self, name: str, shape: list[int]) -> np.ndarray:
        return np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)

    def variable(self, name: str, dims: list, scale: float = 0.5) -> mtf.Tensor:
        shape = mtf.Shape(dims)
        values = self.values(name, shape.to_integer_list) * scale
        return mtf.get_variable(self.mesh, name, shape, dtype=self.kept,
                                initializer=tf.constant_initializer(values, self.kept.master_dtype))

    def input(self, name: str, dims: list) -> mtf.Tensor:
        shape = mtf.Shape(dims)
        values = tf.constant(self.values(name, shape.to_integer_list), self.dtype)
        return mtf.import_tf_tensor(self.mesh, values, shape)

    def labels(self, name: str, dims: list, classes: int, dtype: tf.DType = tf.int32) -> mtf.Tensor:
        shape = mtf.Shape(dims)
        values = np.random.default_rng(zlib.crc32(name.encode())).integers(0, classes, shape.to_integer_list)
        return mtf.import_tf_tensor(self.mesh, tf.constant(values, dtype), shape)


def dim(name: str, size: int) -> mtf.Dimension:
    return mtf.Dimension(name, size)


def cross_entropy(logits: mtf.Tensor, labels: mtf.Tensor, classes: mtf.Dimension) -> mtf.Tensor:
    targets = mtf.one_hot(labels, classes, dtype=logits.dtype)
    return mtf.reduce_mean(mtf.layers.softmax_cross_entropy_with_logits(logits, targets, classes))


def mlp(b: Builder) -> Net:
    batch, features, hidden, classes = dim("batch", 8), dim("features", 8), dim("hidden", 16), dim("classes", 8)
    x = b.input("x", [batch, features])
    h = mtf.relu(mtf.einsum([x, b.variable("w1", [features, hidden])], [batch, hidden]) + b.variable("b1", [hidden]))
    h = mtf.tanh(mtf.einsum([h, b.variable("w2", [hidden, dim("hidden2", 16)])], [batch, dim("hidden2", 16)]))
    logits = mtf.einsum([h, b.variable("w3", [dim("hidden2", 16), classes])], [batch, classes])
    return Net(b.graph, b.mesh, cross_entropy(logits, b.labels("y", [batch], 8), classes), [logits])


def cnn(b: Builder) -> Net:
    batch, h, w = dim("batch", 8), dim("h", 8), dim("w", 8)
    c0, c1, c2, classes = dim("c0", 4), dim("c1", 8), dim("c2", 8), dim("classes", 8)
    fh, fw = dim("fh", 3), dim("fw", 3)
    x = b.input("x", [batch, h, w, c0])
    y = ops.Conv2dOperation(x, b.variable("f1", [fh, fw, c0, c1], 0.2), [1, 1, 1, 1], "SAME").outputs[0]
    y = ops.PoolOperation(mtf.relu(y), (2, 2), (2, 2), "MAX_2D").outputs[0]
    y = ops.Conv2dOperation(y, b.variable("f2", [fh, fw, c1, c2], 0.2), [1, 1, 1, 1], "SAME").outputs[0]
    y = ops.PoolOperation(mtf.relu(y), (2, 2), (2, 2), "AVG_2D").outputs[0]
    y = ops.Conv2dTransposeOperation(
        y, b.variable("f3", [fh, fw, dim("c3", 4), c2], 0.2), [1, 2, 2, 1], "SAME").outputs[0]
    y = mtf.reshape(y, [batch, dim("flat", 64)])
    logits = mtf.einsum([y, b.variable("dense", [dim("flat", 64), classes])], [batch, classes])
    return Net(b.graph, b.mesh, cross_entropy(logits, b.labels("y", [batch], 8), classes), [logits])


def transformer(b: Builder) -> Net:
    batch, length, model = dim("batch", 4), dim("length", 4), dim("model", 8)
    heads, key, ff, vocabulary = dim("heads", 4), dim("key", 4), dim("ff", 16), dim("vocabulary", 16)
    memory = dim("memory", 4)
    tokens = b.labels("tokens", [batch, length], 16)
    x = mtf.gather(b.variable("embedding", [vocabulary, model]), tokens, vocabulary)

    def normalize(x: mtf.Tensor, name: str) -> mtf.Tensor:
        x -= mtf.reduce_mean(x, reduced_dim=model)
        variance = mtf.reduce_mean(mtf.square(x), reduced_dim=model)
        return x * mtf.rsqrt(variance + 1e-3) * b.variable(f"{name}/scale", [model])

    y = normalize(x, "norm1")
    q, k, v = (mtf.einsum([y, b.variable(name, [model, heads, key])], [batch, heads, length, key])
               for name in ("q", "k", "v"))
    k, v = (mtf.rename_dimension(t, "length", "memory") for t in (k, v))
    logits = mtf.einsum([q, k], [batch, heads, length, memory]) * 0.5
    mask = mtf.cast(mtf.less(mtf.range(b.mesh, length, tf.int32), mtf.range(b.mesh, memory, tf.int32),
                             output_shape=mtf.Shape([length, memory])), b.dtype) * -1e9
    weights = mtf.softmax(logits + mask, memory)
    y = mtf.einsum([weights, v], [batch, length, heads, key])
    x += mtf.einsum([y, b.variable("o", [heads, key, model])], [batch, length, model])
    y = mtf.relu(mtf.einsum([normalize(x, "norm2"), b.variable("ff1", [model, ff])], [batch, length, ff]))
    x += mtf.einsum([y, b.variable("ff2", [ff, model])], [batch, length, model])
    logits = mtf.einsum([x, b.variable("out", [model, vocabulary])], [batch, length, vocabulary])
    return Net(b.graph, b.mesh, cross_entropy(logits, b.labels("y", [batch, length], 16), vocabulary), [logits])


def _slicewise(x: mtf.Tensor, y: mtf.Tensor, batch: mtf.Dimension) -> mtf.Tensor:
    """A function that TensorFlow differentiates; features are not splittable, and y has no batch."""
    return mtf.slicewise(lambda x, y: tf.sin(x) * tf.reduce_sum(x, -1, keepdims=True) + y, [x, y],
                         output_shape=x.shape, splittable_dims=[batch])


def odd_shapes(b: Builder) -> Net:
    """Operations that change shapes: concat, split, stack, slice, pad, shift, reshapes that merge, split, rename."""
    batch, features = dim("batch", 8), dim("features", 8)
    w = b.variable("w", [batch, features])
    x = b.input("x", [batch, features]) * w
    left, right = mtf.split(x, features, [2, 6])
    y = mtf.concat([right, mtf.sin(left)], "features")
    y = mtf.stack([x, y, mtf.tanh(y), x * y], "pile", axis=1)
    first, *rest = mtf.unstack(y, dim("pile", 4))
    y = mtf.stack([*rest, first], "pile", axis=0)
    y = mtf.slice(y, 2, 4, "features")
    y = mtf.pad(y, [1, 3], "features")
    y = mtf.shift(y, 3, features, wrap=True) + mtf.shift(y, -1, batch, wrap=False)
    # Merge, split otherwise, exchange names, split an odd way.
    y = mtf.reshape(y, [dim("merged", 32), features])
    y = mtf.reshape(y, [dim("a", 16), dim("b", 4), dim("c", 4)])
    y = mtf.reshape(y, [dim("b", 16), dim("c", 4), dim("a", 4)])
    y = mtf.transpose(y, mtf.Shape([dim("c", 4), dim("b", 16), dim("a", 4)]))
    y = mtf.reshape(y, [dim("six", 16), dim("features", 2), dim("batch", 8)])
    y = mtf.broadcast(mtf.reduce_max(y, reduced_dim=dim("six", 16)),
                      mtf.Shape([dim("batch", 8), dim("extra", 4), dim("features", 2)]))
    y = mtf.rename_dimension(y, "extra", "six") * b.variable("v", [dim("six", 4)])
    y = mtf.cumsum(y, dim("six", 4)) + mtf.cumsum(y, dim("batch", 8), exclusive=True)
    # One dim name, two sizes.
    short = mtf.reshape(mtf.slice(x, 0, 4, "batch"), [dim("batch", 4), dim("features", 8)])
    loss = mtf.reduce_mean(mtf.square(y)) + mtf.reduce_sum(short) * 0.01
    return Net(b.graph, b.mesh, loss, [y])


def odd_functions(b: Builder) -> Net:
    """Loops, recompute, custom gradients, slicewise, top-k, one-hot of int64, broadcasts, minima, dependencies."""
    batch, features, hidden = dim("batch", 8), dim("features", 8), dim("hidden", 8)
    x = b.input("x", [batch, features]) * b.variable("scale", [features])
    y = _slicewise(x, b.variable("shift", [features]), batch)

    def recomputed(t: mtf.Tensor) -> mtf.Tensor:
        t = mtf.einsum([t, b.variable("r", [features, hidden])], [batch, hidden])
        return mtf.sigmoid(t)

    y = mtf.recompute_grad(recomputed, [y])
    y = mtf.custom_gradient(lambda t: mtf.sign(t) * t,
                            lambda explicit_inputs, output_grads, **_: [output_grads[0] * 0.5], [y])
    top, index = mtf.top_k(y, hidden, dim("k", 5))
    one, which = mtf.top_k(y, hidden, dim("one", 1))
    best, best_index = mtf.top_1(y, hidden)
    chosen = mtf.gather(b.variable("table", [dim("rows", 8), features]), index, dim("rows", 8))
    words = mtf.one_hot(b.labels("words", [batch], 8, tf.int64), dim("rows", 8), dtype=b.dtype)
    chosen += mtf.einsum([words, b.variable("table2", [dim("rows", 8), features])], [batch, features])
    small = mtf.minimum(mtf.maximum(y, 0.2), mtf.reduce_min(y, reduced_dim=batch) + 0.5)
    constant = mtf.stop_gradient(y) * mtf.random_uniform(b.mesh, mtf.Shape([batch]), dtype=b.dtype) * 0.0
    counts = mtf.import_tf_tensor(b.mesh, tf.constant(0), [])

    def condition(count: mtf.Tensor, *_: mtf.Tensor) -> mtf.Tensor:
        return mtf.less(count, 3)

    def body(count: mtf.Tensor, state: mtf.Tensor, _: mtf.Tensor) -> list[mtf.Tensor]:
        state = mtf.einsum([state, outside], [batch, dim("next", 8)])
        state = mtf.rename_dimension(state, "next", "hidden") * 0.1
        return [count + 1, mtf.tanh(state), mtf.reduce_sum(state)]

    outside = b.variable("loop", [hidden, dim("next", 8)])
    zero = mtf.zeros(b.mesh, [], b.dtype)
    looped = mtf.while_loop(condition, body, [counts, y, zero])

    def add(count: mtf.Tensor) -> list[mtf.Tensor]:
        part = mtf.einsum([y, y], [hidden]) * mtf.cast(count, b.dtype)
        return [count + 1, mtf.reduce_sum(y * y, output_shape=mtf.Shape([hidden])), part]

    sums = mtf.while_loop(condition, add, [counts], has_accumulators=True)
    product = mtf.einsum([y, b.variable("left", [hidden, dim("i", 4)]), b.variable("right", [dim("i", 4), features])],
                         [batch, features])
    outer = mtf.einsum([mtf.reduce_sum(y, reduced_dim=hidden), best], [batch, ]) + mtf.reduce_mean(y)
    whole = mtf.reduce_sum(mtf.einsum([best, y], mtf.Shape([batch, hidden, dim("new", 2)])))
    loss = (mtf.reduce_sum(top) + mtf.reduce_mean(mtf.square(chosen)) + mtf.reduce_mean(small * mtf.range(
        b.mesh, hidden, b.dtype)) + mtf.reduce_sum(constant) + mtf.reduce_mean(product) + mtf.reduce_mean(outer)
        + mtf.reduce_sum(one) + whole * 0.1)
    loss = mtf.depend(loss, [looped[1]])
    real = [mtf.cast(t, b.dtype) for t in (index, which, best_index)]
    return Net(b.graph, b.mesh, loss, [*looped[1:], *sums[1:], small, *real])


def microbatches(b: Builder, splits: int = 2, *, unrolled: bool = False, errors: bool = True) -> Net:
    """A perceptron that is trained on one part of its batch after another: in a loop, or one by one without any.

    Args:
      b: makes it.
      splits: of the batch.
      unrolled: one by one.
      errors: the loop also returns the error of every example.
    """
    batch, features, hidden, classes = dim("batch", 16), dim("features", 8), dim("hidden", 16), dim("classes", 8)
    w1, w2 = b.variable("w1", [features, hidden]), b.variable("w2", [hidden, classes])
    bias = b.variable("bias", [hidden])
    part, number = dim("batch", batch.size // splits), dim("microbatch", splits)
    data = {"x": b.input("x", [batch, features]), "wanted": b.input("wanted", [batch, classes])}

    def model(part_of: dict[str, mtf.Tensor]) -> dict[str, mtf.Tensor]:
        state = mtf.relu(mtf.einsum([part_of["x"], w1], [part, hidden]) + bias)
        made = mtf.softmax(mtf.einsum([state, w2], [part, classes]), classes)
        error = mtf.square(made - part_of["wanted"])
        found = {"loss": mtf.reduce_mean(error)}
        return {**found, "errors": mtf.reduce_sum(error, reduced_dim=classes)} if errors else found

    if not unrolled:
        gradients, made = mtf.serialize_training_step(data, model, batch, splits)
        return Net(b.graph, b.mesh, made["loss"], [made["errors"]] if errors else [], gradients=gradients)
    losses, each = [], []
    for index in range(splits):
        chosen = mtf.constant(b.mesh, index, dtype=tf.int32)
        made = model({key: mtf.gather(mtf.replace_dimensions(tensor, batch, [part, number]), chosen, number)
                      for key, tensor in data.items()})
        losses.append(made["loss"])
        each.append(mtf.gradients(losses[-1:], [variable.outputs[0] for variable in b.graph.trainable_variables]))
    total = [mtf.add_n(list(same)) for same in zip(*each, strict=True)]
    return Net(b.graph, b.mesh, mtf.add_n(losses), gradients=total)


def embeddings(b: Builder) -> Net:
    """Tables of which few rows are looked up: one alone, one twice, one that is the output's weights, too. Some indices
    are beyond a table: what is looked up there is zeros."""
    batch, length, model, words = dim("batch", 8), dim("length", 4), dim("model", 8), dim("words", 64)
    tokens, others = b.labels("tokens", [batch, length], 80), b.labels("others", [batch, length], 64, tf.int64)
    alone, twice, tied = (b.variable(name, [words, model]) for name in ("alone", "twice", "tied"))
    across = b.variable("across", [model, words])
    x = mtf.gather(alone, tokens, words) * mtf.gather(twice, tokens, words) + mtf.gather(across, others - 8, words)
    x += mtf.gather(twice, others, words) * mtf.gather(tied, others, words)
    logits = mtf.einsum([mtf.tanh(x), tied], [batch, length, words])
    return Net(b.graph, b.mesh, cross_entropy(logits, b.labels("wanted", [batch, length], 64), words), [logits])


def large_sums(b: Builder) -> Net:
    """A sum, maxima and minima over the batch, of so many elements that they go round a ring of three."""
    batch, rows, columns = dim("batch", 6), dim("rows", 128), dim("columns", 160)
    x = b.input("x", [batch, rows, columns]) * b.variable("scale", [rows, columns])
    made = [reduced(x, reduced_dim=batch) for reduced in (mtf.reduce_sum, mtf.reduce_max, mtf.reduce_min)]
    return Net(b.graph, b.mesh, mtf.add_n([mtf.reduce_mean(mtf.square(one)) for one in made]), made)


def wide(b: Builder) -> Net:
    """A perceptron with a weight that Adafactor keeps the means of rows and columns of, and others that it does not."""
    batch, features, hidden, classes = dim("batch", 8), dim("features", 128), dim("hidden", 128), dim("classes", 8)
    x = mtf.einsum([b.input("x", [batch, features]), b.variable("w1", [features, hidden], 0.05)], [batch, hidden])
    logits = mtf.einsum([mtf.tanh(x + b.variable("b1", [hidden])), b.variable("w2", [hidden, classes])],
                        [batch, classes])
    return Net(b.graph, b.mesh, cross_entropy(logits, b.labels("y", [batch], 8), classes), [logits])


def noisy(b: Builder) -> Net:
    """A layer that is multiplied by random numbers, which follow the step."""
    batch, features, hidden = dim("batch", 8), dim("features", 8), dim("hidden", 16)
    h = mtf.tanh(mtf.einsum([b.input("x", [batch, features]), b.variable("w1", [features, hidden])], [batch, hidden]))
    h *= mtf.random_uniform(b.mesh, mtf.Shape([batch, hidden]), dtype=b.dtype)
    return Net(b.graph, b.mesh, mtf.reduce_mean(mtf.square(h)), [h],
               global_step=tf.train.get_or_create_global_step())


NETS: dict[str, Callable[[Builder], Net]] = {
    "mlp": mlp, "cnn": cnn, "transformer": transformer, "odd_shapes": odd_shapes, "odd_functions": odd_functions,
    "microbatches": microbatches}

OTHERS: dict[str, Callable[[Builder], Net]] = {"embeddings": embeddings, "large_sums": large_sums,
                                              "wide": wide, "noisy": noisy}
"""Nets for what some tests are of."""


class ExactAdam(mtf.optimize.AdamWeightDecayOptimizer):
    """Mesh-TF's Adam, with slots of the variable's own dtype (Mesh-TF's are always float32)."""

    def apply_grad(self, grad: mtf.Tensor, var: mtf.Variable) -> list[mtf.Operation]:
        if grad is None:
            return []
        m, v = (mtf.get_variable(var.mesh, f"{var.name}/adam_{slot}", var.shape, dtype=grad.dtype,
                                 initializer=tf.zeros_initializer(), trainable=False) for slot in "mv")
        next_m = self.beta_1 * m + (1.0 - self.beta_1) * grad
        next_v = self.beta_2 * v + (1.0 - self.beta_2) * mtf.square(grad)
        update = next_m / (mtf.sqrt(next_v) + self.epsilon)
        return [mtf.assign_sub(var, self.learning_rate * update), mtf.assign(m, next_m), mtf.assign(v, next_v)]


class Writing(mtf.optimize.SgdOptimizer):
    """SGD by another assignment than that of a difference."""

    def __init__(self, learning_rate: float, assignment: Callable[..., mtf.Operation]):
        super().__init__(learning_rate)
        self._assignment = assignment

    def apply_grad(self, grad: mtf.Tensor, var: mtf.Variable) -> list[mtf.Operation]:
        step = grad * -self.lr
        return [self._assignment(var, var.value + step if self._assignment is mtf.assign else step)]


def build(name: str, optimizer: str, dtype: tf.DType) -> Net:
    """A net with its gradients and updates, in the current tf.Graph."""
    net = (NETS | OTHERS)[name](Builder(dtype))
    variables = net.graph.trainable_variables
    gradients = net.gradients or mtf.gradients([net.loss], [variable.outputs[0] for variable in variables])
    rule = {
        "sgd": lambda: mtf.optimize.SgdOptimizer(0.05),
        "assign": lambda: Writing(0.05, mtf.assign),
        "assign_add": lambda: Writing(0.05, mtf.assign_add),
        "adam": lambda: (mtf.optimize.AdamWeightDecayOptimizer if dtype == tf.float32 else ExactAdam)(0.01),
        "adafactor": lambda: mtf.optimize.AdafactorOptimizer(learning_rate=0.01, decay_rate=0.8),
    }[optimizer]()
    net.updates = rule.apply_grads(gradients, variables)
    return net


def train_net(name: str, optimizer: str, dtype: tf.DType, rule: harness.LoweringRule, steps: int = 3,
              ) -> harness.Trained:
    """Trains a net in a graph of its own, from the same initial values under every lowering."""
    with tf.Graph().as_default():
        net = build(name, optimizer, dtype)
        return harness.train(net, rule(net), [{}] * steps, outputs=net.outputs)


@functools.cache
def one_device(name: str, optimizer: str, dtype: tf.DType, steps: int = 3) -> harness.Trained:
    """What stock Mesh-TensorFlow makes of `train_net` on one device; computed once in a process."""
    return train_net(name, optimizer, dtype, harness.stock(), steps)


def random_spec(operation: mtf.Operation, devices: int, rng: np.random.Generator, first: bool = False) -> MeshSpec:
    """A random mesh for an operation: some devices in some order, some axes, dims that it can split on some of them."""
    size = int(rng.choice([n for n in range(1, devices + 1) if devices % n == 0]))
    numbers = np.arange(size) if first else rng.permutation(devices)[:size]
    factors, rest = [], size
    while rest > 1:
        factor = int(rng.choice([n for n in range(2, rest + 1) if rest % n == 0]))
        factors.append(factor)
        rest //= factor
    sizes: dict[str, list[int]] = {}
    for tensor in (*operation.inputs, *operation.outputs):
        for d in tensor.shape.dims:
            sizes.setdefault(d.name, []).append(d.size)
    names = sorted(splittable_dims(operation) & set(sizes))
    axes = []
    for factor in factors:
        fitting = [name for name in names if math.gcd(*sizes[name]) % factor == 0]
        if fitting and rng.random() < 0.85:
            name = str(rng.choice(fitting))
            names.remove(name)
            axes.append((frozenset({name}), factor))
        else:
            axes.append((frozenset(), factor))
    return MeshSpec(tuple(axes), tuple(int(number) for number in numbers))


def random_plan(graph: mtf.Graph, devices: int, seed: int) -> dict[mtf.Operation, MeshSpec]:
    """A random mesh for every operation of a graph, and for those in its loops."""
    rng = np.random.default_rng(seed)
    first = bool(rng.integers(2))
    return {operation: random_spec(operation, devices, rng, first) for operation in all_operations(graph)}
