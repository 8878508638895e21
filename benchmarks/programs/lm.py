"""Programs of `mesh_tensorflow.transformer` as it is: language models and translation, hyperparameters set in code.

Without gin: constructors of the package take all that gin files set. The sublayers are those of its defaults.gin.
"""

from __future__ import annotations

import functools
from typing import Any

from benchmarks.programs.program import Inputs, Program, gradients_and_updates
from benchmarks.programs.stand_ins import TRAINING, stand_in
from pase_mtf.compat import mtf, tf

for _module in TRAINING:
    stand_in(_module)

from mesh_tensorflow.transformer import moe, transformer, transformer_layers  # noqa: E402

__all__ = ["PRESETS", "build"]

_SMALL = {"batch": 16, "length": 16, "vocab": 250, "d_model": 64, "heads": 8, "d_kv": 8, "d_ff": 128, "blocks": 1,
          "dropout": 0.0}

PRESETS: dict[str, dict[str, Any]] = {
    # GPT-2 medium, but for its vocabulary.
    "full": {"kind": "lm", "batch": 64, "length": 1024, "vocab": 32128, "d_model": 1024, "heads": 16, "d_kv": 64,
             "d_ff": 4096, "blocks": 24, "dropout": 0.1, "optimizer": "adafactor"},
    "reduced": {"kind": "lm", **_SMALL, "blocks": 2, "optimizer": "adafactor"},
    # "Attention is all you need", base: 25,000 source and target words a batch.
    "full_translation": {"kind": "translation", "batch": 128, "length": 256, "vocab": 37000, "d_model": 512,
                         "heads": 8, "d_kv": 64, "d_ff": 2048, "blocks": 6, "dropout": 0.1, "optimizer": "adam"},
    "reduced_translation": {"kind": "translation", **_SMALL, "optimizer": "adam"},
    # Every other feed-forward layer a mixture of experts.
    "full_moe": {"kind": "moe", "batch": 64, "length": 1024, "vocab": 32128, "d_model": 1024, "heads": 16, "d_kv": 64,
                 "d_ff": 4096, "blocks": 6, "dropout": 0.1, "optimizer": "adafactor", "experts": 32,
                 "expert_hidden": 4096, "group": 1024, "second": "random"},
    "reduced_moe": {"kind": "moe", **_SMALL, "optimizer": "adafactor", "experts": 8, "expert_hidden": 128,
                    "group": 32, "second": "all"},
}


def _stack(sizes: dict[str, Any], layers: list[Any]) -> transformer.LayerStack:
    sublayers = {
        "sublayers_initial": [transformer.sublayer_dropout],
        "sublayers_per_layer": [transformer.sublayer_rms_norm, transformer.sublayer_call_layer,
                                transformer.sublayer_dropout, transformer.sublayer_residual],
        "sublayers_final": [transformer.sublayer_rms_norm, transformer.sublayer_dropout],
    }
    dropout = functools.partial(transformer.sublayer_dropout, dropout_rate=sizes["dropout"])
    sublayers = {place: [dropout if fn is transformer.sublayer_dropout else fn for fn in fns]
                 for place, fns in sublayers.items()}
    return transformer.make_layer_stack(
        layers=layers, num_layers=sizes["blocks"], layer_stack_cls=functools.partial(transformer.LayerStack,
                                                                                     **sublayers))


def _layers(sizes: dict[str, Any]) -> dict[str, list[Any]]:
    attention = {"num_heads": sizes["heads"], "key_value_size": sizes["d_kv"], "dropout_rate": sizes["dropout"]}
    mine = [transformer_layers.SelfAttention, attention]
    dense = [transformer_layers.DenseReluDense, {"hidden_size": sizes["d_ff"], "dropout_rate": sizes["dropout"]}]
    found = {"encoder": [mine, dense], "decoder": [mine, dense]}
    if sizes["kind"] == "translation":
        found["decoder"] = [mine, [transformer_layers.EncDecAttention, attention], dense]
    elif sizes["kind"] == "moe":
        experts = [moe.MoE1D, {"num_experts": sizes["experts"], "hidden_size": sizes["expert_hidden"],
                               "group_size": sizes["group"], "second_policy_train": sizes["second"]}]
        found["decoder"] = [mine, dense, mine, experts]
    return found


def build(preset: str = "reduced", mesh_shape: Any = None, layout: Any = None) -> Program:
    """The training step, in the current tf.Graph.

    Args:
      preset: of PRESETS.
      mesh_shape, layout: what experts form their groups by, and attention shares its work by; default: one device.
    """
    sizes = PRESETS[preset]
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh", mtf.utils.BalancedVariablePlacer(["/device:CPU:0"]))
    layers = _layers(sizes)
    common = {"d_model": sizes["d_model"], "input_vocab_size": sizes["vocab"], "max_length": sizes["length"],
              "mesh_shape": mtf.convert_to_shape(mesh_shape or ""),
              "layout": mtf.convert_to_layout_rules(layout or "")}
    words = [mtf.Dimension("batch", sizes["batch"]), mtf.Dimension("length", sizes["length"])]
    inputs = Inputs()
    targets = inputs.tensor(mesh, "targets", words, below=sizes["vocab"])
    dtypes = {"variable_dtype": mtf.VariableDType(tf.float32)}
    if sizes["kind"] == "translation":
        sinusoids = {"sinusoid_positional_embedding": True, **common}
        encoder = transformer.Unitransformer(
            _stack(sizes, layers["encoder"]), output_vocab_size=None, autoregressive=False, name="encoder",
            **sinusoids)
        decoder = transformer.Unitransformer(
            _stack(sizes, layers["decoder"]), output_vocab_size=sizes["vocab"], autoregressive=True, name="decoder",
            shared_embedding_and_softmax_weights=True, label_smoothing=0.1, **sinusoids)
        model = transformer.Bitransformer(encoder, decoder)
        source = inputs.tensor(mesh, "inputs", words, below=sizes["vocab"])
        _, loss = model.call_simple(source, targets, compute_loss=True, **dtypes)
    else:
        model = transformer.Unitransformer(
            _stack(sizes, layers["decoder"]), output_vocab_size=sizes["vocab"], autoregressive=True, **common)
        sequence = mtf.minimum(targets, 1)  # padding is 0, as in mesh_tensorflow.transformer.utils
        _, loss = model.call_simple(transformer.autoregressive_inputs(targets, sequence_id=sequence), targets,
                                    compute_loss=True, sequence_id=sequence, **dtypes)
    global_step = tf.train.get_or_create_global_step()
    optimizer = (mtf.optimize.AdamWeightDecayOptimizer(1e-3) if sizes["optimizer"] == "adam"
                 else mtf.optimize.AdafactorOptimizer(learning_rate=1e-2))
    updates = gradients_and_updates(loss, optimizer)
    return Program(f"lm_{preset}", graph, mesh, inputs.placeholders, inputs.features, loss, updates, global_step)
