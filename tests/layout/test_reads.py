"""What a program sees of a layout while it builds its graph."""

import importlib
import re
import types

import pytest

from benchmarks.programs.stand_ins import TRAINING, stand_in
from pase_mtf.compat import mtf, placement_mesh_impl, tf
from pase_mtf.layout.find import find_layout
from pase_mtf.layout.masters import placeholder_masters
from pase_mtf.layout.reads import watched
from pase_mtf.layout.scalars import shared_scalars
from pase_mtf.layout.space import parse_mesh_shape, parse_rules

for name in TRAINING:
    stand_in(name)
attention = importlib.import_module("mesh_tensorflow.transformer.attention")

MESH = parse_mesh_shape("rows:2;cols:4")
RULES = parse_rules("batch:rows;d_ff:cols", MESH)
TEXTS = str(MESH), "batch:rows;d_ff:cols"
BATCH, LENGTH = mtf.Dimension("batch", 8), mtf.Dimension("length", 8)


def asked(look):
    with watched(MESH, RULES, TEXTS) as (reads, given):
        look(**given)
    mtf.tensor_dim_to_mesh_dim_size(given["layout"], given["mesh_shape"], LENGTH)  # after the block: nobody cares
    return reads


def impl(mesh_shape, layout):
    return placement_mesh_impl.PlacementMeshImpl(mesh_shape, layout, [""] * 8)


@pytest.mark.parametrize(("look", "questions"), [
    (lambda mesh_shape, layout: None, set()),
    (impl, set()),
    (lambda mesh_shape, layout: mtf.convert_to_shape(mesh_shape).size, set()),
    (lambda mesh_shape, layout: mtf.tensor_dim_to_mesh_dim_size(layout, mesh_shape, BATCH), {("parts", "batch")}),
    (lambda mesh_shape, layout: mtf.tensor_dim_to_size_per_split(
        mtf.convert_to_layout_rules(layout), mtf.convert_to_shape(mesh_shape), BATCH), {("parts", "batch")}),
    (lambda mesh_shape, layout: mtf.convert_to_shape(mesh_shape)[mtf.convert_to_layout_rules(
        layout).tensor_dimension_to_mesh_axis(BATCH, mtf.convert_to_shape(mesh_shape))].size,
     {("axis", "batch"), ("size", 0)}),
    (lambda mesh_shape, layout: impl(mesh_shape, layout).slice_shape(mtf.Shape([BATCH, LENGTH])),
     {("axis", "batch"), ("size", 0), ("axis", "length")}),
    (lambda mesh_shape, layout: mtf.convert_to_shape(mesh_shape or "a:1"), {("given", "mesh_shape")}),
    (lambda mesh_shape, layout: mtf.convert_to_shape(mesh_shape)[1].size, {("size", 1)}),
    (lambda mesh_shape, layout: mtf.convert_to_shape(mesh_shape).dims[-1], {("axes", None)}),
    (lambda mesh_shape, layout: len(mtf.convert_to_shape(mesh_shape).dims), {("axes", None)}),
    (lambda mesh_shape, layout: mtf.convert_to_shape(mesh_shape).to_integer_list,
     {("axes", None), ("size", 0), ("size", 1)}),
    (lambda mesh_shape, layout: mtf.convert_to_shape(mesh_shape)[0] == ("rows", 2), {("name", 0), ("size", 0)}),
    (lambda mesh_shape, layout: "batch" in layout, {("text", "layout")}),
    (lambda mesh_shape, layout: f"{layout}", {("text", "layout")}),
    (lambda mesh_shape, layout: str(layout), {("text", "layout")}),
    (lambda mesh_shape, layout: "in " + mesh_shape, {("text", "mesh_shape")}),
    (lambda mesh_shape, layout: re.findall("x", layout), {("text", "layout")}),
    (lambda mesh_shape, layout: mtf.convert_to_layout_rules(layout)._pairs, {("text", "layout")}),
    (lambda mesh_shape, layout: mtf.convert_to_layout_rules(mesh_shape), {("text", "mesh_shape")}),
    (lambda mesh_shape, layout: mtf.tensor_dim_to_mesh_dim_size(layout, "rows:8", BATCH), {("text", "layout")}),
])
def test_what_is_asked_is_seen(look, questions):
    assert set(asked(look).answers) == questions


def test_layouts_with_the_same_answers_are_the_same():
    reads = asked(lambda mesh_shape, layout: mtf.tensor_dim_to_mesh_dim_size(layout, mesh_shape, BATCH))

    def same(mesh_shape, rules):
        mesh = parse_mesh_shape(mesh_shape)
        return reads.same_for(mesh, parse_rules(rules, mesh), (mesh_shape, rules))
    assert same("a:2;b:4", "batch:a")
    assert same("a:2;b:2;c:2", "length:b;batch:a")
    assert same("a:4;b:2", "batch:b")  # on another axis, in as many parts
    assert not same("a:4;b:2", "batch:a")
    assert not same("a:2;b:4", "batch:b")
    assert not same("a:2;b:4", "")


def test_who_looks_for_the_axis_sees_which_one_it_is():
    reads = asked(lambda mesh_shape, layout: impl(mesh_shape, layout).tensor_dimension_to_mesh_axis(BATCH))
    mesh = parse_mesh_shape("a:4;b:2")
    assert not reads.same_for(mesh, parse_rules("batch:b", mesh), ("a:4;b:2", "batch:b"))


def test_a_dim_that_is_split_no_further_is_as_if_it_were_whole():
    reads = asked(lambda mesh_shape, layout: mtf.tensor_dim_to_mesh_dim_size(layout, mesh_shape, LENGTH))
    mesh = parse_mesh_shape("a:8;b:1")
    assert reads.same_for(mesh, parse_rules("length:b", mesh), ("a:8;b:1", "length:b"))


