"""The transformers of `mesh_tensorflow.transformer`, through its gin files: one table, a row per model.

Every row is what a gin file of its owner would say on top of the package's defaults.gin: layers, sizes, microbatches.
Graphs are built as the package's own training loop builds them (`utils.build_model`, `serialize_num_microbatches`,
`mtf.serialize_training_step`), without the estimator around it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from benchmarks.programs.program import Inputs, Program
from benchmarks.programs.stand_ins import TRAINING, stand_in
from pase_mtf.compat import mtf, tf

for _module in TRAINING:
    stand_in(_module)

import gin  # noqa: E402
from mesh_tensorflow.transformer import (  # noqa: E402
    adaptive_softmax,
    attention,
    evolved_transformer,
    fixup_layers,
    funnel_transformer,
    heterogeneous_moe,
    memory_layers,
    moe,
    transformer_layers,
    universal_transformer,
    utils,
    vocab_embeddings,
)

__all__ = ["ZOO", "Entry", "build", "own_layout"]

# Named so that gin finds what they register; importing them is their use.
_REGISTERED = (adaptive_softmax, evolved_transformer, fixup_layers, funnel_transformer, heterogeneous_moe,
               memory_layers, moe, universal_transformer, vocab_embeddings)


# Two layers that fail in 0.1.21 as they are: what they forget is given here.

@gin.configurable("MoE2D")
class _MoE2D(moe.MoE2D):

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._hparams.moe_min_expert_capacity = 4
        for name in ("word_embed_mode", "use_second_place_expert_prob", "use_second_place_expert_prob_temp", "z_loss"):
            setattr(self._hparams, f"moe_{name}", None)


@gin.configurable("LocalAttention")
class _LocalAttention(transformer_layers.LocalSelfAttention):

    def call(self, context: Any, x: mtf.Tensor, losses: Any = None) -> mtf.Tensor:
        del losses
        params = self.make_params(context)
        result = attention.local_attention_1d(
            params.compute_q(x), params.compute_k(x), params.compute_v(x), context.length_dim, self.kv_dim, self.kv_dim,
            fully_autoregressive=True, radius=self.radius, sequence_id=context.sequence_id,
            attention_kwargs={**self.attention_kwargs_from_context(context), "context": context})
        return params.compute_output(result, output_shape=x.shape)


_DEFAULTS = os.path.join(os.path.dirname(utils.__file__), "gin", "defaults.gin")
_TINY = """
num_layers = 2
d_model = 16
d_ff = 32
num_heads = 8
d_kv = 4
dropout_rate = 0.0
utils.get_variable_dtype.activation_dtype = "float32"
utils.serialize_num_microbatches.tokens_per_microbatch_per_replica = 16
"""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A model.

    Attributes:
      kind: "bitransformer", "lm", "delimited_lm", "aligned" or "bi_student_teacher", as `utils.run` calls it.
      gin: bindings at both sizes.
      full, reduced: bindings at one size, after those of both.
      batch, length: sequences per step and tokens in each, at full size.
      reduced_length: tokens in each sequence, at reduced size.
      vocab: words, at full size.
      model_parallelism: as `utils.tpu_mesh_shape` takes it: devices that a replica of the model is spread over.
      optimizer: of `mtf.optimize`.
      train: whether it makes a training step; otherwise the loss is all that it computes.
    """

    kind: str
    gin: str = ""
    full: str = ""
    reduced: str = ""
    batch: int = 128
    length: int = 512
    reduced_length: int = 16
    vocab: int = 32128
    model_parallelism: int = 1
    optimizer: str = "AdafactorOptimizer"
    train: bool = True


def _sizes(layers: int, d_model: int, d_ff: int, heads: int, d_kv: int = 64) -> str:
    return (f"num_layers = {layers}\nd_model = {d_model}\nd_ff = {d_ff}\nnum_heads = {heads}\nd_kv = {d_kv}\n")


