"""Two dims that have to share an axis: because the caller says so, or because nothing else lowers."""

import numpy as np
import pytest
from harness import MACHINE, device_names, read_before_updating, session

from benchmarks import programs
from pase_mtf.compat import mtf, placement_mesh_impl, tf
from pase_mtf.errors import InfeasibleError, UsageError
from pase_mtf.export.exporter import export_graph
from pase_mtf.layout.find import find_layout
from pase_mtf.lowering.lowering import lower
from pase_mtf.machine.machine import Link, Machine
from pase_mtf.operations.joined import Joined, joined_dims
from pase_mtf.strategy.find import find_strategy

_RATES = dict.fromkeys(("matmul", "convolution", "pointwise", "reduction", "gather"), 1e6)
FLAT = Machine("flat", _RATES, 1e7, 1e12, 1e-6, (Link(64, 1e7, 1e-7),))
ROWS, COLS, SX, SY = (mtf.Dimension(*dim) for dim in (("nx_block", 2), ("ny_block", 4), ("sx", 8), ("sy", 4)))
X, Y = mtf.Dimension("nx", 16), mtf.Dimension("ny", 16)


def slicewise(function, given, made, splittable):
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        x = mtf.import_tf_tensor(mesh, tf.zeros(mtf.Shape(given).to_integer_list), mtf.Shape(given))
        return mtf.slicewise(function, [x], mtf.Shape(made), x.dtype, splittable_dims=splittable).operation


@pytest.mark.parametrize(("function", "given", "made", "splittable", "joined"), [
    (lambda t: t[0, 0], [ROWS, COLS, SX, SY], [X, Y], [ROWS, COLS, X, Y],
     {("nx_block", "nx", 2), ("ny_block", "ny", 4)}),
    (lambda t: t[0], [ROWS, SX, SY], [X, SY], [ROWS, X, SY], {("nx_block", "nx", 2)}),
    (lambda t: t[None, None], [X, Y], [ROWS, COLS, SX, SY], [ROWS, COLS, X, Y],
     {("nx", "nx_block", 2), ("ny", "ny_block", 4)}),
    # Fits by itself; nothing that is declared splittable makes it fit; does not fit at all.
    (lambda t: tf.reshape(t, [-1]), [ROWS, SX], [X], [ROWS, X], set()),
    (lambda t: t[0, 0], [ROWS, COLS, SX, SY], [X, Y], [SX], set()),
    (lambda t: t[0, 0, 0], [ROWS, COLS, SX, SY], [X, Y], [ROWS, COLS, X, Y], set()),
])
def test_functions_that_fit_only_together(function, given, made, splittable, joined):
    assert set(joined_dims(slicewise(function, given, made, splittable))) == {Joined(*entry) for entry in joined}


def test_a_program_that_joins_blocks_is_laid_out_as_its_owner_does():
    with tf.Graph().as_default():
        program = programs.build("joined_blocks", "reduced")
        found = find_layout(program.graph, 8, program.outputs, FLAT)
        own = ";".join(programs.own_layout("joined_blocks", 8))
        compared = find_layout(program.graph, 8, program.outputs, FLAT, compare=[own, "a:2;b:4;nx:a;ny:b"]).compared
    rules = dict(rule.split(":") for rule in found.layout_rules.split(";"))
    assert rules["nx"] == rules["nx_block"] != rules["ny"] == rules["ny_block"]
    assert not compared[0].problem
    assert found.seconds <= compared[0].seconds
    assert "lowers only with nx_block and nx together on an axis of 2" in compared[1].problem


def _under(mesh_shape, rules):
    impl = placement_mesh_impl.PlacementMeshImpl(mesh_shape, rules, device_names(8))
    return lambda program: mtf.Lowering(program.graph, {program.mesh: impl})


def _losses(lower):
    """Of a few steps of the program on 8 devices."""
    with tf.Graph().as_default():
        program = programs.build("joined_blocks", "reduced")
        lowering = lower(program)
        loss = lowering.export_to_tf_tensor(program.loss)
        updates = [lowering.lowered_operation(operation) for operation in program.updates]
        read_before_updating(lowering, [loss.op, *updates])
        fill = lowering.copy_masters_to_slices()
        batch = next(program.batches())
        with session(8) as run:
            run.run(tf.global_variables_initializer())
            run.run(fill)
            feed = {program.placeholders[name]: value for name, value in batch.items()}
            return [run.run([loss, *updates], feed)[0] for _ in range(3)]


def test_the_layout_found_trains_as_the_owners_does():
    with tf.Graph().as_default():
        program = programs.build("joined_blocks", "reduced")
        found = find_layout(program.graph, 8, program.outputs, FLAT)
    losses = _losses(_under(found.mesh_shape, found.layout_rules))
    np.testing.assert_allclose(losses, _losses(_under(*programs.own_layout("joined_blocks", 8))), rtol=1e-5)
    assert len(set(losses)) == 3


def test_layers_with_layouts_of_their_own_train_as_the_owners_layout():
    with tf.Graph().as_default():
        exported = export_graph(programs.build("joined_blocks", "reduced").graph)
    strategy = find_strategy(exported, 8, MACHINE)
    assert any(configuration.devices > 1 for configuration in strategy.configurations)
    losses = _losses(lambda program: lower(program.graph, strategy, device_names(8)))
    np.testing.assert_allclose(losses, _losses(_under(*programs.own_layout("joined_blocks", 8))), rtol=1e-5)


def dense():
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    sizes = ("batch", 7), ("width", 64), ("hidden", 64), ("out", 8)
    batch, width, hidden, out = (mtf.Dimension(*dim) for dim in sizes)
    x = mtf.import_tf_tensor(mesh, tf.ones([7, 64]), [batch, width])
    h = mtf.einsum([x, mtf.get_variable(mesh, "w", [width, hidden])], [batch, hidden])
    return graph, [mtf.reduce_sum(mtf.einsum([h, mtf.get_variable(mesh, "v", [hidden, out])], [batch, out]))]


def test_the_caller_may_want_two_dims_on_one_axis():
    def axes_of(**options):
        found = find_layout(dense, 4, machine=FLAT, **options)
        return found, dict(rule.split(":") for rule in found.layout_rules.split(";") if rule)
    free, rules = axes_of()
    assert "hidden" in rules
    tied, rules = axes_of(together=[("hidden", "out")])  # both are dims of one variable
    assert not {"hidden", "out"} & set(rules)
    assert tied.seconds > free.seconds
    _, rules = axes_of(fixed={"hidden": None, "width": "a"}, mesh_shape="a:2;b:2", together=[("width", "out")])
    assert rules["width"] == rules["out"] == "a"
    _, rules = axes_of(together=[("width", "out")], fixed={"out": "a"})
    assert rules["width"] == rules["out"] == "a"
    with pytest.raises(UsageError, match="fixed width=uot: 'uot' is no dim"):
        axes_of(together=[("width", "uot")])
    with pytest.raises(InfeasibleError, match=r"does not lower|no layout lowers"):
        axes_of(together=[("width", "hidden")], fixed={"hidden": "a"})
    tied, _ = axes_of(together=[("width", "out")], compare=["a:4;batch:a;out:a"])
    assert tied.compared[0].problem == "dim width and out: they are to share an axis"
