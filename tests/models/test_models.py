"""The models against the same networks written in plain TensorFlow, and against themselves on meshes."""

import dataclasses
import json
import math
import subprocess
import sys

import harness
import numpy as np
import pytest

from pase_mtf import models
from pase_mtf.compat import mtf, tf
from pase_mtf.errors import UsageError
from pase_mtf.models import layers
from pase_mtf.models.dropout import dropout
from pase_mtf.models.presets import AlexnetConfig, Convolution, TransformerConfig

TRANSFORMER = TransformerConfig(
    preset="test", layers=2, d_model=16, heads=4, d_k=6, d_ff=24, length=8, vocab=32, batch=4, optimizer="sgd",
    learning_rate=0.1, dtype="float64")
ALEXNET = AlexnetConfig(
    # Odd sizes: 27 and 13 do not divide by their strides, pooling windows overlap.
    preset="test", image=27, image_channels=3, fully_connected=(16, 24), classes=8, batch=4, optimizer="sgd",
    learning_rate=0.1, dtype="float64", convolutions=(
        Convolution(8, 5, stride=4, padding="VALID"), Convolution(12, 3, pool=3, pool_stride=1),
        Convolution(16, 3, padding="VALID"), Convolution(8, 2, stride=2, padding="VALID")))
CONFIGS = {"transformer": TRANSFORMER, "alexnet": ALEXNET}


def _plain_alexnet(features, parameters, config):
    x = features["images"]
    for number, convolution in enumerate(config.convolutions, 1):
        x = tf.nn.conv2d(x, parameters[f"conv{number}/filters"], convolution.stride, convolution.padding)
        x = tf.nn.relu(x + parameters[f"conv{number}/bias"])
        if convolution.pool:
            x = tf.nn.max_pool2d(x, convolution.pool, convolution.pool_stride, "VALID")
    x = tf.reshape(x, [config.batch, -1])
    count = len(config.fully_connected) + 1
    for number in range(1, count + 1):
        weights = parameters[f"fc{number}/weights"]
        x = x @ tf.reshape(weights, [-1, weights.shape[-1]]) + parameters[f"fc{number}/bias"]
        if number < count:
            x = tf.nn.relu(x)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(logits=x, labels=features["labels"]))


