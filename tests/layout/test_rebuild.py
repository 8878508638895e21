"""Programs whose graph depends on mesh and layout."""

import functools
import itertools

import pytest

from pase_mtf.compat import mtf, placement_mesh_impl, tf
from pase_mtf.errors import InfeasibleError, UsageError
from pase_mtf.layout.find import find_layout
from pase_mtf.layout.space import parse_mesh_shape, parse_rules
from pase_mtf.machine.machine import Link, Machine

_RATES = dict.fromkeys(("matmul", "convolution", "pointwise", "reduction", "gather"), 1e6)
FLAT = Machine("flat", _RATES, 1e7, 1e12, 1e-6, (Link(64, 1e7, 1e-7),))


def dense(batch=8, hidden=16):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    dims = mtf.Dimension("batch", batch), mtf.Dimension("features", 8), mtf.Dimension("hidden", hidden)
    x = mtf.import_tf_tensor(mesh, tf.ones([batch, 8]), dims[:2])
    w = mtf.get_variable(mesh, "w", dims[1:], initializer=tf.ones_initializer())
    loss = mtf.reduce_sum(mtf.einsum([x, w], [dims[0], dims[2]]))
    mtf.optimize.SgdOptimizer(0.1).apply_grads(mtf.gradients([loss], [w]), [w.operation])
    return graph, [loss]


def test_a_function_that_takes_nothing_is_called_once():
    calls = []

    def build_graph():
        calls.append(1)
        return dense()
    found = find_layout(build_graph, 4, machine=FLAT)
    assert len(calls) == 1
    assert mtf.convert_to_shape(found.mesh_shape).size == 4


def test_a_graph_alone_will_do():
    assert find_layout(lambda: dense()[0], 4, machine=FLAT).devices == 4


def test_rebuilt_until_stable():
    """The number of experts is the number of parts of the batch."""
    seen = []

    def build_graph(mesh_shape, layout):
        seen.append((mesh_shape, layout))
        mesh = parse_mesh_shape(mesh_shape)
        rules = parse_rules(layout, mesh)
        parts = dict(mesh.axes).get(rules.get("batch"), 1)
        return dense(hidden=16 * parts)
    found = find_layout(build_graph, 4, machine=FLAT)
    assert (found.mesh_shape, found.layout_rules) in seen
    assert found.search["builds"] == len(seen) >= 2
    assert found.search["graphs"] == 3  # 1, 2 and 4 parts
    assert found.search["optimal"]
    assert not found.notes


def test_where_every_layout_changes_the_graph_against_itself_one_that_replicates_is_found():
    """Whichever dim the layout splits, the next graph has it indivisible."""
    seen = []

    def build_graph(mesh_shape="", layout=""):
        seen.append(layout)
        return dense(batch=6 if "batch" in layout else 8, hidden=9 if "hidden" in layout else 16)
    found = find_layout(build_graph, 4, machine=FLAT, fixed={"features": None}, mesh_shape="all:4")
    assert found.layout_rules == ""
    assert found.data_parallel.problem
    assert 2 <= len(seen) <= 14

    def never(mesh_shape="", layout=""):
        return dense(batch=6 if "batch" in layout else 8)
    with pytest.raises(InfeasibleError, match=r"changes the graph|no dim can be split|does not lower"):
        find_layout(never, 4, machine=FLAT, fixed={"batch": "all"}, mesh_shape="all:4")


def _layouts():
    for mesh in ("a:4", "a:2;b:2"):
        axes = parse_mesh_shape(mesh).names
        for rules in itertools.product(("", *axes), repeat=3):
            yield mesh, ";".join(f"{dim}:{axis}" for dim, axis in zip(("batch", "features", "hidden"), rules,
                                                                       strict=True) if axis)


def test_no_layout_is_cheaper_on_the_graph_that_is_built_for_it():
    """Whichever dim the layout splits, another one looks better in the next graph."""
    def build_graph(mesh_shape="", layout=""):
        return dense(batch=64, hidden=16) if "hidden" in layout else dense(batch=8, hidden=64)
    found = find_layout(build_graph, 4, machine=FLAT)
    assert found.search["optimal"]
    best = float("inf")
    for mesh, rules in _layouts():
        with tf.Graph().as_default():
            graph, outputs = build_graph(mesh, rules)
            priced = find_layout(graph, 4, outputs, FLAT, mesh, compare=[(mesh, rules)]).compared[0]
        if not priced.problem:
            best = min(best, priced.seconds)
    assert found.seconds == pytest.approx(best)