_SMALL, _BASE, _LARGE = _sizes(6, 512, 2048, 8), _sizes(12, 768, 3072, 12), _sizes(24, 1024, 4096, 16)
_WHOLE = "utils.serialize_num_microbatches.tokens_per_microbatch_per_replica = None\n"
_RELATIVE = """
SelfAttention.relative_attention_type = "bias_shared"
EncDecAttention.relative_attention_type = None
Unitransformer.positional_embedding = False
"""
_GATED = """
DenseReluDense.activation = ["gelu", "linear"]
Unitransformer.shared_embedding_and_softmax_weights = False
"""


def _stack(*layers: str, where: str = "") -> str:
    names = ", ".join(f"@{layer}" for layer in layers)
    return f"{where}transformer.make_layer_stack.layers = [{names}]\n"


def _heads(layer: str, heads: int, size: int) -> str:
    dims = f"(('heads', {heads}),)"
    return (f"{layer}.key_heads_dims = {dims}\n{layer}.softmax_heads_dims = {dims}\n"
            f"{layer}.value_heads_dims = {dims}\n{layer}.key_size = {size}\n{layer}.value_size = {size}\n")


_BOTH = ("encoder/", "decoder/")
_MOE_BLOCK = ("SelfAttention", "DenseReluDense", "SelfAttention", "MoE1D")
_MOE_PAIR = _stack(*_MOE_BLOCK, where="encoder/") + _stack(
    "SelfAttention", "EncDecAttention", "DenseReluDense", "SelfAttention", "EncDecAttention", "MoE1D",
    where="decoder/")
_TALKING = _stack("TalkingHeadsSelfAttention", "DenseReluDense", where="encoder/") + _stack(
    "TalkingHeadsSelfAttention", "TalkingHeadsEncDecAttention", "DenseReluDense", where="decoder/")
_BILINEAR = _stack("GeneralBilinearSelfAttention", "DenseReluDense", where="encoder/") + _stack(
    "GeneralBilinearSelfAttention", "GeneralBilinearEncDecAttention", "DenseReluDense", where="decoder/")
_UNIVERSAL = "".join(f"UTLayerStack.{line}\n" for line in (
    'act_type = "basic"', 'recurrence_type = "act"', "act_max_steps = 4", "act_epsilon = 0.01", "num_rec_steps = 4",
    "num_inrecurrence_layers = 1", "position_start_index = None", 'add_or_concat_timing_signal = "add"',
    'step_timing_signal_type = "learned"', "add_position_timing_signal = True", "add_step_timing_signal = True",
    "mix_with_transformer_before_ut = False", "mix_with_transformer_after_ut = False", 'gates_inputs = "i"',
    'gate_ffn_layer = "dense"', "use_gated_transformer = False", 'gating_type = "highway"',
    "num_vanilla_transformer_layers = 2"))

