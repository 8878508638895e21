"""Small programs of our own that do what real ones do and models of a textbook do not.

Operation classes of their own, functions of slices over grids of blocks, transforms by transposition, loops over
microbatches, recomputation, dims without a name, one name with several sizes, graphs without a training step, graphs
that are built for one layout. One table, a function per program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.programs import own_operations
from benchmarks.programs.program import Inputs, Program, gradients_and_updates
from pase_mtf.compat import mtf, tf

__all__ = ["SMALL", "Entry", "build", "own_layout"]

_D = mtf.Dimension


class _Given(NamedTuple):
    """What a program is built from.

    Attributes:
      mesh: it stands on this one.
      inputs: makes its placeholders.
      size: of everything, by name.
      parts: dim name -> number of parts under the layout it is built for.
    """

    mesh: mtf.Mesh
    inputs: Inputs
    size: dict[str, int]
    parts: Callable[[str], int]

    def dims(self, *names: str) -> list[mtf.Dimension]:
        return [_D(name, self.size[name]) for name in names]

    def normal(self, name: str, dims: Sequence[mtf.Dimension]) -> mtf.Tensor:
        return self.inputs.tensor(self.mesh, name, dims, dtype=tf.float32)

    def variable(self, name: str, dims: Sequence[mtf.Dimension]) -> mtf.Tensor:
        scale = dims[0].size ** -0.5
        return mtf.get_variable(self.mesh, name, mtf.Shape(list(dims)),
                                initializer=tf.random_normal_initializer(stddev=scale))


@dataclasses.dataclass(frozen=True)
class Entry:
    """A program.

    Attributes:
      loss: builds it, and returns a scalar, or (scalar, updates) where it makes its own.
      full, reduced: sizes.
      own: mesh shape and layout rules that its owner runs it with, on 8 devices.
      train: whether it is trained; else it is run forward only.
    """

    loss: Callable[[_Given], Any]
    full: dict[str, int]
    reduced: dict[str, int]
    own: tuple[str, str] = ("", "")
    train: bool = True


# -- operations of their own ------------------------------------------------------------------------------------------
def _own_sum(given: _Given) -> mtf.Tensor:
    """A layer whose statistics are made by an operation that sums."""
    batch, width, hidden = given.dims("batch", "width", "hidden")
    x = given.normal("x", [batch, width])
    for number in range(given.size["layers"]):
        h = mtf.relu(mtf.einsum([x, given.variable(f"in_{number}", [width, hidden])], [batch, hidden]))
        energy = own_operations.sum_of_squares(h, hidden) / hidden.size
        h *= mtf.rsqrt(energy + 1.0)
        x += mtf.einsum([h, given.variable(f"out_{number}", [hidden, width])], [batch, width])
    return mtf.reduce_mean(mtf.square(x))


def _own_pad(given: _Given) -> mtf.Tensor:
    """Images in periodic boxes: an operation that pads, before every convolution."""
    batch, row, col, channels = given.dims("batch", "row", "col", "channels")
    x = given.normal("x", [batch, row, col, channels])
    for number in range(given.size["layers"]):
        padded = own_operations.wrap_pad(own_operations.wrap_pad(x, row, 1), col, 1)
        new = channels if number % 2 else _D("features", channels.size)
        x = mtf.relu(mtf.layers.conv2d(padded, new, filter_size=(3, 3), padding="VALID", name=f"filter_{number}"))
    return mtf.reduce_mean(mtf.square(x))


def _own_gradient(given: _Given) -> mtf.Tensor:
    """Weights rounded to a few bits in an operation whose gradient lets through what is not clipped."""
    batch, width, hidden = given.dims("batch", "width", "hidden")
    x = given.normal("x", [batch, width])
    for number in range(given.size["layers"]):
        inner = own_operations.quantize(given.variable(f"in_{number}", [width, hidden]))
        outer = own_operations.quantize(given.variable(f"out_{number}", [hidden, width]))
        x += mtf.einsum([mtf.relu(mtf.einsum([x, inner], [batch, hidden])), outer], [batch, width])
    return mtf.reduce_mean(mtf.square(x))


def _own_summary(given: _Given) -> mtf.Tensor:
    """A perceptron that watches its activations by an operation of its own, which passes them on."""
    batch, width, hidden = given.dims("batch", "width", "hidden")
    x = given.normal("x", [batch, width])
    for number in range(given.size["layers"]):
        h = own_operations.watch(mtf.relu(mtf.einsum(
            [x, given.variable(f"in_{number}", [width, hidden])], [batch, hidden])))
        x += mtf.einsum([h, given.variable(f"out_{number}", [hidden, width])], [batch, width])
    return mtf.reduce_mean(mtf.square(x))


# -- space in blocks --------------------------------------------------------------------------------------------------
def _blocks(given: _Given) -> mtf.Tensor:
    """A field in blocks of space: halo exchange, a stencil on every block by a function of slices, many steps."""
    batch, rows, cols, height, width = given.dims("batch", "row_blocks", "col_blocks", "height", "width")
    x = given.normal("field", [batch, rows, cols, height, width])
    strength = given.variable("strength", [_D("steps", given.size["steps"])])

    def stencil(field: tf.Tensor) -> tf.Tensor:
        inner = field[:, :, :, 1:-1, 1:-1]
        around = (field[:, :, :, :-2, 1:-1] + field[:, :, :, 2:, 1:-1] + field[:, :, :, 1:-1, :-2]
                  + field[:, :, :, 1:-1, 2:])
        return around - 4.0 * inner

    for rate in mtf.unstack(strength, strength.shape.dims[0]):
        wide = mtf.halo_exchange(x, rows, height, 1, wrap=True)
        wide = mtf.halo_exchange(wide, cols, width, 1, wrap=True)
        change = mtf.slicewise(stencil, [wide], x.shape, x.dtype, splittable_dims=[batch, rows, cols])
        x += 0.1 * mtf.multiply(rate, change, output_shape=x.shape)
    return mtf.reduce_mean(mtf.square(x))


def _joined_blocks(given: _Given) -> mtf.Tensor:
    """A field in blocks, joined to a whole one by a function of slices that takes every device to hold one block."""
    rows, cols = _D("nx_block", given.size["rows"]), _D("ny_block", given.size["cols"])
    batch, depth = given.dims("batch", "nz")
    height, width = _D("sx", given.size["nx"] // rows.size), _D("sy", given.size["ny"] // cols.size)
    whole = mtf.Shape([batch, _D("nx", given.size["nx"]), _D("ny", given.size["ny"]), depth])
    x = given.normal("field", [batch, rows, cols, height, width, depth])
    x *= given.variable("strength", [depth])
    joined = mtf.slicewise(lambda field: field[:, 0, 0], [x], whole, x.dtype,
                           splittable_dims=[batch, rows, cols, *whole.dims[1:3]])
    new = _D("new_nz", depth.size)
    for number in range(given.size["layers"]):
        mixed = mtf.einsum([mtf.tanh(joined), given.variable(f"mix_{number}", [depth, new])], reduced_dims=[depth])
        joined += mtf.rename_dimension(mixed, new.name, depth.name)
    return mtf.reduce_mean(mtf.square(joined))


def _blocks_of_layout(given: _Given) -> mtf.Tensor:
    """As many blocks as the layout has devices for them: the graph is built for one layout."""
    rows, cols = (_D(name, max(1, given.parts(name))) for name in ("row_blocks", "col_blocks"))
    batch, = given.dims("batch")
    height, width = _D("height", given.size["rows"] // rows.size), _D("width", given.size["cols"] // cols.size)
    image = mtf.Shape([batch, _D("rows", given.size["rows"]), _D("cols", given.size["cols"])])
    x = mtf.reshape(given.normal("field", image.dims), [batch, rows, height, cols, width])
    x = mtf.transpose(x, [batch, rows, cols, height, width])
    scale = given.variable("scale", [_D("steps", given.size["steps"])])
    for rate in mtf.unstack(scale, scale.shape.dims[0]):
        wide = mtf.halo_exchange(x, rows, height, 1, wrap=True)
        smooth = mtf.slicewise(lambda field: (field[:, :, :, :-2] + field[:, :, :, 2:]) / 2.0, [wide], x.shape,
                               x.dtype, splittable_dims=[batch, rows, cols, width])
        x = mtf.tanh(x + mtf.multiply(rate, smooth, output_shape=x.shape))
    return mtf.reduce_mean(mtf.square(x))


def _fourier(given: _Given) -> mtf.Tensor:
    """A three-dimensional Fourier transform: along one dim at a time, which no device may hold a part of then."""
    batch, *axes = given.dims("batch", "x", "y", "z")
    spectral = [_D(f"k{dim.name}", dim.size) for dim in axes]
    field = given.normal("field", [batch, *axes])
    weight = given.variable("weight", axes)
    real, imaginary = field * weight, mtf.zeros_like(field)
    for dim, new in zip(reversed(axes), reversed(spectral), strict=True):
        # The dim that is transformed comes last; the others may be split.
        others = [other for other in real.shape.dims if other != dim]
        before = mtf.Shape([*others, dim])
        after = mtf.Shape([*others, new])
        real, imaginary = mtf.transpose(real, before), mtf.transpose(imaginary, before)
        real, imaginary = mtf.slicewise(
            own_operations.fourier_parts, [real, imaginary], [after, after], [real.dtype] * 2, splittable_dims=others)
    power = mtf.square(real) + mtf.square(imaginary)
    return mtf.reduce_mean(mtf.log(power + 1.0))


# -- loops and recomputation ------------------------------------------------------------------------------------------
def _residual_stack(given: _Given, x: mtf.Tensor, *, recompute: bool) -> mtf.Tensor:
    width, hidden = given.dims("width", "hidden")

    def block(number: int) -> Callable[[mtf.Tensor], mtf.Tensor]:
        def run(x: mtf.Tensor) -> mtf.Tensor:
            h = mtf.relu(mtf.einsum([x, given.variable(f"in_{number}", [width, hidden])], reduced_dims=[width]))
            return x + mtf.einsum([h, given.variable(f"out_{number}", [hidden, width])], reduced_dims=[hidden])
        return run

    for number in range(given.size["layers"]):
        x = mtf.recompute_grad(block(number), [x]) if recompute else block(number)(x)
    return mtf.reduce_mean(mtf.square(x))


def _recompute(given: _Given) -> mtf.Tensor:
    """Every layer's activations computed once more in the backward pass."""
    return _residual_stack(given, given.normal("x", given.dims("batch", "width")), recompute=True)