def test_graphs_that_are_alike_are_searched_once():
    def build_graph(mesh_shape="", layout=""):
        return dense()
    found = find_layout(build_graph, 4, machine=FLAT)
    with tf.Graph().as_default():
        graph, outputs = dense()
        alone = find_layout(graph, 4, outputs, FLAT)
    assert found.search["graphs"] == 1
    assert found.seconds == pytest.approx(alone.seconds)
    assert len(found.alternatives) == 3


def test_a_program_that_looks_at_one_dim_is_built_once_for_every_answer():
    built = []

    def build_graph(mesh_shape, layout):
        shape, rules = mtf.convert_to_shape(mesh_shape), mtf.convert_to_layout_rules(layout)
        built.append(mtf.tensor_dim_to_mesh_dim_size(rules, shape, mtf.Dimension("batch", 8)))
        placement_mesh_impl.PlacementMeshImpl(shape, rules, [""] * shape.size)  # sees nothing that others do not
        return dense(batch=8, hidden=16 * built[-1])
    found = find_layout(build_graph, 4, machine=FLAT)
    # Whole; over all devices; over either of two axes.
    assert found.search["builds"] == len(built) <= 4
    assert found.search["graphs"] == len(set(built)) == 3
    assert found.search["optimal"]


def microbatches(batch, parts):
    """A product and its training in a loop: as many microbatches as the function tells of a batch."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    batch, width = mtf.Dimension("batch", batch), mtf.Dimension("width", 16)
    x = mtf.import_tf_tensor(mesh, tf.ones([batch.size, 16]), [batch, width])
    w = mtf.get_variable(mesh, "w", [width, mtf.Dimension("hidden", 8)])
    gradients, outputs = mtf.serialize_training_step(
        {"x": x}, lambda given: {"loss": mtf.reduce_sum(mtf.einsum([given["x"], w], reduced_dims=[width]))}, batch,
        16 // parts(batch))
    mtf.optimize.SgdOptimizer(0.1).apply_grads(gradients, graph.trainable_variables)
    return graph, [outputs["loss"]]


def test_loops_that_differ_inside_are_other_graphs():
    def build_graph(mesh_shape="", layout=""):
        return microbatches(16, lambda batch: 2 * mtf.tensor_dim_to_mesh_dim_size(layout, mesh_shape, batch))
    # Of four microbatches, each goes into four parts; of eight it could not.
    found = find_layout(build_graph, 4, machine=FLAT, compare=["all:4;batch:all"])
    assert found.search["graphs"] > 1
    assert not found.compared[0].problem


def test_no_graph_is_built_for_what_costs_more_on_all_graphs_at_hand():
    """Half of the batch's parts take twice as many microbatches, and cost more wherever they are priced."""
    built = []

    def build_graph(mesh_shape="", layout=""):
        def parts(batch):
            built.append(mtf.tensor_dim_to_mesh_dim_size(layout, mesh_shape, batch))
            return built[-1]
        return microbatches(512, parts)
    found = find_layout(build_graph, 4, machine=FLAT)
    assert found.search["optimal"]
    assert "batch" in found.layout_rules
    assert built == [1, 4]


def test_the_first_graph_is_that_of_the_own_layout():
    built = []

    def build_graph(mesh_shape="all:4", layout="batch:all"):
        def parts(batch):
            built.append(mtf.tensor_dim_to_mesh_dim_size(layout, mesh_shape, batch))
            return built[-1]
        return microbatches(512, parts)
    found = find_layout(build_graph, 4, machine=FLAT)
    assert built == [4]
    assert (found.mesh_shape, found.layout_rules) == ("all:4", "batch:all")
    found = find_layout(build_graph, 4, machine=FLAT, mesh_shape="rows:2;cols:2")
    assert built[1] == 1  # of a mesh that is given, nothing is named
    assert not found.own.problem


