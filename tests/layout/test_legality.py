"""Every operation under layouts of its dims: what is called legal gives the values of one device, and nothing that does
is called illegal."""

import itertools
import math

import numpy as np
import pytest
from harness import device_names, session
from layout_operations import CASES, FLOAT32
from nets import Builder

from pase_mtf.compat import mtf, placement_mesh_impl, tf
from pase_mtf.export.exporter import export_graph
from pase_mtf.layout.costs import LayoutCosts
from pase_mtf.layout.find import find_layout
from pase_mtf.layout.legality import Problem, StockLegality
from pase_mtf.layout.search import Search
from pase_mtf.layout.space import MeshShape
from pase_mtf.layout.verify import Verifier
from pase_mtf.machine.machine import Link, Machine

MESH = MeshShape((("a", 2), ("b", 2)))


def lowered(graph, mesh, rules, outputs):
    """The outputs, lowered by stock Mesh-TF on devices; an Exception where it does not lower."""
    impl = placement_mesh_impl.PlacementMeshImpl(str(mesh), mtf.LayoutRules(rules.items()), device_names(mesh.devices))
    try:
        lowering = mtf.Lowering(graph, dict.fromkeys([op.mesh for op in graph.operations], impl))
        return [lowering.export_to_tf_tensor(output) for output in outputs]
    except Exception as error:  # whatever it raises, it does not lower
        return error


def same(one, other, tolerance):
    return all(np.shape(x) == np.shape(y) and np.allclose(x, y, rtol=tolerance, atol=tolerance, equal_nan=True)
               for x, y in zip(one, other, strict=True))


def layouts(legality, sizes, most=30):
    """Every dim on every axis, every pair of dims that are legal by themselves, and some of the larger legal ones.

    The axes are of one size: of two layouts of several dims that differ by their exchange, one is looked at.
    """
    seen = set()
    for layout in _layouts(legality, sizes, most):
        one, other = (frozenset((name, abs(axis - last)) for name, axis in layout.items()) for last in (0, 1))
        if len(layout) < 2 or other not in seen:
            seen.add(one)
            yield layout


