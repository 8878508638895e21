"""Layers of two kinds, one after the other: hidden dims of even and of odd layers, which can lie on different axes.

    python examples/toy.py --mesh_shape="all:8" --layout="batch:all"
    python examples/toy.py --mesh_shape="rows:2;cols:4" --layout="even:rows;odd:cols"

An ordinary Mesh-TensorFlow program: mesh shape and layout rules are flags. What the best ones are:

    python -m pase_mtf.layout --graph=examples.toy:build_graph --mesh=8
"""

import argparse

import numpy as np

from pase_mtf.compat import mtf, placement_mesh_impl, tf

LAYERS = 4
BATCH_DIM = mtf.Dimension("batch", 64)
IO = mtf.Dimension("io", 16)
EVEN, ODD = mtf.Dimension("even", 1024), mtf.Dimension("odd", 1024)


def build() -> tuple[mtf.Mesh, dict[str, tf.Tensor], mtf.Tensor, list[mtf.Operation]]:
    """The training step: mesh, what to feed, loss, updates. The net learns to give back what it is given."""
    mesh = mtf.Mesh(mtf.Graph(), "toy")
    feeds = {"x": tf.placeholder(tf.float32, [BATCH_DIM.size, IO.size])}
    x = mtf.import_tf_tensor(mesh, feeds["x"], mtf.Shape([BATCH_DIM, IO]))
    y = x
    for number in range(LAYERS):
        y = mtf.layers.dense(y, ODD if number % 2 else EVEN, activation=mtf.relu, name=f"layer{number}")
    y = mtf.layers.dense(y, IO, name="out")
    loss = mtf.reduce_mean(mtf.square(y - x))
    variables = mesh.graph.trainable_variables
    gradients = mtf.gradients([loss], [variable.outputs[0] for variable in variables])
    updates = mtf.optimize.SgdOptimizer(0.1).apply_grads(gradients, variables)
    return mesh, feeds, loss, updates


def build_graph() -> tuple[mtf.Graph, list[mtf.Tensor]]:
    """What is to be laid out."""
    mesh, _, loss, _ = build()
    return mesh.graph, [loss]


def batch_of(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random numbers."""
    return {"x": rng.standard_normal([BATCH_DIM.size, IO.size]).astype(np.float32)}


def main() -> None:
    """Trains on virtual devices."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh_shape", default="all:8", help="axes of the mesh and their sizes")
    parser.add_argument("--layout", default="batch:all", help="dims of tensors and the axes they are split over")
    parser.add_argument("--steps", type=int, default=20)
    flags = parser.parse_args()
    mesh_shape = mtf.convert_to_shape(flags.mesh_shape)
    with tf.Graph().as_default():
        mesh, feeds, loss, updates = build()
        implementation = placement_mesh_impl.PlacementMeshImpl(
            mesh_shape, mtf.convert_to_layout_rules(flags.layout),
            [f"/device:CPU:{number}" for number in range(mesh_shape.size)])
        lowering = mtf.Lowering(mesh.graph, {mesh: implementation})
        fetches = [lowering.export_to_tf_tensor(loss), [lowering.lowered_operation(update) for update in updates]]
        rng = np.random.default_rng(0)
        with tf.Session(config=tf.ConfigProto(device_count={"CPU": mesh_shape.size})) as session:
            session.run(tf.global_variables_initializer())
            session.run(lowering.copy_masters_to_slices())
            for step in range(flags.steps):
                batch = batch_of(rng)
                value, _ = session.run(fetches, {feeds[name]: batch[name] for name in feeds})
                print(f"step {step} loss {value:.4f}")


if __name__ == "__main__":
    main()