def test_a_program_may_refuse_a_layout():
    def build_graph(mesh_shape="", layout=""):
        if "batch" in layout:
            raise ValueError("no batches here")
        return dense()
    found = find_layout(build_graph, 4, machine=FLAT)
    assert "batch" not in found.layout_rules
    assert "refuses it (ValueError: no batches here)" in found.data_parallel.problem
    assert "no batches here" in str(found)

    def told(mesh_shape="", layout=""):  # as the command line does
        try:
            return build_graph(mesh_shape, layout)
        except ValueError as error:
            raise UsageError("failed: no batches here") from error
    assert find_layout(told, 4, machine=FLAT).layout_rules == found.layout_rules

    def broken(mesh_shape="", layout=""):
        raise ValueError("broken")
    with pytest.raises(ValueError, match="broken"):
        find_layout(broken, 4, machine=FLAT)


def test_a_program_may_refuse_a_layout_when_half_of_it_is_built():
    def build(mesh_shape="all:4", layout="batch:all"):
        graph = mtf.Graph()
        batch, width = mtf.Dimension("batch", 16), mtf.Dimension("width", 8)
        weight = mtf.get_variable(mtf.Mesh(graph, "mesh"), "weight", [batch, width])
        if mtf.tensor_dim_to_mesh_dim_size(layout, mesh_shape, batch) == 1:
            raise ValueError("no groups")
        return graph, [mtf.reduce_sum(mtf.square(weight))]
    found = find_layout(build, 4, machine=FLAT)
    assert not found.own.problem
    assert "batch" in found.layout_rules


def test_a_fixed_dim_may_be_missing_from_another_graph():
    def build_graph(mesh_shape="", layout=""):
        graph, outputs = dense()
        if "batch" not in layout:
            extra = mtf.import_tf_tensor(outputs[0].mesh, tf.ones([8]), [mtf.Dimension("groups", 8)])
            outputs = [outputs[0] + mtf.reduce_sum(extra)]
        return graph, outputs
    found = find_layout(build_graph, 4, machine=FLAT, fixed={"groups": None})
    assert found.search["graphs"] == 2
    assert not found.data_parallel.problem
    with pytest.raises(UsageError, match="'gruops' is no dim"):
        find_layout(build_graph, 4, machine=FLAT, fixed={"gruops": None})


def test_a_candidate_may_have_no_dim_of_the_graph_that_is_built_for_it():
    def build_graph(mesh_shape="", layout=""):
        if "hidden" not in layout:
            return dense(batch=6, hidden=64)
        graph = mtf.Graph()
        x = mtf.import_tf_tensor(mtf.Mesh(graph, "mesh"), tf.ones([8]), [mtf.Dimension("other", 8)])
        return graph, [mtf.reduce_sum(x)]
    found = find_layout(build_graph, 4, machine=FLAT, mesh_shape="all:4")
    assert found.layout_rules == "features:all"
    assert found.search["graphs"] == 2
    with pytest.raises(UsageError, match="layout all:4;hidden:all: 'hidden' is no dim of the graph"):
        find_layout(build_graph, 4, machine=FLAT, mesh_shape="all:4", compare=["all:4;hidden:all"])