def _plain_transformer(features, parameters, config):
    length, width = config.length, config.d_model

    def norm(x, name):
        mean, variance = tf.nn.moments(x, [-1], keepdims=True)
        return (x - mean) / tf.sqrt(variance + 1e-6) * parameters[f"{name}/scale"]

    def embed(ids, name):
        place = np.arange(length)[:, None] / 10000 ** (np.arange(width // 2) / (width // 2))
        x = tf.gather(parameters[f"{name}/table"], ids) * math.sqrt(width)
        return x + np.concatenate([np.sin(place), np.cos(place)], 1)

    def attend(x, memory, visible, name):
        q, k, v = (tf.tensordot(y, parameters[f"{name}/w_{key}"], 1) for key, y in zip("qkv", (x, memory, memory),
                                                                                     strict=True))
        q, k, v = (tf.transpose(y, [0, 2, 1, 3]) for y in (q, k, v))  # batch, heads, length, d_k
        logits = tf.matmul(q, k, transpose_b=True) / math.sqrt(config.d_k)
        weights = tf.nn.softmax(tf.where_v2(visible, logits, tf.constant(-np.inf, logits.dtype)))
        mixed = tf.transpose(tf.matmul(weights, v), [0, 2, 1, 3])
        return tf.tensordot(mixed, parameters[f"{name}/w_o"], 2)

    def feed_forward(x, name):
        return tf.nn.relu(x @ parameters[f"{name}/w_in"]) @ parameters[f"{name}/w_out"]

    source_seen = (features["source"] > 0)[:, None, None, :]
    # The textbook's mask: causal, and no padding. The model leaves the second out, as padding stands at the end.
    target_seen = np.tril(np.ones((length, length), bool)) & (features["decoder_input"] > 0)[:, None, None, :]
    x = embed(features["source"], "source_embedding")
    for number in range(1, config.layers + 1):
        y = norm(x, f"encoder{number}/norm_attention")
        x += attend(y, y, source_seen, f"encoder{number}/attention")
        x += feed_forward(norm(x, f"encoder{number}/norm_feed_forward"), f"encoder{number}/feed_forward")
    memory = norm(x, "encoder_norm")
    x = embed(features["decoder_input"], "target_embedding")
    for number in range(1, config.layers + 1):
        y = norm(x, f"decoder{number}/norm_self")
        x += attend(y, y, target_seen, f"decoder{number}/self")
        x += attend(norm(x, f"decoder{number}/norm_cross"), memory, source_seen, f"decoder{number}/cross")
        x += feed_forward(norm(x, f"decoder{number}/norm_feed_forward"), f"decoder{number}/feed_forward")
    logits = norm(x, "decoder_norm") @ parameters["output/weights"]
    words = tf.cast(features["target"] > 0, logits.dtype)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(logits=logits, labels=features["target"])
    return tf.reduce_sum(losses * words) / tf.reduce_sum(words)


@pytest.mark.parametrize(("name", "reference"),
                         [("alexnet", _plain_alexnet), ("transformer", _plain_transformer)])
def test_model_equals_plain_tensorflow(name, reference):
    harness.assert_same(*harness.against_plain(name, CONFIGS[name], reference))


@pytest.mark.parametrize(("kernel", "stride"), [(5, 4), (1, 4), (2, 4), (4, 3), (8, 5), (5, 3)])
@pytest.mark.parametrize("image", [11, 13])
def test_same_padding_is_tensorflows_where_the_size_does_not_divide_by_the_stride(kernel, stride, image):
    config = dataclasses.replace(ALEXNET, image=image, convolutions=(Convolution(8, kernel, stride),))
    harness.assert_same(*harness.against_plain("alexnet", config, _plain_alexnet))


SPLITTABLE = {
    "transformer": ["batch", "length", "decoder_length", "d_model", "heads", "d_ff", "vocab", "d_k", "d_v"],
    "alexnet": ["batch", "conv1", "conv2", "conv3", "conv4", "fc1", "fc2", "classes"]}


def _shallow(name):
    few = {"transformer": {"layers": 1}, "alexnet": {}}[name]
    return dataclasses.replace(CONFIGS[name], dropout=0.2, **few)


@pytest.mark.parametrize("seed", harness.some_slow([0], [1, 2, 3, 4]))
@pytest.mark.parametrize("name", ["transformer", "alexnet"])
def test_any_mesh_trains_as_one_device(name, seed):
    dims = np.random.default_rng(seed).permutation(SPLITTABLE[name])[:2]
    rule = harness.stock("rows:2;cols:2", f"{dims[0]}:rows;{dims[1]}:cols")
    harness.assert_trains_as_one_device(name, _shallow(name), rule)


@pytest.mark.parametrize("kind", harness.some_slow(["exact", "random0"], ["data_parallel", "expert", "random3"]))
@pytest.mark.parametrize("name", ["transformer", "alexnet"])
def test_trains_under_strategies_as_on_one_device(name, kind):
    harness.assert_trains_as_one_device(name, _shallow(name), harness.under_strategy(kind))


@pytest.mark.parametrize("name", ["transformer", "alexnet"])
def test_every_step_drops_something_else(name):
    one, other = harness.losses_of_one_batch(name, _shallow(name))
    assert one != pytest.approx(other, rel=1e-4)


def _parameters(name, preset):
    return harness.parameters(name, models.load_config(name, preset))


def test_alexnet_has_the_published_number_of_parameters():
    # Without the grouping over two GPUs, as in Caffe's and the paper's single-tower version.
    assert _parameters("alexnet", "big") == 62_378_344


@pytest.mark.parametrize(("preset", "layers", "width", "inner"), [("big", 6, 512, 2048), ("large", 6, 1024, 4096)])
def test_transformer_has_the_published_number_of_parameters(preset, layers, width, inner):
    # Vaswani et al.: 44 M ("base") and 176 M ("big") beside the embeddings.
    embeddings = 3 * 50176 * width
    attention, feed_forward, norm = 4 * width * width, 2 * width * inner, width
    encoder = layers * (attention + feed_forward + 2 * norm) + norm
    decoder = layers * (2 * attention + feed_forward + 3 * norm) + norm
    assert _parameters("transformer", preset) == embeddings + encoder + decoder
    assert encoder + decoder == pytest.approx({512: 44e6, 1024: 176e6}[width], rel=0.01)


@pytest.mark.parametrize(("name", "preset"), harness.some_slow(
    [(name, "tiny") for name in models.names()],
    [(name, preset) for name in models.names() for preset in models.presets(name) if preset != "tiny"]))
def test_every_preset_builds_and_divides_by_16(name, preset):
    assert _parameters(name, preset) > 0
    config = models.load_config(name, preset)
    sizes = {"transformer": lambda: (config.d_model, config.d_ff, config.length, config.vocab, config.batch),
             "alexnet": lambda: (*config.fully_connected, config.batch, *(c.channels for c in config.convolutions))}
    assert all(size % 16 == 0 for size in sizes.get(name, lambda: (config.batch,))())
    assert config.preset == preset
    assert config.dropout == 0


def test_initial_values_depend_on_the_seed_and_nothing_else():
    def value(noise, seed):
        with tf.Graph().as_default(), tf.Session() as session:
            for _ in range(noise):
                tf.constant(0)
            mesh = mtf.Mesh(mtf.Graph(), "mesh")
            config = dataclasses.replace(TRANSFORMER, seed=seed)
            dims = [mtf.Dimension("a", 300), mtf.Dimension("b", 100)]
            for name in ("one", "two"):
                layers.variable(mesh, name, dims, config, stddev=0.5)
            masters = [variable.get_master() for variable in mesh.graph.all_variables]
            session.run(tf.global_variables_initializer())
            return session.run(masters)

    first, second = value(0, 0)
    assert (value(5, 0)[0] == first).all()
    assert not np.allclose(first, second)
    assert not np.allclose(first, value(0, 1)[0])
    # A normal distribution cut at two deviations has 0.88 of its deviation left.
    assert first.std() == pytest.approx(0.5 * 0.8796, rel=0.02)


def _dropped(mesh_shape, layout, *, rate=0.25, step=0, seed=0, noise=None):
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        dims = [mtf.Dimension("a", 64), mtf.Dimension("b", 32), mtf.Dimension("c", 16)]
        x = mtf.import_tf_tensor(mesh, tf.fill([64, 32, 16], 2.0), mtf.Shape(dims))
        at = mtf.import_tf_tensor(mesh, tf.constant(step, tf.int32), mtf.Shape([]))
        y = dropout(x, rate, at, seed, noise and [dim for dim in dims if dim.name in noise])
        dx = mtf.gradients([y], [x])[0]
        return harness.evaluate(harness.stock_lowering(mesh, mesh_shape, layout), [y, dx])


@pytest.mark.parametrize(("mesh_shape", "layout"), [
    ("rows:4", "a:rows"), ("rows:2;cols:2", "b:rows;a:cols"), ("rows:2;cols:2", "c:rows"), ("rows:8", "b:rows")])
def test_dropout_draws_one_mask_under_every_layout(mesh_shape, layout):
    whole, whole_gradient = _dropped("one:1", "", step=7)
    split, split_gradient = _dropped(mesh_shape, layout, step=7)
    assert (whole == split).all()
    assert (whole_gradient == split_gradient).all()
    assert (whole_gradient == whole / 2).all()


def test_dropout_draws_well():
    masks = {(step, seed): _dropped("one:1", "", step=step, seed=seed)[0] / 2
             for step, seed in ((0, 0), (1, 0), (0, 1), (1, 1), (2 ** 31 - 1, 5))}
    count = 64 * 32 * 16
    deviation = math.sqrt(0.25 * 0.75 / count)
    for mask in masks.values():
        assert set(np.unique(mask)) == {0, np.float32(4 / 3)}
        kept = mask > 0
        assert kept.mean() == pytest.approx(0.75, abs=4 * deviation)
        for axis in range(3):  # neighbours are independent
            both = kept.take(range(1, kept.shape[axis]), axis) & kept.take(range(kept.shape[axis] - 1), axis)
            assert both.mean() == pytest.approx(0.75 ** 2, abs=0.015)
    keys = list(masks)
    for one in keys:
        for other in keys[:keys.index(one)]:
            both = (masks[one] > 0) & (masks[other] > 0)
            assert both.mean() == pytest.approx(0.75 ** 2, abs=0.015), (one, other)


def test_dropout_with_shared_noise():
    mask, _ = _dropped("rows:2", "b:rows", noise=["a", "c"])
    assert (mask == mask[:, :1]).all()
    assert 0.6 < (mask > 0).mean() < 0.9


def test_dropout_refuses_a_rate_of_one():
    with pytest.raises(ValueError, match="rate=1"):
        dropout(None, 1, None, 0)


def test_fully_masked_softmax_is_uniform():
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        rows, cols = mtf.Dimension("rows", 2), mtf.Dimension("cols", 4)
        logits = mtf.import_tf_tensor(mesh, tf.constant([[1., 2, 3, 4], [1, 2, 3, 4]]), mtf.Shape([rows, cols]))
        seen = mtf.import_tf_tensor(mesh, tf.constant([[False] * 4, [True, True, False, False]]), logits.shape)
        result = layers.masked_softmax(logits, seen, cols)
        values, = harness.evaluate(harness.stock_lowering(mesh), [result])
    np.testing.assert_allclose(values, [[0.25] * 4, [1 / (1 + math.e), math.e / (1 + math.e), 0, 0]], atol=1e-6)


def test_registry_is_light_and_helpful():
    code = ("import sys, pase_mtf.models as m; m.names(); m.load_config('alexnet', 'tiny'); "
            "print('tensorflow' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert {"alexnet", "densenet121", "resnet101", "transformer"} <= set(models.names())
    with pytest.raises(UsageError, match="did you mean 'transformer'"):
        models.get("tranformer")


@pytest.mark.parametrize(("model", "values", "message"), [
    ("transformer", {"d_modell": 3}, "unknown key 'd_modell'; did you mean 'd_model'"),
    ("transformer", {"d_model": "wide"}, "d_model='wide': it has to be a whole number"),
    ("transformer", {"heads": 0}, "heads=0: it has to be at least 1"),
    ("transformer", {"heads": 10**12}, "heads=1000000000000: no size may exceed 2147483647"),
    ("transformer", {"dropout": 10**400}, "dropout=1000"),
    ("transformer", {"heads": True}, "heads=True: it has to be a whole number"),
    ("transformer", {"dropout": 1.0}, "dropout=1.0"),
    ("transformer", {"learning_rate": 0}, "learning_rate=0.0"),
    ("transformer", {"learning_rate": math.inf}, "learning_rate=inf"),
    ("transformer", {"learning_rate": math.nan}, "learning_rate=nan"),
    ("transformer", {"dropout": math.nan}, "dropout=nan"),
    ("inception_v3", {"auxiliary": math.nan}, "auxiliary=nan"),
    ("inception_v3", {"auxiliary": math.inf}, "auxiliary=inf"),
    ("inception_v3", {"auxiliary": -1}, "auxiliary=-1.0"),
    ("transformer", {"optimizer": "adamm"}, "did you mean 'adam'"),
    ("transformer", {"dtype": "float16"}, "dtype='float16'"),
    ("transformer", {"vocab": 4}, "vocab=4"),
    ("rnnlm", {"vocab": 2**31}, "vocab=2147483648: no size may exceed 2147483647"),
    ("gnmt", {"vocab": 2**31}, "vocab=2147483648: no size may exceed 2147483647"),
    ("gnmt", {"length": 10**12}, "length=1000000000000: no size may exceed 2147483647"),
    ("transformer", {"length": 1}, "length=1"),
    ("transformer", {"preset": "tinny"}, "did you mean 'tiny'"),
    ("alexnet", {"image": 4}, "nothing is left of it after convolution 2"),
    ("alexnet", {"convolutions": []}, "give at least one"),
    ("alexnet", {"convolutions": 5}, "convolutions=5: it has to be a list"),
    ("alexnet", {"convolutions": [{"channels": 3}]}, "kernel missing"),
    ("alexnet", {"convolutions": [{"channels": 3, "kernel": 3, "padding": "same"}]}, "known: SAME, VALID"),
    ("alexnet", {"convolutions": [3]}, "has to be an object"),
    ("alexnet", {"fully_connected": [0]}, "at least 1"),
    ("alexnet", {"fully_connected": [8, 2**31]}, "no size may exceed 2147483647"),
    ("alexnet", [1], "has to be an object"),
])
def test_bad_sizes_are_refused_in_one_line(tmp_path, model, values, message):
    path = tmp_path / "sizes.json"
    path.write_text(json.dumps(values))
    with pytest.raises(UsageError) as caught:
        models.load_config(model, str(path))
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_own_sizes_and_overrides(tmp_path):
    path = tmp_path / "sizes.json"
    path.write_text('{"preset": "small", "d_ff": 4096, "dropout": 0}')
    assert models.load_config("transformer", path) == models.load_config("transformer", str(path))
    config = models.load_config("transformer", str(path), batch=48, seed=3, learning_rate=None)
    small = models.load_config("transformer", "small")
    assert config == dataclasses.replace(small, preset=str(path), d_ff=4096, batch=48, seed=3)


def test_bad_presets(tmp_path):
    with pytest.raises(UsageError, match="did you mean 'small'"):
        models.load_config("alexnet", "smal")
    with pytest.raises(UsageError, match="cannot read"):
        models.load_config("alexnet", str(tmp_path / "none.json"))
    with pytest.raises(UsageError, match="None is no path"):
        models.load_config("alexnet", None)
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(UsageError, match="not a JSON file"):
        models.load_config("alexnet", str(tmp_path / "broken.json"))
    with pytest.raises(UsageError, match="unknown model 'bert'"):
        models.load_config("bert", "tiny")
