"""DenseNet-121 as a computation graph, made without TensorFlow: the graph that no elimination order makes easy.

Huang et al. 2017 (arXiv 1608.06993): four blocks of 6, 12, 24 and 16 layers, each layer a 1x1 and a 3x3 convolution
that adds 32 channels to what all layers before it in the block have made. Here every one of those tensors has an edge
to every concatenation that uses it (`direct`), as in the network `densenet-direct` of the tests, so that each block is
uniformly dense; or the concatenations are done one by one (`direct=False`, `densenet-chain`).

Layers, dims, configurations and edges are those of that network, in the same order. What a layer is said to do is what
the paper's cost model needs (its forward pass; the model itself charges the backward pass). Of the 306 cost vectors 243
are the network's own; where our model of the same formulas and the tool that made the network differ:

- the tool prices a normalisation as layer normalisation: sums per image, and a scale and a bias for every channel and
  pixel, whose gradients are then summed over the batch's parts. So does this one with `normalization="layer"`; with
  "batch", the sums run over batch, height and width, and scale and bias have an entry per channel;
- the gradient of a convolution's input is summed as the tensor that it is, not once per position of the kernel;
- pooling costs nothing more where height or width is split; the tool has neighbours exchange what windows share;
- the softmax's sums are all-reduced as everything else is;
- what a tensor costs on its way back is counted on the way back; the tool takes twice the way there. Where a block lies
  is decided by the order of a configuration's axes, here batch first; the tool places blocks by greatest overlap.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from pase_mtf.graph.computation_graph import ComputationGraph, Edge, Layer, LayerOperation, Operand, Variable
from pase_mtf.graph.configurations import Configuration
from pase_mtf.machine.machine import KINDS, Link, Machine

__all__ = ["BLOCKS", "densenet", "paper_configurations", "paper_machine"]

BLOCKS = (6, 12, 24, 16)
# FLOP per element, forward and backward together, as the paper's tool counts them.
_NORMALIZE, _POOL, _SOFTMAX = 16.0, 1.0, 4.0
# The paper's cost model multiplies the forward pass by three.
_PASSES = 3.0
# Outside attention models, a part keeps at least so many elements of a dim.
_LEAST = 4


def paper_machine() -> Machine:
    """The machine of the networks in tests/data/instances: a word costs 5000 FLOP."""
    rate = 10e12
    return Machine("paper", dict.fromkeys(KINDS, rate), memory_bandwidth=1e15,
                   memory_bytes=1e12, overhead=0.0, links=(Link(1 << 20, rate / 5000.0, 0.0),),
                   source="10 TFLOPS, 5000 FLOP for every word sent: what the paper's tool made its networks with")


def paper_configurations(layer: Layer, devices: int, *, every_divisor: bool = False,
                         least: int = _LEAST) -> tuple[Configuration, ...]:
    """The configurations of the paper: how many parts, in no particular order, on at most p devices.

    Args:
      layer: whose splittable dims are split.
      devices: p.
      every_divisor: also splits such as 7 of 56, as the paper has them; without, only those that divide p.
      least: elements of a dim that a part keeps.

    Returns:
      Configurations whose axes stand in the order of the layer's dims.
    """
    names = [name for name in layer.dims if name in layer.splittable]
    choices = [[parts for parts in range(1, devices + 1)
                if parts == 1 or (layer.dims[name] % parts == 0 and layer.dims[name] // parts >= least
                                  and (every_divisor or devices % parts == 0))] for name in names]
    return tuple(Configuration(tuple((name, count) for name, count in zip(names, parts, strict=True) if count > 1))
                 for parts in itertools.product(*choices) if math.prod(parts) <= devices)


class _Maker:
    """Puts layers and edges together; a tensor is known by its layer."""

    def __init__(self, batch: int, normalization: str) -> None:
        self.batch, self._normalization = batch, normalization
        self.layers: list[Layer] = []
        self.edges: list[Edge] = []
        self.made: list[Operand] = []  # per layer, what it makes: [batch, channels, height, width]
        self._counted = 0

    def add(self, name: str, kind: str, dims: dict[str, int], splittable: Sequence[str],
            reads: Sequence[tuple[int, tuple[str, ...]]], output: Operand, operations: Sequence[dict],
            weights: Sequence[Operand] = ()) -> int:
        """Appends a layer, and an edge for every (layer, dims in this one) that it reads; returns its index."""
        made = []
        for entry in operations:
            made.append(LayerOperation(self._counted, f"{name}/{entry['type']}", phase="forward", **entry))
            self._counted += 1
        variables = tuple(Variable(f"{name}/{number}", weight, True) for number, weight in enumerate(weights))
        index = len(self.layers)
        self.layers.append(Layer(name, kind, dims, tuple(splittable), tuple(made), variables))
        self.made.append(output)
        for source, target_dims in reads:
            tensor = self.made[source]
            self.edges.append(Edge(source, index, self.layers[source].name, "forward", tensor.shape, tensor.itemsize,
                                   tensor.dims, target_dims))
        return index

    def convolution(self, name: str, source: int | None, channels: int, filters: int, size: int, kernel: int) -> int:
        """A convolution to images of size x size; height and width stay whole, as in the paper."""
        before = self.made[source].shape[2] if source is not None else 2 * size
        x = Operand(("batch", "in", "", ""), (self.batch, channels, before, before))
        w = Operand(("in", "out", "", ""), (channels, filters, kernel, kernel))
        y = Operand(("batch", "out", "", ""), (self.batch, filters, size, size))
        dims = {"batch": self.batch, "in": channels, "out": filters, "height": size, "width": size}
        flops = 2.0 * math.prod(y.shape) * channels * kernel ** 2
        return self.add(name, "convolution", dims, ("batch", "in", "out"), [] if source is None else [(source, x.dims)],
                        y, [{"type": "Conv2dOperation", "kind": "convolution", "flops": flops,
                             "dims": ("batch", "in", "out"), "inputs": (x, w), "outputs": (y,), "reduced": ("in",)}],
                        [w])

    def normalize(self, name: str, source: int) -> int:
        """A normalisation and the ReLU behind it."""
        shape = self.made[source].shape
        x = Operand(("batch", "channels", "height", "width"), shape)
        # Mean and variance and their gradients; scale and bias and their gradients: 4 numbers each.
        if self._normalization == "batch":
            kept = [(("channels",), x.dims[:1] + x.dims[2:])]
        else:
            kept = [(("batch",), x.dims[1:]), (x.dims[1:], x.dims[:1])]
        operations = []
        for dims, reduced in kept:
            sums = Operand(("", *dims), (4, *(size for dim, size in zip(x.dims, shape, strict=True) if dim in dims)))
            operations.append({"type": "ReduceOperation", "kind": "reduction", "flops": 0.0, "dims": x.dims,
                               "inputs": (x,), "outputs": (sums,), "reduced": reduced})
        operations.append({"type": "Normalize", "kind": "pointwise", "flops": _NORMALIZE / _PASSES * math.prod(shape),
                           "dims": x.dims, "inputs": (x,), "outputs": (x,)})
        scale = Operand(("channels",), shape[1:2]) if self._normalization == "batch" else Operand(x.dims[1:], shape[1:])
        return self.add(name, "normalize", dict(zip(x.dims, shape, strict=True)), x.dims, [(source, x.dims)], x,
                        operations, [scale, scale])

    def pool(self, name: str, source: int, size: int) -> int:
        """Pooling to half the height and width."""
        batch, channels, _, _ = self.made[source].shape
        y = Operand(("batch", "channels", "height", "width"), (batch, channels, size, size))
        x = Operand(y.dims, self.made[source].shape)
        return self.add(name, "pool", dict(zip(y.dims, y.shape, strict=True)), y.dims, [(source, x.dims)], y, [
            {"type": "PoolOperation", "kind": "pointwise", "flops": _POOL / _PASSES * math.prod(y.shape),
             "dims": y.dims, "inputs": (x,), "outputs": (y,)}])

    def concatenate(self, name: str, sources: Sequence[int]) -> int:
        """Everything that the sources made, one behind the other; the channels stay whole."""
        shapes = [self.made[source].shape for source in sources]
        batch, _, height, width = shapes[0]
        y = Operand(("batch", "", "height", "width"), (batch, sum(shape[1] for shape in shapes), height, width))
        dims = {"batch": batch, "channels": y.shape[1], "height": height, "width": width}
        return self.add(name, "other", dims, ("batch", "height", "width"), [(source, y.dims) for source in sources], y,
                        [{"type": "ConcatOperation", "kind": "pointwise", "flops": 0.0, "dims": (), "inputs": (),
                          "outputs": (y,)}])


def densenet(batch: int = 128, *, blocks: Sequence[int] = BLOCKS, growth: int = 32, image: int = 224,
             classes: int = 1000, direct: bool = True, normalization: str = "batch") -> ComputationGraph:
    """DenseNet (with the default sizes DenseNet-121) for ImageNet.

    Args:
      batch: images per step.
      blocks: layers of every dense block.
      growth: channels that a layer adds.
      image: height and width of the images; a multiple of 32.
      classes: labels.
      direct: an edge from every earlier layer of a block to each concatenation; else concatenations in a chain.
      normalization: "batch", as DenseNet has it, or "layer", as the paper's tool prices it.

    Returns:
      The graph, forward operations only, for the cost model "pase".

    Raises:
      ValueError: another normalization.
    """
    if normalization not in ("batch", "layer"):
        raise ValueError(f"normalization={normalization!r}; give batch or layer")
    maker = _Maker(batch, normalization)
    size, channels = image // 4, 2 * growth
    x = maker.convolution("conv0", None, 3, channels, image // 2, 7)
    x = maker.pool("pool0", maker.normalize("norm0", x), size)
    for block, depth in enumerate(blocks, 1):
        parts, joined = [x], x
        for number in range(1, depth + 1):
            name = f"block{block}/layer{number}"
            y = maker.normalize(f"{name}/norm1", joined)
            y = maker.convolution(f"{name}/conv1", y, channels, 4 * growth, size, 1)
            y = maker.normalize(f"{name}/norm2", y)
            y = maker.convolution(f"{name}/conv2", y, 4 * growth, growth, size, 3)
            parts.append(y)
            joined = maker.concatenate(f"{name}/concat", parts if direct else [joined, y])
            channels += growth
        x = maker.normalize(f"transition{block}/norm" if block < len(blocks) else "norm5", joined)
        if block < len(blocks):
            x = maker.convolution(f"transition{block}/conv", x, channels, channels // 2, size, 1)
            channels, size = channels // 2, size // 2
            x = maker.pool(f"transition{block}/pool", x, size)
    _classify(maker, x, channels, size, classes)
    name = f"densenet-{'direct' if direct else 'chain'}"
    return ComputationGraph(name, tuple(maker.layers), tuple(maker.edges), sum(len(layer.operations)
                                                                              for layer in maker.layers))


def _classify(maker: _Maker, source: int, channels: int, size: int, classes: int) -> None:
    """Mean over the image, a fully connected layer, and the cross-entropy of its softmax."""
    batch = maker.batch
    x = Operand(("batch", "channels", "height", "width"), (batch, channels, size, size))
    mean = Operand(("batch", "channels"), (batch, channels))
    # 7 x 7 is too small to be split.
    pooled = maker.add("mean", "pool", dict(zip(x.dims, x.shape, strict=True)), x.dims, [(source, x.dims)], mean, [
        {"type": "ReduceOperation", "kind": "reduction", "flops": 0.0, "dims": x.dims, "inputs": (x,),
         "outputs": (mean,), "reduced": ("height", "width")}])
    x, w, y = (Operand(("batch", "in"), (batch, channels)), Operand(("in", "out"), (channels, classes)),
               Operand(("batch", "out"), (batch, classes)))
    dense = maker.add("dense", "matmul", {"batch": batch, "out": classes, "in": channels}, ("batch", "out", "in"),
                      [(pooled, x.dims)], y, [
        {"type": "EinsumOperation", "kind": "matmul", "flops": 2.0 * batch * channels * classes,
         "dims": ("batch", "in", "out"), "inputs": (x, w), "outputs": (y,), "reduced": ("in",)}],
        [w, Operand(("out",), (classes,))])
    y = Operand(("batch", "classes"), (batch, classes))
    maker.add("softmax", "normalize", {"batch": batch, "classes": classes}, y.dims, [(dense, y.dims)],
              Operand(("batch",), (batch,)), [
        {"type": "Softmax", "kind": "reduction", "flops": _SOFTMAX / _PASSES * batch * classes, "dims": y.dims,
         "inputs": (y,), "outputs": (Operand(("batch", ""), (batch, 2)),), "reduced": ("classes",)}])
