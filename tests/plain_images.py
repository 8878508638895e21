"""Parts of the networks of convolutions in plain TensorFlow."""

from __future__ import annotations

from pase_mtf.compat import tf


def convolution(x: tf.Tensor, filters: tf.Tensor, stride: int = 1, padding: str = "SAME") -> tf.Tensor:
    """Without a bias."""
    return tf.nn.conv2d(x, filters, stride, padding)


def normalization(x: tf.Tensor, parameters: dict[str, tf.Tensor], name: str, epsilon: float = 1e-5) -> tf.Tensor:
    """Batch normalisation with the parameters `name`/scale and `name`/offset."""
    mean, variance = tf.nn.moments(x, [0, 1, 2])
    return tf.nn.batch_normalization(
        x, mean, variance, parameters[f"{name}/offset"], parameters[f"{name}/scale"], epsilon)


def classification(x: tf.Tensor, parameters: dict[str, tf.Tensor], labels: tf.Tensor,
                   scope: str = "classifier") -> tf.Tensor:
    """The end of the networks: mean over the image, logits, mean cross-entropy."""
    logits = tf.reduce_mean(x, [1, 2]) @ parameters[f"{scope}/weights"] + parameters[f"{scope}/bias"]
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(logits=logits, labels=labels))