ZOO: dict[str, Entry] = {
    # T5, with the package's microbatches of 2,048 tokens a replica and without.
    "t5_small": Entry("bitransformer", _RELATIVE, _SMALL),
    "t5_base": Entry("bitransformer", _RELATIVE, _BASE),
    "t5_base_whole": Entry("bitransformer", _RELATIVE + _WHOLE, _BASE, reduced=_WHOLE),
    "t5_large": Entry("bitransformer", _RELATIVE, _LARGE),
    "t5_large_whole": Entry("bitransformer", _RELATIVE + _WHOLE, _LARGE, reduced=_WHOLE),
    "t5_3b": Entry("bitransformer", _RELATIVE, _sizes(24, 1024, 16384, 32, 128), model_parallelism=4),
    "t5_11b": Entry("bitransformer", _RELATIVE, _sizes(24, 1024, 65536, 128, 128), model_parallelism=8),
    "t5_gated": Entry("bitransformer", _RELATIVE + _GATED + _WHOLE, _BASE, reduced=_WHOLE),
    "t5_recompute": Entry("bitransformer", _RELATIVE + _WHOLE + "LayerStack.recompute_grads = True\n", _BASE,
                          reduced=_WHOLE),
    "t5_recompute_loop": Entry("bitransformer", _RELATIVE + "LayerStack.recompute_grads = True\n", _BASE),
    "t5_transparent": Entry("bitransformer", "include '{transparent}'\n"),
    "lm_default": Entry("lm", length=1024),
    "lm_delimited": Entry("delimited_lm", _WHOLE, _BASE, reduced=_WHOLE),
    "aligned": Entry("aligned", _WHOLE, _BASE, reduced=_WHOLE, optimizer="AdamWeightDecayOptimizer"),
    # Other attention.
    "talking_heads": Entry("bitransformer", _TALKING + _WHOLE, _BASE + _heads("TalkingHeadsSelfAttention", 12, 64),
                           _WHOLE + _heads("TalkingHeadsSelfAttention", 8, 4)),
    "talking_heads_large": Entry(
        "bitransformer", _TALKING, _LARGE + _heads("TalkingHeadsSelfAttention", 24, 64),
        _heads("TalkingHeadsSelfAttention", 8, 4)),
    "bilinear": Entry("bitransformer", _BILINEAR + _WHOLE, _BASE
                      + "GeneralBilinearSelfAttention.heads_dims = (('heads', 12),)\n",
                      _WHOLE + "GeneralBilinearSelfAttention.heads_dims = (('heads', 8),)\n"),
    "local_attention": Entry("lm", _stack("LocalAttention", "DenseReluDense") + _WHOLE,
                             _BASE + "LocalAttention.radius = 128\n"
                             "LocalAttention.num_heads = 12\nLocalAttention.key_value_size = 64\n",
                             _WHOLE + "LocalAttention.radius = 16\nLocalAttention.key_value_size = 4\n",
                             batch=32, length=4096, reduced_length=288),
    "synthesizer": Entry("lm", _stack("Synthesizer", "DenseReluDense") + _WHOLE
                         + 'Synthesizer.synthesize_mode = "dense_minus"\n',
                         _BASE + "Synthesizer.num_heads = 12\nSynthesizer.key_value_size = 64\n",
                         _WHOLE + "Synthesizer.key_value_size = 4\n"),
    "synthesizer_random": Entry("lm", _stack("Synthesizer", "DenseReluDense") + _WHOLE
                                + 'Synthesizer.synthesize_mode = "random_plus_alpha"\n',
                                _BASE + "Synthesizer.num_heads = 12\nSynthesizer.key_value_size = 64\n",
                                _WHOLE + "Synthesizer.key_value_size = 4\n"),
    "branched": Entry("lm", _stack("BranchedSelfAttention", "DenseReluDense") + _WHOLE,
                      _BASE + "BranchedSelfAttention.num_heads = 12\nBranchedSelfAttention.key_value_size = 64\n",
                      _WHOLE + "BranchedSelfAttention.key_value_size = 4\n"),
    # Mixtures of experts.
    "switch_base": Entry("bitransformer", _RELATIVE + _MOE_PAIR + 'MoE1D.moe_gating = "switch"\n',
                         _sizes(6, 768, 3072, 12) + "MoE1D.num_experts = 32\nMoE1D.hidden_size = 3072\n",
                         "num_layers = 1\nMoE1D.num_experts = 8\nMoE1D.hidden_size = 32\nMoE1D.group_size = 16\n"
                         'MoE1D.switch_policy_train = "argmax"\nMoE1D.switch_dropout = 0.0\n'),
    "switch_whole": Entry("lm", _stack(*_MOE_BLOCK) + 'MoE1D.moe_gating = "switch"\n' + _WHOLE,
                          _sizes(6, 768, 3072, 12) + "MoE1D.num_experts = 128\nMoE1D.hidden_size = 3072\n",
                          _WHOLE + "num_layers = 1\nMoE1D.num_experts = 8\nMoE1D.hidden_size = 32\n"
                          "MoE1D.group_size = 16\n"
                          'MoE1D.switch_policy_train = "argmax"\nMoE1D.switch_dropout = 0.0\n'),
    "top_2_moe": Entry("lm", _stack(*_MOE_BLOCK) + _WHOLE, _sizes(6, 1024, 4096, 16) + "MoE1D.num_experts = 64\n",
                       _WHOLE + "num_layers = 1\nMoE1D.num_experts = 8\nMoE1D.hidden_size = 32\n"
                       'MoE1D.group_size = 16\nMoE1D.second_policy_train = "all"\n'),
    "moe_2d": Entry("lm", _stack("SelfAttention", "DenseReluDense", "SelfAttention", "MoE2D") + _WHOLE,
                    _sizes(4, 1024, 4096, 16),
                    _WHOLE + "num_layers = 1\n"),
    "heterogeneous_moe": Entry(
        "lm", _stack("SelfAttention", "DenseReluDense", "SelfAttention", "HeterogeneousMoE1D") + _WHOLE
        + 'HeterogeneousMoE1D.moe_gating = "switch"\nHeterogeneousMoE1D.moe_num_layers = 1\n',
        _sizes(4, 768, 3072, 12) + "HeterogeneousMoE1D.num_experts = 32\nHeterogeneousMoE1D.hidden_size = 3072\n",
        _WHOLE + "num_layers = 1\nHeterogeneousMoE1D.num_experts = 8\nHeterogeneousMoE1D.hidden_size = 32\n"
        'HeterogeneousMoE1D.group_size = 16\nHeterogeneousMoE1D.switch_policy_train = "argmax"\n'
        "HeterogeneousMoE1D.switch_dropout = 0.0\n"),
    "experts_attention": Entry(
        "lm", _stack("ExpertsSelfAttention", "DenseReluDense") + _WHOLE
        + "ExpertsSelfAttention.shared_kv = True\n",
        _sizes(6, 768, 3072, 12) + "ExpertsSelfAttention.num_experts = 16\nExpertsSelfAttention.num_heads = 12\n"
        "ExpertsSelfAttention.key_value_size = 64\nExpertsSelfAttention.hidden_size = 768\n",
        _WHOLE + "num_layers = 1\nExpertsSelfAttention.num_experts = 8\nExpertsSelfAttention.hidden_size = 32\n"
        "ExpertsSelfAttention.key_value_size = 4\n"
        'ExpertsSelfAttention.group_size = 16\nExpertsSelfAttention.switch_policy_train = "argmax"\n'),
    # Other stacks.
    "funnel": Entry(
        "bitransformer", _RELATIVE + _WHOLE
        + "make_bitransformer.bitransformer_cls = @funnel_transformer.BitransformerFunnel\n"
        + "encoder/make_layer_stack.layer_stack_cls = @funnel_transformer.FunnelTransformerLayerStack\n"
        + "FunnelTransformerLayerStack.sublayers_initial = [@transformer.sublayer_dropout]\n"
        + "FunnelTransformerLayerStack.sublayers_per_layer = [@transformer.sublayer_rms_norm, "
        "@transformer.sublayer_call_layer, @transformer.sublayer_dropout, @transformer.sublayer_residual]\n"
        + "FunnelTransformerLayerStack.sublayers_final = [@transformer.sublayer_rms_norm, "
        "@transformer.sublayer_dropout]\n",
        _BASE + "FunnelTransformerLayerStack.n_blocks = 3\n"
        "FunnelTransformerLayerStack.block_param_size = [4, 4, 4]\n"
        "FunnelTransformerLayerStack.block_repeat_size = [1, 1, 1]\n",
        _WHOLE + "FunnelTransformerLayerStack.n_blocks = 2\n"
        "FunnelTransformerLayerStack.block_param_size = [1, 1]\n"
        "FunnelTransformerLayerStack.block_repeat_size = [1, 1]\n"),
    "product_keys": Entry(
        "lm", _stack("SelfAttention", "DenseReluDense", "SelfAttention", "ProductKeyValueMemory") + _WHOLE,
        _sizes(6, 1024, 4096, 16) + "ProductKeyValueMemory.key_size = 512\nProductKeyValueMemory.n_keys = 512\n"
        "ProductKeyValueMemory.n_heads = 4\nProductKeyValueMemory.knn = 32\n",
        _WHOLE + "num_layers = 1\nProductKeyValueMemory.key_size = 8\nProductKeyValueMemory.n_keys = 8\n"
        "ProductKeyValueMemory.n_heads = 4\nProductKeyValueMemory.knn = 2\n", batch=32),
    "evolved": Entry(
        "bitransformer",
        _stack("GatedLinearUnitLayer", "EncoderConvolutionalLayer", "SelfAttention", "DenseReluDense",
               where="encoder/")
        + _stack("DecoderAttentionLayer", "DecoderConvolutionalLayer", "SelfAttention", "EncDecAttention",
                 "DenseReluDense", where="decoder/")
        + "EncoderConvolutionalLayer.d_model = %d_model\nEncoderConvolutionalLayer.dropout_rate = %dropout_rate\n"
        + "DecoderConvolutionalLayer.d_model = %d_model\nDecoderConvolutionalLayer.dropout_rate = %dropout_rate\n"
        + "DecoderAttentionLayer.base_num_heads = %num_heads\n" + _WHOLE, _sizes(6, 512, 2048, 8), _WHOLE),
    "fixup": Entry(
        "lm", _stack("SelfAttentionFixup", "DenseReluDenseFixup") + _WHOLE
        + "SelfAttentionFixup.num_blocks = %num_layers\nDenseReluDenseFixup.num_blocks = %num_layers\n"
        + "SelfAttentionFixup.fold_scaling_into_initializer = False\nDenseReluDenseFixup.hidden_size = %d_ff\n"
        + "transformer.LayerStack.sublayers_per_layer = [@sublayer_fixup_shift, @transformer.sublayer_call_layer, "
        "@sublayer_fixup_scale, @transformer.sublayer_residual]\n",
        _BASE + "SelfAttentionFixup.num_heads = 12\nSelfAttentionFixup.key_value_size = 64\n",
        _WHOLE + "SelfAttentionFixup.key_value_size = 4\n"),
    "universal": Entry("lm", _UNIVERSAL + _WHOLE
                       + "make_layer_stack.layer_stack_cls = @universal_transformer.UTLayerStack\n",
                       _sizes(1, 1024, 4096, 16), _WHOLE + "num_layers = 1\n"),
    "reversible": Entry("lm", "make_layer_stack.layer_stack_cls = @transformer.ReversibleLayerStack\n" + _WHOLE,
                        _BASE, _WHOLE),
    "convolutions": Entry("lm", _stack("SelfAttention", "SeparableConv1DLayer", "DenseReluDense") + _WHOLE
                          + "SeparableConv1DLayer.min_relative_pos = -7\nSeparableConv1DLayer.max_relative_pos = 0\n"
                          "SeparableConv1DLayer.output_size = %d_model\n", _BASE, _WHOLE),
    "parallel_layers": Entry("lm", _stack("ParallelLayer") + _WHOLE, _BASE, _WHOLE),
    # Other vocabularies and losses.
    "adaptive_softmax": Entry(
        "bitransformer", _WHOLE + "get_vocab_embedding_cls.cls = @adaptive_softmax.AdaptiveSoftmaxVocabEmbedding\n"
        "Unitransformer.loss_fn = @adaptive_softmax.adaptive_softmax_loss_fn\n",
        _BASE + "AdaptiveSoftmaxVocabEmbedding.clusters = [{'token_count': 8192, 'embedding_size': 768}, "
        "{'token_count': 24576, 'embedding_size': 192, 'length_projection_factor': 0.25}]\n",
        _WHOLE + "AdaptiveSoftmaxVocabEmbedding.clusters = [{'token_count': 64, 'embedding_size': 16}, "
        "{'token_count': 64, 'embedding_size': 8, 'length_projection_factor': 0.5}]\n", vocab=32768),
    "mixture_of_softmaxes": Entry(
        "lm", _WHOLE + "get_vocab_embedding_cls.cls = @vocab_embeddings.MixtureOfSoftmaxes\n"
        "MixtureOfSoftmaxes.num_softmaxes = 4\n", _BASE, _WHOLE, batch=32),
    "ensemble": Entry("lm", _WHOLE + "Unitransformer.ensemble = 4\n", _SMALL, _WHOLE),
    "student_teacher": Entry(
        "bi_student_teacher", _WHOLE + "StudentTeacher.temperature = 2.0\nStudentTeacher.fraction_soft = 0.5\n",
        _SMALL, _WHOLE),
    # No training step.
    "t5_evaluation": Entry("bitransformer", _RELATIVE + _WHOLE, _LARGE, _WHOLE, train=False),
}
"""Name -> model."""