def _in_microbatches(given: _Given, *, recompute: bool) -> tuple[mtf.Tensor, list[mtf.Operation]]:
    batch, width = given.dims("batch", "width")
    splits = given.size["microbatches"]

    def model(features: dict[str, mtf.Tensor]) -> dict[str, mtf.Tensor]:
        return {"loss": _residual_stack(given, features["x"], recompute=recompute) / splits}

    gradients, outputs = mtf.serialize_training_step({"x": given.normal("x", [batch, width])}, model, batch, splits)
    updates = mtf.optimize.AdamWeightDecayOptimizer(1e-3).apply_grads(gradients, given.mesh.graph.trainable_variables)
    return outputs["loss"], updates


def _microbatches(given: _Given) -> Any:
    """Forward and backward of a microbatch in one loop."""
    return _in_microbatches(given, recompute=False)


def _microbatches_recompute(given: _Given) -> Any:
    """Both together."""
    return _in_microbatches(given, recompute=True)


def _recurrent(given: _Given) -> mtf.Tensor:
    """A state that goes around a loop, forward only."""
    batch, width = given.dims("batch", "width")
    weight = given.variable("weight", [width, _D("new_width", width.size)])

    def body(step: mtf.Tensor, state: mtf.Tensor) -> list[mtf.Tensor]:
        new = mtf.tanh(mtf.einsum([state, weight], reduced_dims=[width]))
        return [step + 1, mtf.rename_dimension(new, "new_width", "width")]

    start = [mtf.constant(given.mesh, 0, dtype=tf.int32), given.normal("x", [batch, width])]
    _, state = mtf.while_loop(lambda step, state: mtf.less(step, given.size["steps"]), body, start)
    return mtf.reduce_mean(mtf.square(state))


