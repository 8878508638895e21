"""Nodes, lowering time and first step of our lowering against stock Mesh-TF, for the same layout.

    python -m benchmarks.lowering

Both lower the same model with the same uniform layout, in turns; the first step includes what a session does once per
graph. Writes docs/benchmarks/lowering.md.
"""

import argparse
import collections
import platform
import statistics
import time

from benchmarks import markdown
from benchmarks.speedup import FOLDER
from pase_mtf.compat import mtf, placement_mesh_impl, tf
from pase_mtf.files import write_atomically
from pase_mtf.lowering.lowering import PlanLowering
from pase_mtf.lowering.plans import uniform_plan
from pase_mtf.runtime import describe_host


def transformer(mesh: mtf.Mesh, layers: int, scale: int, devices: int) -> mtf.Tensor:
    """A stack of self-attention and feed-forward blocks; returns the loss."""
    examples = max(16, devices)
    batch, length, memory = mtf.Dimension("batch", examples), mtf.Dimension("length", 16), mtf.Dimension("memory", 16)
    model, key = mtf.Dimension("model", 32 * scale), mtf.Dimension("key", 8 * scale)
    heads = mtf.Dimension("heads", max(8, devices))
    ff, vocabulary = mtf.Dimension("ff", 64 * scale), mtf.Dimension("vocabulary", 512)

    def variable(name: str, dims: list) -> mtf.Tensor:
        return mtf.get_variable(mesh, name, mtf.Shape(dims), initializer=tf.random_normal_initializer(stddev=0.05))

    def normalize(x: mtf.Tensor, name: str) -> mtf.Tensor:
        x -= mtf.reduce_mean(x, reduced_dim=model)
        return x * mtf.rsqrt(mtf.reduce_mean(mtf.square(x), reduced_dim=model) + 1e-3) * variable(name, [model])

    tokens = tf.random.uniform([examples, 16], 0, 512, tf.int32)
    tokens = mtf.import_tf_tensor(mesh, tokens, mtf.Shape([batch, length]))
    x = mtf.gather(variable("embedding", [vocabulary, model]), tokens, vocabulary)
    for layer in range(layers):
        y = normalize(x, f"norm_a{layer}")
        q, k, v = (mtf.einsum([y, variable(f"{name}{layer}", [model, heads, key])], [batch, heads, length, key])
                   for name in "qkv")
        k, v = (mtf.rename_dimension(t, "length", "memory") for t in (k, v))
        weights = mtf.softmax(mtf.einsum([q, k], [batch, heads, length, memory]), memory)
        y = mtf.einsum([weights, v], [batch, length, heads, key])
        x += mtf.einsum([y, variable(f"o{layer}", [heads, key, model])], [batch, length, model])
        y = mtf.einsum([normalize(x, f"norm_b{layer}"), variable(f"in{layer}", [model, ff])], [batch, length, ff])
        x += mtf.einsum([mtf.relu(y), variable(f"out{layer}", [ff, model])], [batch, length, model])
    logits = mtf.einsum([x, variable("softmax_w", [model, vocabulary])], [batch, length, vocabulary])
    targets = mtf.one_hot(tokens, vocabulary)
    return mtf.reduce_mean(mtf.layers.softmax_cross_entropy_with_logits(logits, targets, vocabulary))


def mlp(mesh: mtf.Mesh, layers: int, scale: int, devices: int) -> mtf.Tensor:
    """Dense layers with biases; returns the loss."""
    examples = max(64, devices)
    batch, classes = mtf.Dimension("batch", examples), mtf.Dimension("classes", 16)
    width = mtf.Dimension("model", 64 * scale)
    x = mtf.import_tf_tensor(mesh, tf.random.normal([examples, 64 * scale]), mtf.Shape([batch, width]))
    for layer in range(layers):
        following = mtf.Dimension("ff" if layer % 2 == 0 else "model", 64 * scale)
        x = mtf.layers.dense(x, [following], activation=mtf.relu, name=f"dense{layer}")
    logits = mtf.layers.dense(x, [classes], name="logits")
    labels = mtf.import_tf_tensor(mesh, tf.random.uniform([examples], 0, 16, tf.int32), mtf.Shape([batch]))
    return mtf.reduce_mean(mtf.layers.softmax_cross_entropy_with_logits(logits, mtf.one_hot(labels, classes), classes))


LAYOUTS = {"data parallel": ("all:{p}", "batch:all"), "model parallel": ("all:{p}", "ff:all;heads:all;vocabulary:all"),
           "mixed": ("rows:2;cols:{h}", "batch:rows;ff:cols;heads:cols;vocabulary:cols")}