@contextlib.contextmanager
def _configured(entry: Entry, size: str, length: int) -> Iterator[None]:
    """What a model's gin file says holds inside, and for no program that is built afterwards."""
    transparent = os.path.join(os.path.dirname(_DEFAULTS), "transparent_attention.gin")
    text = entry.gin.replace("{transparent}", transparent)
    text += entry.full if size == "full" else _TINY + entry.reduced
    text += f"\nUnitransformer.max_length = {length}\n"
    gin.clear_config()
    try:
        with gin.unlock_config():
            gin.parse_config_file(_DEFAULTS)
            gin.parse_config(text, skip_unknown=False)
        yield
    finally:
        gin.clear_config()


def own_layout(entry: Entry, devices: int) -> tuple[str, str]:
    """Mesh shape and layout rules of defaults.gin."""
    replicas = devices // entry.model_parallelism
    axes = [(name, size) for name, size in (("batch", replicas), ("model", entry.model_parallelism)) if size > 1]
    rules = {"batch": "batch", "d_ff": "model", "heads": "model", "vocab": "model", "experts": "batch"}
    return (";".join(f"{name}:{size}" for name, size in axes),
            ";".join(f"{dim}:{axis}" for dim, axis in rules.items() if axis in dict(axes)))


def build(name: str, size: str = "reduced", mesh_shape: Any = None, layout: Any = None) -> Program:
    """The training step of a model, in the current tf.Graph.

    Args:
      name: of ZOO.
      size: "full" or "reduced".
      mesh_shape, layout: microbatches and expert groups are counted by them; default: one device.
    """
    entry = ZOO[name]
    full = size == "full"
    words = [mtf.Dimension("outer_batch", 1), mtf.Dimension("batch", entry.batch if full else 16),
             mtf.Dimension("length", entry.length if full else entry.reduced_length)]
    with _configured(entry, size, words[2].size):
        return _build(f"{name}_{size}", entry, words, entry.vocab if full else 128,
                      mtf.convert_to_shape("" if mesh_shape is None else mesh_shape),
                      mtf.convert_to_layout_rules("" if layout is None else layout))