# -- names ------------------------------------------------------------------------------------------------------------
def _anonymous(given: _Given) -> mtf.Tensor:
    """A classifier whose last activations lose their dims' names before they are compared."""
    batch, width, hidden, classes = given.dims("batch", "width", "hidden", "classes")
    x = given.normal("x", [batch, width])
    h = mtf.layers.dense(x, hidden, activation=mtf.relu, name="hidden")
    logits = mtf.layers.dense(h, classes, name="logits")
    wanted = given.inputs.tensor(given.mesh, "labels", [batch], below=classes.size)
    loss = mtf.layers.softmax_cross_entropy_with_logits(logits, mtf.one_hot(wanted, classes), classes)
    spread = mtf.anonymize(logits)
    return mtf.reduce_mean(loss) + 1e-3 * mtf.reduce_mean(mtf.square(spread))


def _one_name(given: _Given) -> mtf.Tensor:
    """A perceptron that calls every layer's width alike, whatever its size."""
    batch = given.dims("batch")[0]
    x = given.normal("x", [batch, _D("width", given.size["width"])])
    for number, factor in enumerate((4, 2, 6, 1)):
        new = _D("next_width", factor * given.size["width"])
        x = mtf.layers.dense(x, new, activation=mtf.relu, name=f"layer_{number}")
        x = mtf.rename_dimension(x, "next_width", "width")
    return mtf.reduce_mean(mtf.square(x))