def measure(model: str, layout: str, ours: bool, options: argparse.Namespace) -> dict[str, float]:
    """One lowering in a graph of its own: nodes, seconds to lower, seconds of the first step, later step."""
    devices = [f"/device:CPU:{number}" for number in range(options.devices)]
    shape, rules = (text.format(p=options.devices, h=options.devices // 2) for text in LAYOUTS[layout])
    with tf.Graph().as_default() as tf_graph:
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        loss = {"transformer": transformer, "mlp": mlp}[model](
            mesh, options.layers, options.scale, options.devices)
        variables = graph.trainable_variables
        gradients = mtf.gradients([loss], [variable.outputs[0] for variable in variables])
        optimizer = mtf.optimize.AdamWeightDecayOptimizer(1e-3)
        updates = optimizer.apply_grads(gradients, variables)
        before = len(tf_graph.get_operations())
        start = time.perf_counter()
        if ours:
            lowering = PlanLowering(graph, uniform_plan(graph, shape, rules, devices), devices)
        else:
            impl = placement_mesh_impl.PlacementMeshImpl(shape, rules, devices)
            lowering = mtf.Lowering(graph, {mesh: impl}, autostack=options.autostack)
        fetches = [lowering.export_to_tf_tensor(loss), [lowering.lowered_operation(op) for op in updates]]
        fill = lowering.copy_masters_to_slices()
        seconds = time.perf_counter() - start
        nodes = len(tf_graph.get_operations()) - before
        if options.kinds:
            kinds = collections.Counter(op.type for op in tf_graph.get_operations()[before:])
            print("stock" if not ours else "ours", kinds.most_common(20))
        config = tf.ConfigProto(device_count={"CPU": options.devices})
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        with tf.Session(config=config) as session:
            session.run(tf.global_variables_initializer())
            session.run(fill)
            start = time.perf_counter()
            session.run(fetches)
            first = time.perf_counter() - start
            steps = []
            for _ in range(options.steps):
                start = time.perf_counter()
                session.run(fetches)
                steps.append(time.perf_counter() - start)
    return {"nodes": nodes, "lower s": seconds, "first step s": first, "step ms": 1e3 * statistics.median(steps)}


def main() -> None:
    """Measures, and prints and writes one table: model, layout, and the numbers of either lowering."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=8, help="number of virtual CPU devices")
    parser.add_argument("--layers", type=int, default=2, help="layers of either model")
    parser.add_argument("--scale", type=int, default=1, help="factor on the widths")
    parser.add_argument("--steps", type=int, default=5, help="steps after the first, of which the median is shown")
    parser.add_argument("--autostack", action=argparse.BooleanOptionalAction, default=True,
                        help="let stock Mesh-TF stack small variables (its default)")
    parser.add_argument("--kinds", action="store_true", help="print the commonest kinds of nodes")
    parser.add_argument("--repeats", type=int, default=3, help="lowerings of each kind, of which the median counts")
    parser.add_argument("--output", default=str(FOLDER / "lowering.md"), help="empty: print only")
    options = parser.parse_args()
    head = ["model", "layout", "nodes, stock", "ours", "lowering, stock", "ours", "first step, stock", "ours",
            "later step, stock", "ours"]
    found: list[list[str]] = []
    for model in ("mlp", "transformer"):
        for layout in LAYOUTS:
            rows: dict[bool, list[dict[str, float]]] = {False: [], True: []}
            for _ in range(options.repeats):
                for ours in rows:
                    rows[ours].append(measure(model, layout, ours, options))
            cells = []
            for what, form in (("nodes", "{:.0f}"), ("lower s", "{:.2f} s"), ("first step s", "{:.2f} s"),
                               ("step ms", "{:.0f} ms")):
                cells += [form.format(statistics.median(row[what] for row in rows[ours])) for ours in rows]
            found.append([model, layout, *cells])
            print(", ".join(f"{title} {cell}" for title, cell in zip(head, found[-1], strict=True)), flush=True)
    table = markdown.table(head, found, left=(0, 1))
    print(table)
    if options.output:
        write_atomically(options.output, "\n".join([
            "# Lowering beside stock Mesh-TensorFlow", "", table, "",
            f"The same uniform layout, {options.devices} virtual CPU devices, {options.layers} layers, Adam; medians "
            f"of {options.repeats} lowerings of each, in turns. {describe_host()}; TensorFlow {tf.__version__}, Python "
            f"{platform.python_version()}. Reproduce with `python -m benchmarks.lowering`.", ""]))


if __name__ == "__main__":
    main()
