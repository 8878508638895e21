"""The next word from the words before it: a large vocabulary, whose embedding and output weigh more than all the rest.

    python examples/words.py --mesh_shape="all:8" --layout="batch:all"
    python examples/words.py --mesh_shape="all:8" --layout="vocab:all"

An ordinary Mesh-TensorFlow program: mesh shape and layout rules are flags. What the best ones are:

    python -m pase_mtf.layout --graph=examples.words:build_graph --mesh=8
"""

import argparse

import numpy as np

from pase_mtf.compat import mtf, placement_mesh_impl, tf

BATCH_DIM, CONTEXT = mtf.Dimension("batch", 256), mtf.Dimension("context", 8)
VOCAB, CHANNELS, HIDDEN = mtf.Dimension("vocab", 32768), mtf.Dimension("channels", 256), mtf.Dimension("hidden", 1024)


def loss_of(mesh: mtf.Mesh, words: tf.Tensor, following: tf.Tensor) -> mtf.Tensor:
    """Embeddings of the words, a hidden layer, scores of all words, cross entropy."""
    ids = mtf.import_tf_tensor(mesh, words, mtf.Shape([BATCH_DIM, CONTEXT]))
    x = mtf.layers.embedding(ids, VOCAB, CHANNELS, tf.float32, name="embedding")
    x = mtf.layers.dense(x, HIDDEN, reduced_dims=[CONTEXT, CHANNELS], activation=mtf.relu, name="hidden")
    logits = mtf.layers.dense(x, VOCAB, use_bias=False, name="logits")
    targets = mtf.one_hot(mtf.import_tf_tensor(mesh, following, mtf.Shape([BATCH_DIM])), VOCAB)
    return mtf.reduce_mean(mtf.layers.softmax_cross_entropy_with_logits(logits, targets, VOCAB))


def build() -> tuple[mtf.Mesh, dict[str, tf.Tensor], mtf.Tensor, list[mtf.Operation]]:
    """The training step: mesh, what to feed, loss, updates."""
    mesh = mtf.Mesh(mtf.Graph(), "words")
    feeds = {"words": tf.placeholder(tf.int32, [BATCH_DIM.size, CONTEXT.size]),
             "following": tf.placeholder(tf.int32, [BATCH_DIM.size])}
    loss = loss_of(mesh, feeds["words"], feeds["following"])
    variables = mesh.graph.trainable_variables
    gradients = mtf.gradients([loss], [variable.outputs[0] for variable in variables])
    updates = mtf.optimize.SgdOptimizer(0.5).apply_grads(gradients, variables)
    return mesh, feeds, loss, updates


def build_graph() -> tuple[mtf.Graph, list[mtf.Tensor]]:
    """What is to be laid out."""
    mesh, _, loss, _ = build()
    return mesh.graph, [loss]


def batch_of(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Made-up sentences: counting on from a word."""
    begin = rng.integers(0, 1000, BATCH_DIM.size)
    sentences = (begin[:, None] + np.arange(CONTEXT.size + 1)).astype(np.int32)
    return {"words": sentences[:, :-1], "following": sentences[:, -1]}


def main() -> None:
    """Trains on virtual devices."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh_shape", default="all:8", help="axes of the mesh and their sizes")
    parser.add_argument("--layout", default="batch:all", help="dims of tensors and the axes they are split over")
    parser.add_argument("--steps", type=int, default=10)
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
