"""Fully connected layers in a chain, as of small_graphs.perceptron, but that tell of no tensors that are held."""

from pase_mtf.graph.computation_graph import ComputationGraph, Edge, Layer, LayerOperation, Operand, Variable


def _product(index, phase, flops, inputs, output, reduced):
    dims = tuple(dict.fromkeys([*output.dims, *(name for operand in inputs for name in operand.dims)]))
    return LayerOperation(index, f"op{index}", "EinsumOperation", phase, "matmul", flops, dims, tuple(inputs),
                          (output,), reduced)


def _fully_connected(number, batch, inner, outer):
    """A fully connected layer with the operations that its training step has."""
    b, c, n = ("batch", batch), inner, outer
    flops = 2.0 * batch * c[1] * n[1]

    def operand(*dims):
        return Operand(tuple(name for name, _ in dims), tuple(size for _, size in dims))

    x, w, y = operand(b, c), operand(c, n), operand(b, n)
    operations = (_product(4 * number, "forward", flops, [x, w], y, (c[0],)),
                  _product(4 * number + 1, "backward", flops, [y, w], x, (n[0],)),
                  _product(4 * number + 2, "backward", flops, [y, x], w, ("batch",)),
                  LayerOperation(4 * number + 3, "assign", "Assign", "update", "pointwise", w.shape[0] * w.shape[1],
                                 w.dims, (w,), ()))
    return Layer(f"fc{number}", "matmul", {"batch": batch, n[0]: n[1], c[0]: c[1]}, ("batch", n[0], c[0]), operations,
                 (Variable(f"w{number}", w, True),))


def layer_chain(batch=64, widths=(1024, 4096, 4096, 512)):
    """Fully connected layers one after the other."""
    dims = [(f"d{number}", width) for number, width in enumerate(widths)]
    layers = tuple(_fully_connected(number, batch, dims[number], dims[number + 1])
                   for number in range(len(widths) - 1))
    edges = []
    for number in range(len(layers) - 1):
        name, size = dims[number + 1]
        for source, target, phase in ((number, number + 1, "forward"), (number + 1, number, "backward")):
            edges.append(Edge(source, target, f"t{number}", phase, (batch, size), 4, ("batch", name), ("batch", name)))
    return ComputationGraph("chain", layers, tuple(edges), 4 * len(layers))
