"""Sizes of the models: typed, checked, and read from configs/models/*.json or from a user's own file.

No TensorFlow here: a misspelt preset is answered before anything heavy is imported.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar, cast

from pase_mtf.errors import UsageError, nearest, shortened
from pase_mtf.files import path_of
from pase_mtf.models.checks import check_run, positive
from pase_mtf.models.convolutional_presets import (
    AlexnetConfig,
    Convolution,
    DensenetConfig,
    InceptionConfig,
    ResnetConfig,
)
from pase_mtf.models.recurrent_presets import BiglstmConfig, GnmtConfig, RnnlmConfig

__all__ = ["BATCH_STATISTICS", "CONFIGS", "AlexnetConfig", "Convolution", "ImageConfig", "ModelConfig", "TextConfig",
           "TransformerConfig", "config_of", "load_config", "presets"]

FORMAT = "pase_mtf.model"

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Sizes of `transformer`.

    Attributes:
      preset: where these sizes come from: the name of a preset or a file.
      layers: of the encoder, and of the decoder.
      d_model, heads, d_k, d_ff: widths; every head has d_k channels in queries, keys and values.
      length: tokens of a source and of a target sequence.
      vocab: tokens of the vocabulary, which source and target share.
      dropout: rate on the embeddings and on what every sublayer adds to the residual stream.
      batch, optimizer, learning_rate: defaults of a run; the batch counts sequences.
      dtype: of activations and, but for bfloat16, variables (`pase_mtf.models.checks.kept_dtype`).
      seed: decides the initial values and the dropout masks.
    """

    preset: str
    layers: int
    d_model: int
    heads: int
    d_k: int
    d_ff: int
    length: int
    vocab: int
    batch: int
    optimizer: str
    learning_rate: float
    dropout: float = 0.0
    dtype: str = "float32"
    seed: int = 0

    def _check(self) -> None:
        positive(self, "layers", "d_model", "heads", "d_k", "d_ff", "length", "vocab")
        if self.vocab < 8:
            raise UsageError(f"vocab={self.vocab}: it has to be at least 8 (four tokens are reserved)")
        if self.length < 2:
            raise UsageError(f"length={self.length}: it has to be at least 2 (a word and the end of the sentence)")
        check_run(self)


ImageConfig: TypeAlias = AlexnetConfig | DensenetConfig | InceptionConfig | ResnetConfig
"""Sizes of a model that trains on images."""

TextConfig: TypeAlias = TransformerConfig | BiglstmConfig | GnmtConfig | RnnlmConfig
"""Sizes of a model that trains on text, parallel or plain."""

ModelConfig: TypeAlias = ImageConfig | TextConfig
"""Sizes of any model; all have batch, optimizer, learning_rate, dropout, dtype and seed."""

CONFIGS: dict[str, type[ModelConfig]] = {
    "alexnet": AlexnetConfig,
    "biglstm": BiglstmConfig,
    "densenet121": DensenetConfig,
    "gnmt": GnmtConfig,
    "inception_v3": InceptionConfig,
    "resnet101": ResnetConfig,
    "rnnlm": RnnlmConfig,
    "transformer": TransformerConfig,
}

BATCH_STATISTICS = frozenset({"densenet121", "inception_v3", "resnet101"})
"""The models that normalise over the batch: an example's loss depends on the others of its batch."""


def presets(model: str) -> dict[str, dict[str, object]]:
    """The presets of a model: name -> its values as they stand in configs/models/<model>.json.

    Raises:
      UsageError: no such model.
    """
    if model not in CONFIGS:
        raise UsageError(f"unknown model {model!r}; {nearest(model, CONFIGS)}")
    text = importlib.resources.files("pase_mtf.configs").joinpath("models", f"{model}.json").read_text("utf-8")
    return json.loads(text)["presets"]


