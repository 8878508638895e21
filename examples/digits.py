"""A classifier of 28 x 28 digits; its image is cut into blocks of rows and columns that can lie on different devices.

    python examples/digits.py --mesh_shape="all:8" --layout="batch:all"
    python examples/digits.py --mesh_shape="rows:2;cols:4" --layout="row_blocks:rows;col_blocks:cols;hidden2:cols"

An ordinary Mesh-TensorFlow program: mesh shape and layout rules are flags. What the best ones are:

    python -m pase_mtf.layout --graph=examples.digits:build_graph --mesh=8
"""

import argparse

import numpy as np

from pase_mtf.compat import mtf, placement_mesh_impl, tf

BATCH, CLASSES = 64, 10
BATCH_DIM = mtf.Dimension("batch", BATCH)
ROW_BLOCKS, ROWS = mtf.Dimension("row_blocks", 4), mtf.Dimension("rows", 7)
COL_BLOCKS, COLS = mtf.Dimension("col_blocks", 4), mtf.Dimension("cols", 7)


def loss_of(mesh: mtf.Mesh, images: tf.Tensor, labels: tf.Tensor) -> mtf.Tensor:
    """Two convolutions over the blocks, two fully connected layers, cross entropy."""
    x = mtf.import_tf_tensor(mesh, tf.reshape(images, [BATCH, 4, 7, 4, 7, 1]), mtf.Shape(
        [BATCH_DIM, ROW_BLOCKS, ROWS, COL_BLOCKS, COLS, mtf.Dimension("one_channel", 1)]))
    x = mtf.transpose(x, [BATCH_DIM, ROW_BLOCKS, COL_BLOCKS, ROWS, COLS, x.shape.dims[-1]])
    for number in range(2):
        x = mtf.relu(mtf.layers.conv2d_with_blocks(
            x, mtf.Dimension(f"filters{number}", 16), filter_size=(5, 5), h_blocks_dim=ROW_BLOCKS,
            w_blocks_dim=COL_BLOCKS, name=f"conv{number}"))
    x = mtf.reduce_mean(x, reduced_dim=x.shape.dims[-1])
    for number, dim in enumerate((mtf.Dimension("hidden", 512), mtf.Dimension("hidden2", 512))):
        x = mtf.layers.dense(x, dim, reduced_dims=x.shape.dims[1:], activation=mtf.relu, name=f"dense{number}")
    classes = mtf.Dimension("classes", CLASSES)
    logits = mtf.layers.dense(x, classes, name="logits")
    targets = mtf.one_hot(mtf.import_tf_tensor(mesh, labels, mtf.Shape([BATCH_DIM])), classes)
    return mtf.reduce_mean(mtf.layers.softmax_cross_entropy_with_logits(logits, targets, classes))


def build() -> tuple[mtf.Mesh, dict[str, tf.Tensor], mtf.Tensor, list[mtf.Operation]]:
    """The training step: mesh, what to feed, loss, updates."""
    mesh = mtf.Mesh(mtf.Graph(), "digits")
    feeds = {"images": tf.placeholder(tf.float32, [BATCH, 28, 28]), "labels": tf.placeholder(tf.int32, [BATCH])}
    loss = loss_of(mesh, feeds["images"], feeds["labels"])
    variables = mesh.graph.trainable_variables
    gradients = mtf.gradients([loss], [variable.outputs[0] for variable in variables])
    updates = mtf.optimize.AdafactorOptimizer(learning_rate=0.01).apply_grads(gradients, variables)
    return mesh, feeds, loss, updates


def build_graph() -> tuple[mtf.Graph, list[mtf.Tensor]]:
    """What is to be laid out."""
    mesh, _, loss, _ = build()
    return mesh.graph, [loss]


def batch_of(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Made-up digits: a noisy bright square, whose place is the label."""
    labels = rng.integers(0, CLASSES, BATCH)
    images = rng.normal(0, 1, [BATCH, 28, 28])
    for image, label in zip(images, labels, strict=True):
        image[7 * (label // 4):7 * (label // 4 + 1), 7 * (label % 4):7 * (label % 4 + 1)] += 1
    return {"images": images.astype(np.float32), "labels": labels.astype(np.int32)}


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