def _blocks(mesh_shape, layout, *, by_text):
    """A field in as many blocks as the layout has devices for; a stencil on every one of them."""
    mesh = parse_mesh_shape(mesh_shape)
    if by_text:
        sizes, rules = dict(mesh.axes), dict(rule.split(":") for rule in layout.split(";") if rule)
        parts = [sizes.get(rules.get(name), 1) for name in ("x_block", "y_block")]
    else:
        parts = [mtf.tensor_dim_to_mesh_dim_size(layout, mesh_shape, mtf.Dimension(name, 1))
                 for name in ("x_block", "y_block")]
    dims = mtf.Shape([mtf.Dimension(*dim) for dim in (
        ("x_block", parts[0]), ("y_block", parts[1]), ("x", 48 // parts[0]), ("y", 48 // parts[1]))])
    graph = mtf.Graph()
    field = mtf.import_tf_tensor(mtf.Mesh(graph, "mesh"), tf.ones(dims.to_integer_list), dims)
    smooth = mtf.slicewise(lambda x: tf.nn.softmax(tf.nn.softmax(tf.nn.softmax(x))), [field], dims, field.dtype,
                           splittable_dims=dims.dims[:2])
    return graph, [mtf.reduce_sum(smooth)]


@pytest.mark.parametrize("by_text", [False, True])
@pytest.mark.parametrize(("mesh_shape", "devices"), [(None, 4), (None, 6), ("a:2;b:3", None)])
def test_blocks_are_as_many_as_there_are_devices(by_text, mesh_shape, devices):
    """In the graph of no layout there is one block, which nothing splits."""
    count = devices or 6
    found = find_layout(lambda mesh_shape, layout: _blocks(mesh_shape, layout, by_text=by_text), devices, machine=FLAT,
                        mesh_shape=mesh_shape, compare=[(f"a:{count}", "")])
    whole, = found.compared
    assert found.seconds < 0.5 * whole.seconds  # two dims over two axes, or one over all
    assert "_block:" in found.layout_rules


@pytest.mark.parametrize("by_text", [False, True])
def test_blocks_are_as_many_as_there_are_devices_in_the_graph_of_the_own_layout_too(by_text):
    def build_graph(mesh_shape="a:2;b:2", layout="x_block:a"):
        return _blocks(mesh_shape, layout, by_text=by_text)
    found = find_layout(build_graph, 4, machine=FLAT)
    assert found.own.layout_rules == "x_block:a"
    assert found.seconds < 0.6 * found.own.seconds  # four blocks, not two


def test_what_is_fixed_and_lowers_on_no_graph_is_why():
    with pytest.raises(InfeasibleError, match=r"fixed \(y:a\) does not lower.*dim y"):
        find_layout(lambda mesh_shape, layout: _blocks(mesh_shape, layout, by_text=True), machine=FLAT,
                    mesh_shape="a:5", fixed={"y": "a"})


def test_slices_are_laid_out_as_the_layout_says():
    """Without being told one, the layout of imported slices is found."""
    def build_graph(mesh_shape, layout):
        shape = mtf.convert_to_shape(mesh_shape)
        impl = placement_mesh_impl.PlacementMeshImpl(shape, mtf.convert_to_layout_rules(layout), [""] * shape.size)
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        dims = mtf.Shape([mtf.Dimension("batch", 64), mtf.Dimension("features", 6)])
        slices = impl.LaidOutTensor(impl.make_slices(tf.ones([64, 6]), dims))
        x = mtf.import_laid_out_tensor(mesh, slices, dims)
        return graph, [mtf.reduce_sum(mtf.square(x))]
    found = find_layout(build_graph, 4, machine=FLAT)
    assert found.layout_rules.startswith("batch:")


def test_a_function_that_lowers_is_stopped_there():
    def build_graph():
        graph, _ = dense()
        mtf.Lowering(graph, {})
        raise AssertionError("went on")
    assert find_layout(build_graph, 4, machine=FLAT).devices == 4


def test_wrong_functions_are_told():
    with pytest.raises(UsageError, match="returned int; return an"):
        find_layout(lambda: 3, 4, machine=FLAT)
    for outputs in (None, 3):
        with pytest.raises(UsageError, match=r"return an mtf.Graph, or \(graph, outputs\) with a list"):
            find_layout(lambda outputs=outputs: (dense()[0], outputs), 4, machine=FLAT)
    with pytest.raises(UsageError, match="needs arguments"):
        find_layout(lambda params: dense(), 4, machine=FLAT)
    with pytest.raises(UsageError, match="graph=None: is no Graph or function"):
        find_layout(None, 4, machine=FLAT)


def test_a_broken_program_is_told_before_the_machine_is_measured(monkeypatch):
    monkeypatch.setattr("pase_mtf.layout.find.load_machine", lambda *_: pytest.fail("loads the machine"))

    def broken():
        raise ValueError("broken")

    def broken_for_every_layout(mesh_shape, layout):
        raise ValueError("broken")
    for build_graph in (broken, broken_for_every_layout):
        with pytest.raises(ValueError, match="broken"):
            find_layout(build_graph, 4)


def test_after_so_many_candidates_the_gap_is_told():
    """The graph without a layout promises what no layout keeps: the graph for any layout is larger."""
    def build_graph(mesh_shape="", layout=""):
        return dense(batch=64, hidden=1024 if layout.strip() else 16)
    found = find_layout(build_graph, 4, machine=FLAT)
    assert not found.search["optimal"]
    assert found.search["gap"] > 0
    assert 10 < found.search["builds"] < 20
    assert "best of" in found.notes[0]
    assert "above the optimum" in str(found)


def test_rules_to_compare_with_that_name_no_dim_are_told():
    found = find_layout(lambda mesh_shape, layout: dense(), 4, machine=FLAT, compare=["all:4;batch:all;hiden:all"])
    assert any("'hiden' is no dim of the graph; did you mean 'hidden'" in note for note in found.notes)


def test_a_dim_that_is_there_in_its_parts_beside_its_whole_size_is_split():
    """Beam search finds the best words of every part of the vocabulary first."""
    def build_graph(mesh_shape, layout):
        vocab = mtf.Dimension("vocab", 4096)
        parts = mtf.tensor_dim_to_mesh_dim_size(layout, mesh_shape, vocab)
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        batch, io = mtf.Dimension("batch", 3), mtf.Dimension("io", 7)  # neither divides
        x = mtf.import_tf_tensor(mesh, tf.ones([3, 7]), [batch, io])
        logits = mtf.einsum([x, mtf.get_variable(mesh, "w", [io, vocab])], [batch, vocab])
        minor = mtf.Dimension("minor", vocab.size // parts)
        each = mtf.reshape(logits, [batch, mtf.Dimension("vocab", parts), minor])
        return mesh.graph, [mtf.reduce_sum(mtf.reduce_max(each, reduced_dim=minor))]
    found = find_layout(build_graph, 4, machine=FLAT)
    assert "vocab:" in found.layout_rules


def test_graphs_that_declare_other_dims_splittable_are_other_graphs():
    def build_graph(mesh_shape, layout):
        graph = mtf.Graph()
        dims = mtf.Shape([mtf.Dimension("batch", 64), mtf.Dimension("width", 7)])
        x = mtf.import_tf_tensor(mtf.Mesh(graph, "mesh"), tf.ones([64, 7]), dims)
        split = [dim for dim in dims.dims if mtf.tensor_dim_to_mesh_dim_size(layout, mesh_shape, dim) > 1]
        return graph, [mtf.reduce_sum(mtf.slicewise(tf.tanh, [x], splittable_dims=split))]
    found = find_layout(build_graph, 4, machine=FLAT)
    assert not found.data_parallel.problem
    assert found.layout_rules.startswith("batch:")


@pytest.mark.parametrize("time_limit", [None, 1e-9])
def test_a_program_that_takes_no_time_is_answered(time_limit):
    def build_graph():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        x = mtf.import_tf_tensor(mesh, tf.ones([8, 8]), [mtf.Dimension("batch", 8), mtf.Dimension("width", 8)])
        return mesh.graph, [x]

    def build_for(mesh_shape="", layout=""):
        return build_graph()
    for build in (build_graph, build_for):
        found = find_layout(build, 4, machine=FLAT, time_limit=time_limit)
        assert (found.seconds, found.search["gap"], found.search["optimal"]) == (0.0, 0.0, True)


@pytest.mark.parametrize("wanted", [{"mesh_shape": "rows:4"}, {"fixed": {"batch": "rows"}}])
def test_what_was_tried_over_an_axis_of_another_name_is_not_left_out(wanted):
    """The batch over all devices is tried first, over an axis that the caller does not want."""
    def build_graph(mesh_shape="", layout=""):
        return dense(batch=256, hidden=9)
    found = find_layout(build_graph, 4, machine=FLAT, **wanted)
    assert (found.mesh_shape, found.layout_rules) == ("rows:4", "batch:rows")
    assert found.seconds == pytest.approx(found.data_parallel.seconds)


def test_what_a_program_refuses_for_the_name_of_an_axis_is_tried_with_another():
    def build_graph(mesh_shape="rows:4", layout=""):
        if "rows" not in mesh_shape:
            raise ValueError("no rows")
        return dense(batch=256, hidden=9)
    found = find_layout(build_graph, 4, machine=FLAT)
    assert "no rows" in found.data_parallel.problem
    assert (found.mesh_shape, found.layout_rules) == ("rows:4", "batch:rows")


def test_a_rule_of_the_own_layout_that_the_program_looks_at_is_kept():
    """No tensor has the dim, and the graph depends on its rule."""
    def build_graph(mesh_shape="all:4", layout="batch:all;groups:all"):
        parts = mtf.tensor_dim_to_mesh_dim_size(layout, mesh_shape, mtf.Dimension("groups", 4))
        return dense(batch=64, hidden=64 // parts)
    found = find_layout(build_graph, 4, machine=FLAT)
    assert found.own.layout_rules == found.layout_rules == "batch:all;groups:all"
    assert found.seconds < found.data_parallel.seconds


def test_a_batch_that_no_rule_can_mention():
    def build_graph(mesh_shape="all:4", layout=""):
        hidden = mtf.Dimension("hidden", 16)
        parts = mtf.tensor_dim_to_mesh_dim_size(layout, mesh_shape, hidden)
        graph = mtf.Graph()
        y = mtf.import_tf_tensor(mtf.Mesh(graph, "mesh"), tf.ones([8, 16]),
                                 mtf.Shape([mtf.Dimension("my batch", 8), hidden]))
        for _ in range(parts):
            y = mtf.tanh(y)
        return graph, [mtf.reduce_sum(y)]
    found = find_layout(build_graph, 4, machine=FLAT, compare=["all:4;hidden:all"])
    assert found.data_parallel.problem
    assert not found.best.problem


def test_where_no_dim_can_be_split_a_program_is_told_so_as_a_graph_is():
    def build_graph(mesh_shape="", layout=""):
        return dense(batch=7, hidden=9)
    for build in (build_graph, lambda: build_graph()):
        with pytest.raises(InfeasibleError, match=r"no dim can be split over 5 devices; .*size 7 does not divide by 5"):
            find_layout(build, 5, machine=FLAT)


def test_a_decorator_may_give_a_function_what_it_needs():
    """As gin does: it keeps the signature of what it wraps."""
    def configured(function):
        @functools.wraps(function)
        def inner():
            return function(16)
        return inner

    @configured
    def build_graph(hidden):
        return dense(hidden=hidden)
    assert find_layout(build_graph, 4, machine=FLAT).devices == 4


def test_a_decorator_that_gives_nothing_is_seen_through():
    def timed(function):
        @functools.wraps(function)
        def inner(*args, **kwargs):
            return function(*args, **kwargs)
        return inner
    build_graph = timed(lambda params: dense())
    with pytest.raises(UsageError, match=r"needs arguments \(params\); give a function"):
        find_layout(build_graph, 4, machine=FLAT)


@pytest.mark.parametrize(("each", "time_limit"), [(1, 1e-9), (3, None)])
def test_where_a_graph_that_was_not_built_may_divide_nothing_is_called_impossible(each, time_limit):
    """So many experts for every device as they are split over: nothing of the graph without a layout divides."""
    def build_graph(mesh_shape, layout):
        experts = each * mtf.tensor_dim_to_mesh_dim_size(layout, mesh_shape, mtf.Dimension("experts", 1))
        dims = mtf.Shape([mtf.Dimension(*dim) for dim in (("batch", 7), ("experts", experts), ("width", 15))])
        graph = mtf.Graph()
        x = mtf.import_tf_tensor(mtf.Mesh(graph, "mesh"), tf.ones(dims.to_integer_list), dims)
        return graph, [mtf.reduce_sum(mtf.square(x))]
    found = find_layout(build_graph, 4, machine=FLAT, time_limit=time_limit)
    assert (found.layout_rules, found.best.problem) == ("", "")
    assert not find_layout(build_graph, 4, machine=FLAT, compare=["all:4;experts:all"]).compared[0].problem