def _layouts(legality, sizes, most):
    names = [name for name in legality.sizes if not name.startswith("_")]
    axes = range(len(sizes))
    single = [(name, axis) for name in names for axis in axes]
    yield {}
    yield from ({name: axis} for name, axis in single)
    single = [(name, axis) for name, axis in single if legality.problem({name: axis}, sizes) is None]
    pairs = [dict(pair) for pair in itertools.combinations(single, 2) if pair[0][0] != pair[1][0]]
    yield from pairs
    known = [pair for pair in pairs if legality.problem(pair, sizes) is None]
    rng, larger = np.random.default_rng(0), {}
    while known and len(larger) < most:
        known = [{**entry, name: axis} for entry in known for name, axis in single if name not in entry]
        known = [entry for entry in known if legality.problem(entry, sizes) is None]
        unique = list({tuple(sorted(entry.items())): entry for entry in known}.values())
        known = [unique[number] for number in sorted(rng.permutation(len(unique))[:most // 2])]
        larger.update({tuple(sorted(entry.items())): entry for entry in known})
    yield from larger.values()


def outcomes(build, mesh, dtype=tf.float64, chunk=40):
    """For every layout: (rules, what legality says, what stock lowering raises, whether the values are right, what the
    lowering for shapes says)."""
    def legality_of():
        builder = Builder(dtype)
        outputs = build(builder)
        return builder.graph, outputs, StockLegality(builder.graph, outputs)

    with tf.Graph().as_default():
        graph, outputs, legality = legality_of()
        tensors = lowered(graph, MeshShape((("all", 1),)), {}, outputs)
        assert not isinstance(tensors, Exception), tensors
        with session(1) as tf_session:
            want = tf_session.run(tensors)
        todo = list(layouts(legality, mesh.sizes))
    for begin in range(0, len(todo), chunk):
        with tf.Graph().as_default():
            graph, outputs, legality = legality_of()
            made = []
            for axis_of in todo[begin:begin + chunk]:
                rules = {dim: mesh.names[axis] for dim, axis in axis_of.items()}
                made.append((rules, legality.problem(axis_of, mesh.sizes), lowered(graph, mesh, rules, outputs),
                             Verifier(graph, outputs).problem(mesh, rules)))
            with session(mesh.devices) as tf_session:
                for rules, problem, tensors, shapes in made:
                    raised, right = (tensors, False) if isinstance(tensors, Exception) else (None, False)
                    if raised is None:
                        try:
                            right = same(tf_session.run(tensors), want, 1e-9 if dtype == tf.float64 else 1e-5)
                        except (tf.errors.OpError, ValueError):  # ValueError: a tensor that lives in a loop
                            right = False
                    yield rules, problem, raised, right, shapes


@pytest.mark.parametrize(("name", "alone", "rules"), [
    ("sum_that_other_splits_finish", {"io": "a"}, {"io": "a", "heads": "b"}),
    ("sum_that_other_splits_finish", {"io": "a"}, {"io": "a", "heads": "a"}),
    ("sums_that_differ", {"y": "a"}, {"y": "a", "k": "b"})])
def test_what_one_split_breaks_another_may_mend(name, alone, rules):
    """So that a dim that is refused by itself is not left out of layouts."""
    with tf.Graph().as_default():
        builder = Builder(tf.float64)
        outputs = CASES[name](builder)
        legality = StockLegality(builder.graph, outputs)
        axes = {dim: MESH.names.index(axis) for dim, axis in rules.items()}
        first = {dim: MESH.names.index(axis) for dim, axis in alone.items()}
        assert legality.problem(first, MESH.sizes) is not None
        assert isinstance(lowered(builder.graph, MESH, alone, outputs), Exception)
        assert all(legality.problem_of(dim, axis, MESH.sizes) is None for dim, axis in axes.items())
        assert legality.problem(axes, MESH.sizes) is None
        assert Verifier(builder.graph, outputs).problem(MESH, rules) is None
        found, want = (lowered(builder.graph, mesh, given, outputs) for mesh, given in (
            (MESH, rules), (MeshShape((("all", 1),)), {})))
        with session(MESH.devices) as tf_session:
            assert same(tf_session.run(found), tf_session.run(want), 1e-9)


def test_what_another_split_mends_is_searched(monkeypatch):
    """Also where the layouts without it come first, and are refused: here all of a single split."""
    with tf.Graph().as_default():
        builder = Builder(tf.float64)
        outputs = CASES["sum_that_other_splits_finish"](builder)
        legality = StockLegality(builder.graph, outputs, MESH.devices)
        rates = dict.fromkeys(("matmul", "convolution", "pointwise", "reduction", "gather"), 1e12)
        machine = Machine("slow links", rates, 1e12, 1e12, 1e-9, (Link(64, 1e5, 1e-3),))
        costs = LayoutCosts(export_graph(builder.graph), machine, legality)
        lowers = Verifier(builder.graph, outputs).problem

        def layouts():
            search = Search(costs, [MESH], {}, math.inf, lowers)
            found = {candidate.effect: candidate.cost for candidate in search if len(candidate.axis_of) > 1}
            return found, min((candidate.cost for candidate, problem in search.rejected if problem.depends))
        want, _ = layouts()
        judge = legality.problem
        monkeypatch.setattr(legality, "problem", lambda axis_of, sizes: judge(axis_of, sizes) if len(axis_of) != 1
                            else Problem("alone", tuple(axis_of), "another split would mend it", depends=True))
        found, first_refused = layouts()
    assert found == want
    assert first_refused < sorted(found.values())[len(found) // 4]


# Of the others' kinds, and quick.
_QUICK = ("splitting", "partial_sums_added")


@pytest.mark.parametrize("name", [name if name in _QUICK else pytest.param(name, marks=pytest.mark.slow)
                                  for name in CASES])
def test_what_is_legal_lowers_to_the_values_of_one_device(name):
    wrong, cautious, lax, legal = [], [], [], 0
    for rules, problem, raised, right, shapes in outcomes(
            CASES[name], MESH, tf.float32 if name in FLOAT32 else tf.float64):
        legal += problem is None
        if problem is None and not right:
            wrong.append((rules, raised or "wrong values"))
        if problem is not None and right:
            cautious.append((rules, str(problem)))
        # The lowering for shapes is as strict as the real one; what it refuses besides does not run.
        if (shapes is None and raised is not None) or (shapes is not None and right):
            lax.append((rules, f"for shapes: {shapes}; really: {raised}"))
    assert legal  # to split nothing, at least
    assert not wrong, wrong[:5]
    assert not lax, lax[:5]
    assert not cautious, cautious[:5]


@pytest.mark.parametrize(("name", "told"), [
    ("slicewise_of_another_shifted", "an input of slicewise is made of another one, through "),
    ("slicewise_of_one_twice", "slicewise has one input twice"), ("slicewise_of_less", ""), ("pointwise", "")])
def test_what_stock_counts_twice_is_told(name, told):
    with tf.Graph().as_default():
        builder = Builder(tf.float64)
        outputs = CASES[name](builder)
        found = find_layout(builder.graph, 2, outputs, "1080ti")
    notes = [note for note in found.notes if "counts that way twice" in note]
    assert len(notes) == bool(told)
    assert all(told in note for note in notes)


def test_a_reshape_in_which_one_dim_makes_room_for_the_next_is_legal():
    rules = {"ny": "a", "nx": "b", "tnz": "a", "tny": "b"}
    with tf.Graph().as_default():
        builder = Builder(tf.float64)
        x = builder.input("x", [mtf.Dimension(name, 4) for name in ("ny", "nz", "nx")])
        outputs = [mtf.reshape(x, [mtf.Dimension(name, 4) for name in ("tny", "tnz", "tnx")])]
        legality = StockLegality(builder.graph, outputs)
        assert legality.problem({dim: MESH.names.index(axis) for dim, axis in rules.items()}, MESH.sizes) is None
        assert legality.problem({"ny": 0, "tny": 1}, MESH.sizes).depends
        assert legality.problem({"ny": 0, "tny": 1, "tnz": 0}, MESH.sizes).depends
        found, want = (lowered(builder.graph, mesh, given, outputs) for mesh, given in (
            (MESH, rules), (MeshShape((("all", 1),)), {})))
        with session(MESH.devices) as tf_session:
            assert same(tf_session.run(found), tf_session.run(want), 1e-9)


def test_axes_compete_in_every_order_where_one_dim_makes_room_for_the_next():
    rates = dict.fromkeys(("matmul", "convolution", "pointwise", "reduction", "gather"), 1e6)
    flat = Machine("flat", rates, 1e9, 1e12, 1e-6, (Link(64, 1e7, 1e-7),))
    sizes = {"ny": 6, "nz": 9, "nx": 4, "tny": 2, "part": 3, "tnz": 9, "tnx": 4, "k": 64, "m": 64}

    def dims(*names):
        return mtf.Shape([mtf.Dimension(name, sizes[name]) for name in names])
    with tf.Graph().as_default():
        b = Builder(tf.float64)
        p, q, r = (b.input(name, dims(*names).dims) for name, names in (
            ("p", ("ny", "nx", "k")), ("q", ("k", "nz")), ("r", ("tnx", "part", "m"))))
        turned = mtf.reshape(mtf.einsum([p, q], dims("ny", "nz", "nx")), dims("tny", "part", "tnz", "tnx"))
        outputs = [mtf.einsum([turned, r], dims("tny", "tnz", "m"))]
        free, given = (find_layout(b.graph, 6, outputs, flat, shape, fixed=dict.fromkeys(
            ("nz", "part", "tnx", "k", "m"))) for shape in (None, "rows:3;cols:2"))
    assert free.seconds == pytest.approx(given.seconds)
    assert free.mesh_shape == "rows:3;cols:2"


def test_where_nothing_split_does_not_lower_dearer_layouts_are_searched():
    """As with a function that fits single blocks only; links are so slow that some splits cost more than none."""
    with tf.Graph().as_default():
        builder = Builder(tf.float64)
        batch, width, hidden = (mtf.Dimension(name, 8) for name in ("batch", "width", "hidden"))
        y = mtf.einsum([builder.input("x", [batch, width]), builder.input("w", [width, hidden])], [batch, hidden])
        legality = StockLegality(builder.graph, [mtf.tanh(y)], MESH.devices)
        rates = dict.fromkeys(("matmul", "convolution", "pointwise", "reduction", "gather"), 1e12)
        machine = Machine("slow links", rates, 1e12, 1e12, 1e-9, (Link(64, 1e5, 1e-3),))
        costs = LayoutCosts(export_graph(builder.graph), machine, legality)

    def found(problem):
        search = Search(costs, [MESH], {}, math.inf, lambda mesh, rules: None if rules else problem)
        return [candidate.rules for candidate in search]
    everything = found(None)
    assert {} in everything[:-1]
    assert found(Problem("blocks", (), "it fits single blocks only")) == [rules for rules in everything if rules]


def test_what_makes_room_is_asked_again_where_other_dims_are_whole():
    rules = {"ny": 0, "nx": 1, "tnz": 0, "tny": 1}
    with tf.Graph().as_default():
        builder = Builder(tf.float64)
        x = builder.input("x", [mtf.Dimension(name, 4) for name in ("ny", "nz", "nx")])
        legality = StockLegality(builder.graph, [mtf.reshape(x, [
            mtf.Dimension(name, 4) for name in ("tny", "tnz", "tnx")])])
    everything = legality.whole
    legality.whole = {name: Problem("own", (name,), "nobody knows", known=False) for name in ("tnz", "tnx")}
    assert legality.problem_of_pair("ny", 0, "tny", 1, MESH.sizes) is not None
    legality.whole = everything
    assert legality.problem(rules, MESH.sizes) is None


def _read_in_a_loop(total):
    """What a loop makes that reads a tensor from outside in every iteration."""
    return mtf.while_loop(
        lambda count, _: mtf.less(count, 3), lambda count, state: [count + 1, state + mtf.tanh(total)],
        [mtf.constant(total.mesh, 0, dtype=tf.int32), mtf.zeros(total.mesh, total.shape, total.dtype)])


def test_a_sum_that_was_only_added_is_not_finished_before_a_loop_reads_it():
    batch, width = mtf.Dimension("batch", 4), mtf.Dimension("width", 4)
    with tf.Graph().as_default():
        builder = Builder(tf.float64)
        total, other = (mtf.reduce_sum(builder.input(name, [batch, width]), reduced_dim=width) for name in "xy")
        both = total + other
        outputs = [*_read_in_a_loop(total), mtf.exp(total), both]
        legality = StockLegality(builder.graph, outputs)
        assert legality.problem({"batch": 0}, MESH.sizes) is None
        assert Verifier(builder.graph, outputs).problem(MESH, {"width": "a"}) is not None
        assert legality.problem({"width": 0}, MESH.sizes) is not None


def test_a_sum_that_is_added_to_one_over_another_dim_is_finished():
    """Where that dim is whole, it is added to what is no partial sum, before the loop."""
    batch, width, depth = (mtf.Dimension(name, 4) for name in ("batch", "width", "depth"))
    with tf.Graph().as_default():
        builder = Builder(tf.float64)
        total, other = (mtf.reduce_sum(builder.input(name, [batch, over]), reduced_dim=over)
                        for name, over in (("x", width), ("y", depth)))
        both = total + other
        outputs = [*_read_in_a_loop(total), mtf.exp(total), both]
        legality = StockLegality(builder.graph, outputs)
        assert Verifier(builder.graph, outputs).problem(MESH, {"width": "a"}) is None
        assert legality.problem({"width": 0}, MESH.sizes) is None  # refused before


@pytest.mark.parametrize(("seed", "rules", "right"), [
    (None, {}, False), (None, {"batch": "a"}, False), (None, {"batch": "a", "width": "b"}, True),
    (3, {"batch": "a"}, True)])
def test_devices_that_hold_the_same_block_draw_the_same_numbers(seed, rules, right):
    """Stock Mesh-TF calls a function of slices on every device: without a seed copies of a block differ."""
    batch, width = mtf.Dimension("batch", 4), mtf.Dimension("width", 4)
    with tf.Graph().as_default():
        builder = Builder(tf.float64)
        y = mtf.slicewise(lambda t: t * tf.random.uniform(t.shape, dtype=t.dtype, seed=seed),
                          [builder.input("x", [batch, width])], splittable_dims=[batch, width])
        legality = StockLegality(builder.graph, [y])
        axes = {name: MESH.names.index(axis) for name, axis in rules.items()}
        assert (legality.problem(axes, MESH.sizes) is None) == right
        impl = placement_mesh_impl.PlacementMeshImpl(
            str(MESH), mtf.LayoutRules(rules.items()), device_names(MESH.devices))
        lowering = mtf.Lowering(builder.graph, {builder.mesh: impl})
        with session(MESH.devices) as run:
            slices = run.run(lowering.tensors[y].to_laid_out_tensor().tensor_list)
    first = {}
    same = [np.array_equal(first.setdefault(tuple(impl.slice_begin(y.shape, device)), block), block)
            for device, block in enumerate(slices)]
    assert all(same) == right


def test_a_sum_that_a_loop_begins_with_is_made_before_anything_in_it_reads():
    """Such as the position from which Mesh-TF's decoder begins, and counts its steps."""
    batch, width = mtf.Dimension("batch", 4), mtf.Dimension("width", 4)
    with tf.Graph().as_default():
        builder = Builder(tf.float64)
        total = mtf.reduce_sum(builder.input("x", [batch, width]), reduced_dim=width)
        looped = mtf.while_loop(
            lambda count, _: mtf.less(count, 3), lambda count, state: [count + 1, state + mtf.tanh(total)],
            [mtf.constant(builder.mesh, 0, dtype=tf.int32), total])
        outputs = [*looped, mtf.exp(total)]
        assert Verifier(builder.graph, outputs).problem(MESH, {"width": "a"}) is None
        assert StockLegality(builder.graph, outputs).problem({"width": 0}, MESH.sizes) is None
        found, want = (lowered(builder.graph, mesh, given, outputs) for mesh, given in (
            (MESH, {"width": "a"}), (MeshShape((("all", 1),)), {})))
        with session(MESH.devices) as tf_session:
            assert same(tf_session.run(found), tf_session.run(want), 1e-9)


@pytest.mark.parametrize("fetched", [False, True])
def test_a_sum_that_one_loop_alone_reads_is_made_in_it(fetched):
    batch, width = mtf.Dimension("batch", 4), mtf.Dimension("width", 4)
    with tf.Graph().as_default():
        builder = Builder(tf.float64)
        total = mtf.reduce_sum(builder.input("x", [batch, width]), reduced_dim=width)
        outputs = [*_read_in_a_loop(total), *([total] if fetched else [])]
        legal = StockLegality(builder.graph, outputs).problem({"width": 0}, MESH.sizes) is None
        assert legal == (Verifier(builder.graph, outputs).problem(MESH, {"width": "a"}) is None)
        assert legal == (not fetched)
        if legal:
            found, want = (lowered(builder.graph, mesh, given, outputs) for mesh, given in (
                (MESH, {"width": "a"}), (MeshShape((("all", 1),)), {})))
            with session(MESH.devices) as tf_session:
                assert same(tf_session.run(found), tf_session.run(want), 1e-9)
