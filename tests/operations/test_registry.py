"""One rule per Operation class: what is known of Mesh-TF's own classes, and of those that users register."""

import ast
import pathlib

import pytest
from nets import Builder, dim

from pase_mtf.compat import mtf, tf
from pase_mtf.errors import UsageError
from pase_mtf.export import exporter
from pase_mtf.export.exporter import export_graph
from pase_mtf.operations import facts, registry
from pase_mtf.operations.facts import read_operations
from pase_mtf.operations.registry import is_known, register_operation, rule_of, splittable_dims

ops = mtf.ops


@pytest.fixture
def builder():
    with tf.Graph().as_default():
        yield Builder(tf.float32)


@pytest.fixture
def rules(monkeypatch):
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    monkeypatch.setattr(registry, "_RESOLVED", {})


class Reversed(mtf.Operation):
    """A class of a user's, with a lowering of its own."""

    def __init__(self, x):
        super().__init__([x], name="reversed")
        self._outputs = [mtf.Tensor(self, x.shape, x.dtype)]

    def lower(self, lowering):
        """Turns the last dim round."""
        lowering.set_tensor_lowering(self.outputs[0], lowering.mesh_impl(self).slicewise(
            lambda x: tf.reverse(x, [-1]), lowering.tensors[self.inputs[0]]))


class Scaled(mtf.EinsumOperation):
    """A class of a user's that keeps the lowering of its parent."""


def test_every_operation_class_of_mesh_tf_has_a_rule():
    own = {value for value in vars(ops).values()
           if isinstance(value, type) and issubclass(value, mtf.Operation) and value is not mtf.Operation}
    assert len(own) > 40
    assert own - set(registry._RULES) == set()