# -- no training step, or more than one -------------------------------------------------------------------------------
def _forward_only(given: _Given) -> mtf.Tensor:
    """Answers of a trained classifier, and how sure it is."""
    batch, width, hidden, classes = given.dims("batch", "width", "hidden", "classes")
    x = given.normal("x", [batch, width])
    for number in range(given.size["layers"]):
        h = mtf.layers.dense(x, hidden, activation=mtf.relu, name=f"in_{number}")
        x = mtf.layers.dense(h, width, name=f"out_{number}")
    logits = mtf.layers.dense(x, classes, name="logits")
    answers = mtf.one_hot(mtf.argmax(logits, classes), classes)
    return mtf.reduce_mean(mtf.reduce_sum(answers * mtf.softmax(logits, classes), reduced_dim=classes))


def _adversaries(given: _Given) -> tuple[mtf.Tensor, list[mtf.Operation]]:
    """Two networks with a loss and an optimizer each."""
    batch, noise, width, hidden = given.dims("batch", "noise", "width", "hidden")

    def critic(x: mtf.Tensor) -> mtf.Tensor:
        with tf.variable_scope("critic", reuse=tf.AUTO_REUSE):
            h = mtf.layers.dense(x, hidden, activation=mtf.relu, name="in")
            return mtf.reduce_mean(mtf.layers.dense(h, _D("score", 1), name="out"))

    with tf.variable_scope("maker"):
        h = mtf.layers.dense(given.normal("noise", [batch, noise]), hidden, activation=mtf.relu, name="in")
        made = mtf.layers.dense(h, width, name="out")
    fooled = critic(made)
    losses = {"critic": fooled - critic(given.normal("x", [batch, width])), "maker": -fooled}
    updates: list[mtf.Operation] = []
    for scope, loss in losses.items():
        variables = [variable for variable in given.mesh.graph.trainable_variables if variable.name.startswith(scope)]
        gradients = mtf.gradients([loss], [variable.outputs[0] for variable in variables])
        updates += mtf.optimize.SgdOptimizer(1e-2).apply_grads(gradients, variables)
    return losses["critic"], updates


_PERCEPTRON = {"batch": 8192, "width": 2048, "hidden": 8192, "layers": 8}
_TINY = {"batch": 16, "width": 8, "hidden": 16, "layers": 2}