def load_config(model: str, preset_or_path: str | os.PathLike[str], **overrides: object) -> ModelConfig:
    """The sizes of a model.

    Args:
      model: a name of the registry.
      preset_or_path: the name of a preset, or a JSON file: an object with the same keys as a preset. What it leaves
        out comes from the preset named by its key "preset" ("tiny" without it).
      **overrides: values that replace those of the preset (None: keep).

    Returns:
      The model's own configuration, such as an AlexnetConfig, checked.

    Raises:
      UsageError: no such model, preset or file; an unknown key; a value that makes no sense.
    """
    model = getattr(model, "name", model)
    known = presets(model)
    preset_or_path = os.fspath(path_of(preset_or_path))
    overrides = {key: value for key, value in overrides.items() if value is not None}
    if preset_or_path in known:
        return _checked(model, {**known[preset_or_path], "preset": preset_or_path, **overrides}, "")
    if not (preset_or_path.endswith(".json") or os.sep in preset_or_path or os.path.exists(preset_or_path)):
        raise UsageError(f"unknown preset {preset_or_path!r} of {model}; {nearest(preset_or_path, known)}; "
                         "or the path of a .json file")
    values = _read(preset_or_path)
    base = values.pop("preset", "tiny")
    if not isinstance(base, str) or base not in known:
        raise UsageError(f"{preset_or_path}: unknown preset {shortened(base)} of {model}; {nearest(str(base), known)}")
    return _checked(model, {**known[base], **values, "preset": preset_or_path, **overrides}, f"{preset_or_path}: ")


def config_of(model: str, values: Mapping[str, object]) -> ModelConfig:
    """The sizes of a model, of what `dataclasses.asdict` made of them.

    Raises:
      UsageError: as `load_config`.
    """
    return _checked(model, values, "")


def _read(path: str) -> dict[str, object]:
    try:
        with open(path, encoding="utf-8") as file:
            values = json.load(file)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; name a preset or an existing .json file") from error
    except (ValueError, RecursionError, MemoryError) as error:  # also numbers of thousands of digits
        raise UsageError(f"{path}: not a JSON file ({shortened(error)}); mend it") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path}: holds a {type(values).__name__}; it has to be an object such as "
                         '{"preset": "tiny", "batch": 32}')
    return values


def _checked(model: str, values: Mapping[str, object], where: str) -> ModelConfig:
    try:
        config = cast(ModelConfig, _typed(CONFIGS[model], values))
        config._check()
    except UsageError as error:
        raise UsageError(f"{where}{error}") from None
    return config


def _typed(cls: Callable[..., _T], values: Mapping[str, object]) -> _T:
    """`cls(**values)`, with every key known and every value of the declared type."""
    fields = {field.name: field for field in dataclasses.fields(cast(Any, cls))}
    for key in values:
        if key not in fields:
            raise UsageError(f"unknown key {shortened(key)}; {nearest(key, fields)}")
    missing = [name for name, field in fields.items()
               if name not in values and field.default is dataclasses.MISSING]
    if missing:
        raise UsageError(f"{', '.join(missing)} missing; give a value")
    return cls(**{key: _convert(key, str(fields[key].type), value) for key, value in values.items()})


def _convert(key: str, kind: str, value: object) -> object:
    if kind == "tuple[Convolution, ...]" and isinstance(value, (list, tuple)):
        return tuple(item if isinstance(item, Convolution) else _typed(Convolution, _object(key, item))
                     for item in value)
    if kind == "tuple[int, ...]" and isinstance(value, (list, tuple)):
        return tuple(_convert(key, "int", item) for item in value)
    if kind == "int" and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind == "float" and isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise UsageError(f"{key}={shortened(value)}: it is too large") from None
    if kind == "str" and isinstance(value, str):
        return value
    wanted = {"int": "a whole number", "float": "a number", "str": "a string"}.get(kind, "a list")
    raise UsageError(f"{key}={shortened(value)}: it has to be {wanted}")


def _object(key: str, value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise UsageError(f"{key}: {value!r} has to be an object such as {{\"channels\": 64, \"kernel\": 3}}")
    return value
