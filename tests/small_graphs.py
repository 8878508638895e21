"""Small computation graphs, made by hand."""

import itertools

from pase_mtf.graph.computation_graph import ComputationGraph, Edge, Layer, LayerOperation, Operand, Variable
from pase_mtf.graph.spans import Held


def dense(name, batch, inputs, outputs, *, dims=("batch", "in", "out"), training=True):
    """A fully connected layer: forward product, both gradients, and the update of its weights by SGD. At moment 1 of a
    step all of it is there."""
    b, i, o = dims
    x, w, y = (Operand((b, i), (batch, inputs)), Operand((i, o), (inputs, outputs)), Operand((b, o), (batch, outputs)))
    flops = 2.0 * batch * inputs * outputs
    everything = (b, i, o)

    def product(number, kind, phase, ins, out, reduced, held):
        return LayerOperation(number, f"{name}/{kind}", "EinsumOperation", phase, "matmul", flops, everything, ins,
                              (out,), reduced, held=(held,))

    operations = [product(0, "forward", "forward", (x, w), y, (i,), Held(0, 0, 1))]
    if training:
        operations += [
            product(1, "input_gradient", "backward", (y, w), x, (o,), Held(0, 1, 1)),
            product(2, "weight_gradient", "backward", (x, y), w, (b,), Held(0, 1, 1, waits_until=1)),
            LayerOperation(3, f"{name}/assign", "Assign", "update", "pointwise", float(inputs * outputs), (i, o),
                           (w, w), ())]
    sizes = {b: batch, i: inputs, o: outputs}
    return Layer(name, "matmul", sizes, everything, tuple(operations), (Variable(f"{name}/w", w, True),))


def perceptron(widths=(64, 128, 32, 64), batch=32, training=True):
    """Dense layers in a row; every layer names its dims in its own way."""
    layers, edges = [], []
    for number, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        layers.append(dense(f"dense{number}", batch, inputs, outputs,
                            dims=("batch", f"width{number}", f"width{number + 1}"), training=training))
        if number:
            dims = ("batch", f"width{number}")
            edges.append(Edge(number - 1, number, f"hidden{number}", "forward", (batch, inputs), 4, dims, dims))
            if training:
                edges.append(Edge(number, number - 1, f"gradient{number}", "backward", (batch, inputs), 4, dims, dims))
    return ComputationGraph("perceptron", tuple(layers), tuple(edges), 4 * len(layers))