def _told_of_classes(file, names):
    """Lines of a file that name a class of Mesh-TF's operations, in code or as a string, but for the types' sake."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    told = [node for node in ast.walk(tree) if (
        node.attr in names and ast.unparse(node.value) in ("mtf", "mtf.ops", "_ops", "ops")
        if isinstance(node, ast.Attribute) else
        isinstance(node, ast.Constant) and node.value in names and str(node.value).endswith("Operation"))]
    types = {id(inner) for node in (ast.walk(tree) if told else ())
             for part in (getattr(node, "annotation", None), getattr(node, "returns", None)) if part is not None
             for inner in ast.walk(part)}
    return [f"{file}:{node.lineno}: {ast.unparse(node)}" for node in told if id(node) not in types]


def test_operations_alone_know_operation_classes(repository):
    names = {cls.__name__ for cls in registry._RULES if cls.__module__ == ops.__name__}
    assert {"Assign", "WhileLoopOperation"} <= names
    files = [file for folder in ("pase_mtf", "launch") for file in pathlib.Path(repository / folder).rglob("*.py")
             if "operations" not in file.parts]
    told = [line for file in files for line in _told_of_classes(file, names)]
    # Whose constructor is replaced while a graph is only looked at.
    assert [line for line in told if "layout/masters.py" not in line] == []


def test_an_operation_is_read_once_per_export(builder, monkeypatch):
    x, w = builder.input("x", [dim("a", 4), dim("b", 8)]), builder.variable("w", [dim("b", 8), dim("c", 8)])
    loss = mtf.reduce_sum(mtf.relu(mtf.einsum([x, w], [dim("a", 4), dim("c", 8)])))
    mtf.gradients([loss], [w])
    read = []
    monkeypatch.setattr(facts._Reader, "read", lambda reader, operation, *rest, original=facts._Reader.read: (
        read.append(operation), original(reader, operation, *rest))[1])
    monkeypatch.setattr(exporter, "read_operations", facts.read_operations)
    export_graph(builder.graph)
    assert read == list(builder.graph.operations)


@pytest.mark.parametrize("stride", [1, 2, 4])
def test_transposed_convolutions_do_the_multiply_adds_of_their_input(builder, stride):
    batch, height, width, inner, outer = 2, 6, 6, 3, 5
    image = builder.variable("x", [dim("batch", batch), dim("h", height), dim("w", width), dim("in", inner)])
    filters = builder.variable("filters", [dim("fh", 3), dim("fw", 3), dim("out", outer), dim("in", inner)])
    y = ops.Conv2dTransposeOperation(image, filters, [1, stride, stride, 1], "SAME").outputs[0]
    mtf.gradients([mtf.reduce_sum(mtf.square(y))], [image, filters])
    found = {fact.role: fact.flops for fact in read_operations(builder.graph) if fact.kind == "convolution"}
    # Every pixel of the input times the window, for every output channel; the gradients do the same the other ways.
    expected = 2.0 * batch * height * width * inner * outer * 3 * 3
    assert found == {"transposed convolution": expected, "convolution": expected, "filter gradient": expected}


def test_the_gradient_of_a_function_leaves_partial_sums_per_output(builder):
    batch, hidden = dim("batch", 8), dim("hidden", 4)
    x, bias = builder.variable("x", [batch, hidden]), builder.variable("bias", [hidden])
    y = mtf.slicewise(lambda x, bias: tf.nn.relu(x + bias), [x, bias], output_shape=x.shape,
                      splittable_dims=x.shape.dims)
    gradients = mtf.gradients([mtf.reduce_sum(y)], [x, bias])
    for variable, gradient in zip((x, bias), gradients, strict=True):
        mtf.assign_sub(variable.operation, gradient)
    graph = export_graph(builder.graph)
    (found,) = [operation for layer in graph.layers for operation in layer.operations
                if operation.type == "GenericGradOperation"]
    assert found.reduced == ()
    assert found.partial_sums == ((), ("batch",))
    ((dims, outputs),) = found.sums
    assert dims == ("batch",)
    assert [operand.shape for operand in outputs] == [(4,)]


@pytest.mark.usefixtures("rules")
def test_one_call_tells_all_of_a_class(builder):
    x = builder.input("x", [dim("a", 8), dim("b", 4)])
    operation = Reversed(x)
    assert not is_known(operation)
    assert splittable_dims(operation) == {"a"}  # found by trying
    register_operation(Reversed, splittable=["b"], kind="gather", flops=lambda operation: 7.0,
                       contracted=lambda operation: [("b",)])
    assert is_known(operation)
    assert splittable_dims(operation) == {"b"}
    (fact,) = [fact for fact in read_operations(builder.graph) if fact.operation is operation]
    assert (fact.kind, fact.flops, fact.layer, fact.contracted) == ("gather", 7.0, "gather", (("b",),))


@pytest.mark.usefixtures("rules")
def test_a_class_that_keeps_its_parents_lowering_keeps_its_rule(builder):
    x, w = builder.input("x", [dim("a", 4), dim("b", 8)]), builder.variable("w", [dim("b", 8), dim("c", 8)])
    operation = Scaled([x, w], mtf.Shape([dim("a", 4), dim("c", 8)]))
    assert rule_of(operation) is registry._RULES[mtf.EinsumOperation]
    register_operation(Scaled, splittable=lambda operation: ["a"])
    rule = rule_of(operation)
    assert rule.splittable(operation) == ["a"]
    assert rule.kind(operation) == "matmul"
    assert rule.lower is registry._RULES[mtf.EinsumOperation].lower


@pytest.mark.usefixtures("rules")
@pytest.mark.parametrize(("arguments", "words"), [
    ((int,), "not a subclass of mesh_tensorflow"),
    ((Reversed, "matmull"), "kind='matmull' of Reversed is unknown; choose from matmul"),
])
def test_wrong_registrations_are_answered(arguments, words):
    cls, *kind = arguments
    with pytest.raises(UsageError, match=words):
        register_operation(cls, splittable=[], kind=kind[0] if kind else None)


@pytest.mark.usefixtures("rules")
def test_splittable_is_a_list_or_a_function():
    with pytest.raises(UsageError, match=r"splittable='a': is one str; give a list"):
        register_operation(Reversed, splittable="a")


class Weighted(mtf.ops.AddOperation):
    """A class of a user's with a lowering of its own, to which parts of sums are added up first."""

    def lower(self, lowering):
        """Adds the second twice."""
        lowering.set_tensor_lowering(self.outputs[0], lowering.mesh_impl(self).slicewise(
            lambda x, y: x + 2.0 * y, *(lowering.tensors[tensor] for tensor in self.inputs)))


@pytest.mark.usefixtures("rules")
@pytest.mark.parametrize("registered", [False, True])
def test_a_class_with_a_lowering_of_its_own_does_not_pass_sums_on_as_its_parent_does(builder, registered):
    x = builder.input("x", [dim("a", 4)])
    if registered:
        register_operation(Weighted, splittable=["a"])
    rule = rule_of(Weighted(x, x, x.shape))
    assert (rule.forwards_sums, rule.is_view, rule.is_same) == (False, False, False)