def _build(name: str, entry: Entry, words: list[mtf.Dimension], vocab: int, mesh_shape: mtf.Shape,
           rules: mtf.LayoutRules) -> Program:
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "my_mesh", mtf.utils.BalancedVariablePlacer(["/device:CPU:0"]))
    inputs = Inputs()
    features = {key: inputs.tensor(mesh, key, words, below=vocab, low=1)
                for key in (("targets",) if entry.kind == "lm" else ("inputs", "targets"))
                if entry.kind != "delimited_lm" or key == "targets"}
    model = utils.build_model(entry.kind, vocab, vocab, rules, mesh_shape)

    def loss_of(given: dict[str, mtf.Tensor], microbatches: int = 1) -> mtf.Tensor:
        source = (utils.transformer.autoregressive_inputs(given["targets"]) if "lm" in entry.kind
                  else given["inputs"])
        packed = {}
        # As packed data says it; without it "aligned" has no attention bias, which Mesh-TF 0.1.21 cannot do without
        # under any layout.
        if "lm" in entry.kind or entry.kind == "aligned":
            packed["sequence_id"] = mtf.minimum(given["targets"], 1)
        return model.call_simple(inputs=source, targets=given["targets"], compute_loss=True,
                                 mode="train" if entry.train else "eval", variable_dtype=utils.get_variable_dtype(),
                                 num_microbatches=microbatches, **packed)[1]

    global_step = tf.train.get_or_create_global_step()
    updates: list[mtf.Operation] = []
    splits = utils.serialize_num_microbatches(words[1], {"targets": words[2].size}, mesh_shape, rules)
    if not entry.train:
        loss = loss_of(features)
    else:
        if splits > 1:
            gradients, outputs = mtf.serialize_training_step(
                features, lambda given: {"loss": loss_of(given, splits)}, words[1], splits)
            loss = outputs["loss"]
        else:
            loss = loss_of(features)
            gradients = mtf.gradients([loss], [variable.outputs[0] for variable in graph.trainable_variables])
        optimizer = getattr(mtf.optimize, entry.optimizer)(learning_rate=1e-2)
        updates = optimizer.apply_grads(gradients, graph.trainable_variables)
    return Program(name, graph, mesh, inputs.placeholders, inputs.features, loss, updates, global_step)