def _reads_of_attention(mesh_shape, rules):
    """What is asked by an attention of Mesh-TF's transformers, and the dims of what it makes."""
    heads, length, memory, key = (mtf.Dimension(*dim) for dim in (("heads", 8), ("length", 8), ("memory_length", 8),
                                                                  ("d_kv", 4)))
    mesh = parse_mesh_shape(mesh_shape)
    with tf.Graph().as_default(), watched(mesh, parse_rules(rules, mesh), (mesh_shape, rules)) as (reads, given):
        graph = mtf.Graph()
        q, k, v, bias = (mtf.zeros(mtf.Mesh(graph, "mesh"), mtf.Shape([BATCH, *dims])) for dims in (
            (length, heads, key), (memory, heads, key), (memory, heads, key), (heads, length, memory)))
        context = types.SimpleNamespace(model=types.SimpleNamespace(**given), train=False)
        attention.attention(q, k, v, memory, key, key, bias, dropout_broadcast_dims=[], context=context)
    return reads, {name for operation in graph.operations for tensor in operation.outputs
                   for name in tensor.shape.dimension_names}


@pytest.mark.parametrize(("others", "same"), [
    (("model:8", "heads:model;d_ff:model"), True),
    (("rows:2;cols:4", "vocab:rows;heads:rows;batch:cols"), True),
    (("rows:2;cols:4", "batch:rows"), True),  # nothing is on the axis that is left
    (("rows:2;cols:4", "d_model:rows;heads:cols"), False),  # a new dim d_model, of the batch's
    (("rows:2;cols:4", "batch:rows;heads:rows"), False)])  # which it refuses
def test_attention_is_another_where_it_cuts_its_inputs(others, same):
    reads, dims = _reads_of_attention("rows:8", "")
    mesh = parse_mesh_shape(others[0])
    assert reads.same_for(mesh, parse_rules(others[1], mesh), others) is same
    if same:
        assert _reads_of_attention(*others)[1] == dims
    elif "d_model" in others[1]:
        assert _reads_of_attention(*others)[1] == dims | {"d_model"}


def test_mesh_tensorflow_is_as_before_after_it():
    before = mtf.Shape.__init__, mtf.LayoutRules.__init__, mtf.ops._parse_string_to_list_of_pairs, re.sub
    with pytest.raises(ValueError, match="stop"), watched(MESH, RULES, TEXTS):
        raise ValueError("stop")
    assert before == (mtf.Shape.__init__, mtf.LayoutRules.__init__, mtf.ops._parse_string_to_list_of_pairs, re.sub)


def test_masters_are_placeholders_of_the_same_names():
    def build():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        with tf.variable_scope("model"):
            mtf.get_variable(mesh, "w", mtf.Shape([BATCH, LENGTH]))
        own = tf.get_variable("own", [2])
        return own, graph.all_variables[0]
    with tf.Graph().as_default(), placeholder_masters():
        own, variable = build()
        assert tf.global_variables() == [own]  # what the program makes by itself is made
        assert variable.get_master().op.type == "Placeholder"
        assert variable.get_master().shape.as_list() == [8, 8]
        assert variable.name == "model/w"
    with tf.Graph().as_default():
        own, variable = build()
        assert len(tf.global_variables()) == 2
        assert variable.name == "model/w"


def test_numbers_of_one_value_are_one_constant():
    def build():
        graph = mtf.Graph()
        x = mtf.zeros(mtf.Mesh(graph, "mesh"), mtf.Shape([BATCH, LENGTH]))
        y = 1.0 - (x * 0.5 + 0.5)
        y = mtf.maximum(mtf.minimum(y, 1.0), 0.5) * mtf.maximum(y, 1.0) + mtf.maximum(y, 0.5) * True
        y += mtf.cast(mtf.cast(y, tf.int32) + 1, tf.float32)
        return [(type(operation), operation.name, operation.outputs) for operation in y.graph.operations]

    def constants():
        return [operation.get_attr("value") for operation in tf.get_default_graph().get_operations()
                if operation.type == "Const"]
    with tf.Graph().as_default():
        expected, values = build(), constants()
    with tf.Graph().as_default(), shared_scalars():
        made, shared = build(), constants()
    assert [entry[:2] for entry in made] == [entry[:2] for entry in expected]
    assert [str(entry[2]) for entry in made] == [str(entry[2]) for entry in expected]
    assert {str(value) for value in shared} == {str(value) for value in values}
    assert len(shared) == len(set(map(str, shared))) < len(values)


def test_a_number_may_be_needed_in_a_loop_of_tensorflow_and_outside():
    with tf.Graph().as_default(), shared_scalars():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")

        def halved(value):
            return mtf.import_tf_tensor(mesh, value, mtf.Shape([])) * 0.5

        def body(value):
            halved(value)
            return value * 0.25
        tf.while_loop(lambda value: value > 1.0, body, [tf.constant(8.0)])
        constant = halved(tf.constant(1.0)).operation.inputs[-1].operation._tf_tensor
        assert constant.op._get_control_flow_context() is None


def test_a_program_may_save_its_variables_before_it_lowers():
    """Of placeholders TensorFlow can save nothing."""
    def build_graph():
        graph = mtf.Graph()
        w = mtf.get_variable(mtf.Mesh(graph, "mesh"), "w", mtf.Shape([BATCH, LENGTH]))
        tf.train.Saver()
        return graph, [mtf.reduce_sum(w)]
    assert find_layout(build_graph, 2, machine="h100").seconds > 0.0