SMALL: dict[str, Entry] = {
    "own_sum": Entry(_own_sum, _PERCEPTRON, _TINY, ("rows:2;cols:4", "batch:rows;hidden:cols")),
    "own_pad": Entry(_own_pad, {"batch": 64, "row": 256, "col": 256, "channels": 64, "layers": 12},
                     {"batch": 8, "row": 8, "col": 8, "channels": 8, "layers": 2}, ("all:8", "batch:all")),
    "own_gradient": Entry(_own_gradient, _PERCEPTRON, _TINY, ("rows:4;cols:2", "batch:rows;hidden:cols")),
    "own_summary": Entry(_own_summary, _PERCEPTRON, _TINY, ("all:8", "batch:all")),
    "blocks": Entry(_blocks, {"batch": 4, "row_blocks": 8, "col_blocks": 8, "height": 256, "width": 256, "steps": 16},
                    {"batch": 2, "row_blocks": 4, "col_blocks": 4, "height": 4, "width": 4, "steps": 2},
                    ("rows:2;cols:4", "row_blocks:rows;col_blocks:cols")),
    "joined_blocks": Entry(_joined_blocks, {"batch": 4, "rows": 2, "cols": 4, "nx": 512, "ny": 512, "nz": 128,
                                            "layers": 4},
                           {"batch": 2, "rows": 2, "cols": 4, "nx": 8, "ny": 8, "nz": 4, "layers": 1},
                           ("rows:2;cols:4", "nx:rows;nx_block:rows;ny:cols;ny_block:cols")),
    "blocks_of_layout": Entry(_blocks_of_layout, {"batch": 4, "rows": 4096, "cols": 4096, "steps": 16},
                              {"batch": 2, "rows": 16, "cols": 16, "steps": 2},
                              ("rows:2;cols:4", "row_blocks:rows;col_blocks:cols")),
    "fourier": Entry(_fourier, {"batch": 2, "x": 256, "y": 256, "z": 256}, {"batch": 2, "x": 8, "y": 8, "z": 8},
                     ("rows:2;cols:4", "batch:rows")),
    "recompute": Entry(_recompute, _PERCEPTRON, _TINY, ("all:8", "batch:all")),
    "microbatches": Entry(_microbatches, {**_PERCEPTRON, "microbatches": 8}, {**_TINY, "microbatches": 2},
                          ("all:8", "batch:all")),
    "microbatches_recompute": Entry(_microbatches_recompute, {**_PERCEPTRON, "microbatches": 8},
                                    {**_TINY, "microbatches": 2}, ("all:8", "batch:all")),
    "recurrent": Entry(_recurrent, {"batch": 4096, "width": 4096, "steps": 32}, {"batch": 16, "width": 8, "steps": 3},
                       ("all:8", "batch:all"), train=False),
    "anonymous": Entry(_anonymous, {"batch": 8192, "width": 1024, "hidden": 8192, "classes": 8192},
                       {"batch": 16, "width": 8, "hidden": 16, "classes": 8},
                       ("rows:4;cols:2", "batch:rows;hidden:cols")),
    "one_name": Entry(_one_name, {"batch": 8192, "width": 2048}, {"batch": 16, "width": 8},
                      ("rows:4;cols:2", "batch:rows;width:cols")),
    "forward_only": Entry(_forward_only, {**_PERCEPTRON, "classes": 8192}, {**_TINY, "classes": 8},
                          ("rows:4;cols:2", "batch:rows;hidden:cols"), train=False),
    "adversaries": Entry(_adversaries, {"batch": 4096, "noise": 128, "width": 4096, "hidden": 8192},
                         {"batch": 16, "noise": 8, "width": 8, "hidden": 16}, ("all:8", "batch:all")),
}
"""Name -> program."""


def own_layout(entry: Entry, devices: int) -> tuple[str, str] | None:
    """What its owner runs it with on 8 devices; on others, nobody knows."""
    return entry.own if devices == 8 else None


def build(name: str, size: str = "reduced", mesh_shape: Any = None, layout: Any = None) -> Program:
    """The program, in the current tf.Graph.

    Args:
      name: of SMALL.
      size: "full" or "reduced".
      mesh_shape, layout: what a program that is built for a layout is built for; default: one device.
    """
    entry = SMALL[name]
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh", mtf.utils.BalancedVariablePlacer(["/device:CPU:0"]))
    mesh_shape, rules = mtf.convert_to_shape(
        "" if mesh_shape is None else mesh_shape), mtf.convert_to_layout_rules("" if layout is None else layout)
    inputs = Inputs()

    def parts(dim: str) -> int:
        return mtf.tensor_dim_to_mesh_dim_size(rules, mesh_shape, _D(dim, 1))

    made = entry.loss(_Given(mesh, inputs, entry.full if size == "full" else entry.reduced, parts))
    global_step = tf.train.get_or_create_global_step()
    loss, updates = made if isinstance(made, tuple) else (made, [])
    if not updates and entry.train:
        updates = gradients_and_updates(loss, mtf.optimize.SgdOptimizer(1e-2))
    return Program(f"{name}_{size}", graph, mesh, inputs.placeholders, inputs.features, loss, updates, global_step)
