"""BERT's pre-training step, from `mesh_tensorflow.bert` as it is: the base model, and one with mixtures of experts.

Put together as `mesh_tensorflow/bert/run_pretraining.py` does in its model_fn (masked words and next sentence, Adam
with warm-up and clipped gradients).
"""

from __future__ import annotations

import contextlib
import unittest.mock
from typing import Any

from benchmarks.programs.program import Inputs, Program
from benchmarks.programs.stand_ins import TRAINING, stand_in
from pase_mtf.compat import mtf, tf

for _module in TRAINING:
    stand_in(_module)

from mesh_tensorflow.bert import bert as bert_lib  # noqa: E402
from mesh_tensorflow.bert import optimization  # noqa: E402
from mesh_tensorflow.transformer import moe  # noqa: E402

# bert.py leaves out hyperparameters that moe.py of the same release asks for: the values that MoE1D has by default.
moe.HParams.moe_word_embed_mode = moe.HParams.moe_z_loss = moe.HParams.moe_output_dim = None
moe.HParams.moe_min_expert_capacity = 4
moe.HParams.moe_use_experts_attention = False
moe.HParams.moe_dropout_rate = 0.0

__all__ = ["PRESETS", "build"]

# bert-base-uncased at the batch and the lengths of its first phase of pre-training.
_BASE = {"vocab_size": 30522, "type_vocab_size": 2}
_SMALL = {"vocab_size": 250, "type_vocab_size": 2, "d_model": 64, "max_position_embeddings": 32, "num_blocks": 2,
          "attention_num_heads": 8, "feedforward_intermediate_size": 128, "layer_output_dropout_prob": 0.0,
          "attention_probs_dropout_prob": 0.0}
_MOE = {"block_layers": "attention,feedforward,attention,moe"}

class _WithoutChance(moe.HParams):
    """Always two experts; bert.py asks for the second one to be left out at random where its gate is small."""

    def __init__(self, **hyperparameters: Any) -> None:
        super().__init__(**{**hyperparameters, "moe_second_policy_train": "all"})


PRESETS: dict[str, dict[str, Any]] = {
    "full": {"batch": 256, "length": 128, "masked": 20, "warmup": 10000, "config": _BASE},
    "reduced": {"batch": 16, "length": 16, "masked": 4, "warmup": 0, "config": _SMALL},
    "full_moe": {"batch": 256, "length": 128, "masked": 20, "warmup": 10000,
                 "config": {**_BASE, **_MOE, "num_blocks": 6}},
    "reduced_moe": {"batch": 16, "length": 16, "masked": 4, "warmup": 0,
                    "config": {**_SMALL, **_MOE, "num_blocks": 1, "moe_num_experts": 8,
                               "moe_intermediate_size": 128}},
}


def build(preset: str = "reduced", mesh_shape: Any = None, layout: Any = None) -> Program:
    """The training step, in the current tf.Graph.

    Args:
      preset: of PRESETS.
      mesh_shape, layout: what the mixture of experts forms its groups by; default: one device.
    """
    sizes = PRESETS[preset]
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "bert_mesh", mtf.utils.BalancedVariablePlacer(["/device:CPU:0"]))
    config = bert_lib.BertConfig(**sizes["config"])
    batch = mtf.Dimension("batch", sizes["batch"])
    words = [batch, mtf.Dimension("seq", sizes["length"])]
    masked = [batch, mtf.Dimension("max_pred_seq", sizes["masked"])]
    inputs = Inputs()
    chance = contextlib.nullcontext() if preset.startswith("full") else unittest.mock.patch.object(
        moe, "HParams", _WithoutChance)
    with chance:
        model = bert_lib.BertModel(
            config=config, is_training=True,
            input_ids=inputs.tensor(mesh, "input_ids", words, below=config.vocab_size),
            input_mask=inputs.tensor(mesh, "input_mask", words, below=2, low=1),
            token_type_ids=inputs.tensor(mesh, "segment_ids", words, below=2),
            layout=mtf.convert_to_layout_rules(layout or ""), mesh_shape=mtf.convert_to_shape(mesh_shape or ""))
    positions = inputs.tensor(mesh, "masked_lm_positions", masked, below=sizes["length"])
    ids = inputs.tensor(mesh, "masked_lm_ids", masked, below=config.vocab_size)
    weights = inputs.tensor(mesh, "masked_lm_weights", masked, dtype=tf.float32, below=2, low=1)
    masked_loss, _, _ = model.get_masked_lm_output(positions, ids, weights)
    next_loss, _, _ = model.get_next_sentence_output(inputs.tensor(mesh, "next_sentence_labels", [batch], below=2))
    total = mtf.anonymize(masked_loss + next_loss)
    global_step = tf.train.get_or_create_global_step()
    extra = model.get_extra_loss() if "moe" in config.block_layers else 0.0
    _, updates = optimization.create_optimizer(total + extra, 1e-3, 100000, sizes["warmup"])
    return Program(f"bert_{preset}", graph, mesh, inputs.placeholders, inputs.features, total, updates, global_step)
