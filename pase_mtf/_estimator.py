"""What programs still name of `tf.estimator`, which left TensorFlow in 2.16: the names that only hold values.

A `model_fn` returns an EstimatorSpec, a configuration is passed around as a RunConfig: such names hold what they are
given and do nothing. Estimators themselves, and all else that has a behaviour, are not put back: who reads them is
told.
"""

from __future__ import annotations

import types
from typing import NamedTuple, NoReturn

__all__ = ["estimator_modules"]


class EstimatorSpec(NamedTuple):
    """What a model_fn returns."""

    mode: str
    predictions: object = None
    loss: object = None
    train_op: object = None
    eval_metric_ops: object = None
    export_outputs: object = None
    training_chief_hooks: object = None
    training_hooks: object = None
    scaffold: object = None
    evaluation_hooks: object = None
    prediction_hooks: object = None


class TPUEstimatorSpec(NamedTuple):
    """What a model_fn for TPUs returns."""

    mode: str
    predictions: object = None
    loss: object = None
    train_op: object = None
    eval_metrics: object = None
    export_outputs: object = None
    scaffold_fn: object = None
    host_call: object = None
    training_hooks: object = None
    evaluation_hooks: object = None
    prediction_hooks: object = None


class _Held(types.SimpleNamespace):
    """Holds its keyword arguments as attributes; what it was not given is None."""

    def __init__(self, *values: object, **named: object) -> None:
        super().__init__(values=values, **named)

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


_HOLDERS = ("RunConfig", "TPUConfig", "InputPipelineConfig", "ServingInputReceiver", "TensorServingInputReceiver",
            "PredictOutput", "ClassificationOutput", "RegressionOutput")


def _module(name: str, **names: object) -> types.ModuleType:
    """A module with these names, which says of others why they are not there."""
    module = types.ModuleType(name, "Put back by pase_mtf: names that hold values, nothing with a behaviour.")
    vars(module).update(names)

    def missing(wanted: str) -> NoReturn:
        raise AttributeError(f"module {name!r} has no {wanted!r}: it left TensorFlow in 2.16, and pase_mtf puts back "
                             "only names that hold values; train by a session, such as "
                             "tf.compat.v1.train.MonitoredTrainingSession")

    vars(module)["__getattr__"] = missing
    return module


def estimator_modules(tf: types.ModuleType) -> dict[str, types.ModuleType]:
    """The modules to put back: name -> module.

    Args:
      tf: tensorflow.compat.v1, which still has what hooks derive from.
    """
    holders = {name: type(name, (_Held,), {"__doc__": _Held.__doc__}) for name in _HOLDERS}
    tpu_names = {"TPUEstimatorSpec": TPUEstimatorSpec, **{
        name: holders[name] for name in ("RunConfig", "TPUConfig", "InputPipelineConfig")}}
    tpu = _module("tensorflow.compat.v1.estimator.tpu", **tpu_names)
    export = _module("tensorflow.compat.v1.estimator.export", **{
        name: holders[name] for name in _HOLDERS if name.endswith(("Receiver", "Output"))})
    estimator = _module(
        "tensorflow.compat.v1.estimator", __path__=[], tpu=tpu, export=export, EstimatorSpec=EstimatorSpec,
        RunConfig=holders["RunConfig"],
        ModeKeys=types.SimpleNamespace(TRAIN="train", EVAL="eval", PREDICT="infer"),
        **{name: getattr(tf.train, name) for name in (
            "CheckpointSaverHook", "CheckpointSaverListener", "FeedFnHook", "FinalOpsHook", "GlobalStepWaiterHook",
            "LoggingTensorHook", "NanTensorHook", "ProfilerHook", "SecondOrStepTimer", "SessionRunArgs",
            "SessionRunContext", "SessionRunHook", "SessionRunValues", "StepCounterHook", "StopAtStepHook",
            "SummarySaverHook") if hasattr(tf.train, name)})
    return {module.__name__: module for module in (estimator, tpu, export)} | {
        "tensorflow.python.tpu.tpu_config": _module("tensorflow.python.tpu.tpu_config", **{
            name: holders[name] for name in ("RunConfig", "TPUConfig", "InputPipelineConfig")}),
        "tensorflow.python.tpu.tpu_estimator": _module("tensorflow.python.tpu.tpu_estimator", **tpu_names)}
