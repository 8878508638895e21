"""Variables that stock Mesh-TF stacks, and then does not find: what is said of a layout is what its lowering does."""

import pytest
from harness import device_names
from nets import Builder, dim

from pase_mtf.compat import mtf, placement_mesh_impl, tf
from pase_mtf.layout.capture import capture_graph
from pase_mtf.layout.find import find_layout
from pase_mtf.layout.space import parse_mesh_shape, parse_rules
from pase_mtf.layout.verify import Verifier

BATCH, ROWS, WIDTH = dim("batch", 16), dim("rows", 512), dim("width", 256)


def read_anew(b):
    """A variable of three is read once more."""
    one, *others = [b.variable(name, [ROWS, WIDTH]) for name in ("one", "other", "third")]
    x = b.input("x", [BATCH, WIDTH])
    y = mtf.einsum([x, mtf.read_variable(one.operation) + mtf.add_n([one, *others])], [BATCH, ROWS])
    return [mtf.reduce_mean(y)]


def assigned_in_a_loop(b):
    """Two variables that only the body of a loop assigns."""
    moving = [b.variable(name, [ROWS, WIDTH]) for name in ("mean", "variance")]

    def body(count):
        for variable in moving:
            mtf.assign(variable.operation, variable * 0.9)
        return [count + 1, mtf.reduce_sum(moving[0])]
    return mtf.while_loop(lambda count, *_: mtf.less(count, 3), body, [mtf.constant(b.mesh, 0, dtype=tf.int32)],
                          has_accumulators=True)[1:]


def of_other_shapes(b):
    """None is stacked."""
    one, other = b.variable("one", [ROWS, WIDTH]), b.variable("other", [ROWS])
    return [mtf.reduce_mean(mtf.read_variable(one.operation) + mtf.read_variable(other.operation) + one)]


def not_named(b):
    """All are stacked, and nobody misses them."""
    return [mtf.reduce_mean(mtf.add_n([b.variable(name, [WIDTH]) for name in ("one", "other", "third")]))]


def last_read_anew(b):
    """The last of three is read once more: whole, the other two are stacked, and it is not."""
    depth = dim("depth", 64)
    *others, last = [b.variable(name, [ROWS, depth]) for name in ("one", "other", "third")]
    x = b.input("x", [BATCH, depth])
    y = mtf.einsum([x, mtf.read_variable(last.operation) + mtf.add_n([*others, last])], [BATCH, ROWS])
    return [mtf.reduce_mean(y)]


@pytest.mark.parametrize("build", [read_anew, last_read_anew, assigned_in_a_loop, of_other_shapes, not_named])
@pytest.mark.parametrize("layout", [("all:8", "batch:all"), ("all:8", "rows:all"), ("a:4;b:2", "rows:a;width:b"),
                                    ("all:2", "rows:all"), ("all:1", "rows:all"), ("all:8", "")])
def test_as_stock_lowering(build, layout):
    def graph_of():
        builder = Builder(tf.float32)
        return build(builder), builder.graph
    mesh, rules = parse_mesh_shape(layout[0]), parse_rules(layout[1], parse_mesh_shape(layout[0]))
    with tf.Graph().as_default():
        outputs, graph = graph_of()
        problem = Verifier(graph, outputs).problem(mesh, rules)
    with tf.Graph().as_default():
        outputs, graph = graph_of()
        impl = placement_mesh_impl.PlacementMeshImpl(*layout, device_names(mesh.devices))
        try:
            mtf.Lowering(graph, {outputs[0].mesh: impl})
        except KeyError:
            assert problem is not None
            assert "autostack=False" in problem.reason
        else:
            assert problem is None


def small(b):
    """Stacked under any layout: such a program is lowered without stacking, or on one device."""
    one, other = (b.variable(name, [WIDTH]) for name in ("one", "other"))
    return [mtf.reduce_mean(mtf.read_variable(one.operation) + other + one)]


@pytest.mark.parametrize(("build", "autostack"), [(read_anew, True), (small, False)])
def test_the_layout_that_is_found_lowers(build, autostack):
    """As the program can be lowered at all: where no layout helps, none is refused."""
    with tf.Graph().as_default():
        builder = Builder(tf.float32)
        outputs = build(builder)
        found = find_layout(builder.graph, 8, outputs=outputs, machine="h100")
        impl = placement_mesh_impl.PlacementMeshImpl(found.mesh_shape, found.layout_rules, device_names(8))
        mtf.Lowering(builder.graph, {outputs[0].mesh: impl}, autostack=autostack)


def test_a_program_that_stacks_nothing():
    layout = ("all:8", "rows:all")
    with tf.Graph().as_default(), capture_graph() as captured:
        builder = Builder(tf.float32)
        outputs = read_anew(builder)
        impl = placement_mesh_impl.PlacementMeshImpl(*layout, device_names(8))
        mtf.Lowering(builder.graph, {outputs[0].mesh: impl}, autostack=False)
    mesh = parse_mesh_shape(layout[0])
    assert Verifier(captured.graph, outputs).problem(mesh, parse_rules(layout[1], mesh)) is None


def test_an_own_layout_that_does_not_divide_what_would_be_stacked_is_told():
    rows = dim("rows", 12)

    def build():
        b = Builder(tf.float32)
        one, other = (b.variable(name, [rows, WIDTH]) for name in ("one", "other"))
        mtf.einsum([b.input("x", [BATCH, WIDTH]), mtf.read_variable(one.operation) + other], [BATCH, rows])
        impl = placement_mesh_impl.PlacementMeshImpl("all:8", "rows:all", device_names(8))
        return mtf.Lowering(b.graph, {b.mesh: impl})
    found = find_layout(build, 8, machine="h100")
    assert "not divisible" in found.own.problem


def test_what_is_explained_lowers():
    """What `rows` on the axis would cost is of no use where it does not lower."""
    with tf.Graph().as_default():
        builder = Builder(tf.float32)
        outputs = read_anew(builder)
        found = find_layout(builder.graph, 8, outputs=outputs, machine="h100", mesh_shape="all:8",
                            fixed={"batch": None})
        text = found.explain("rows")
    assert found.layout_rules == ""
    assert "rows:all" not in text
    assert "autostack=False" in text
