"""The names that Mesh-TensorFlow reads of TensorFlow while it is imported, put back where they have gone.

mesh-tensorflow 0.1.21 was written for TensorFlow 2.12 and older. Two names are put back and nothing else is changed.
To import this module is to do it; `compat` does so, and `_import_hook` for programs that import Mesh-TensorFlow
themselves.
"""

import sys
import types
from typing import Any

import tensorflow.compat.v1 as tf

__all__ = ["tf"]


def _restore_estimator() -> None:
    """`tf.estimator` left TensorFlow in 2.16; Mesh-TF subclasses two of its names, and its models read a third."""
    try:
        from tensorflow.compat.v1 import estimator  # noqa: F401
        return
    except ImportError:
        pass
    module: Any = types.ModuleType("tensorflow.compat.v1.estimator")
    module.CheckpointSaverListener = tf.train.CheckpointSaverListener
    module.SessionRunHook = tf.train.SessionRunHook
    module.ModeKeys = types.SimpleNamespace(TRAIN="train", EVAL="eval", PREDICT="infer")
    sys.modules["tensorflow.compat.v1.estimator"] = module
    tf.estimator = module
    # `import tensorflow.compat.v1 as tf` may give a lazily loading wrapper: the real module needs it as well.
    real: Any = sys.modules["tensorflow.compat.v1"]
    real.estimator = module
    # gin, by which Mesh-TF's transformer is configured, reads it there.
    newest: Any = sys.modules["tensorflow"]
    if not hasattr(newest, "estimator"):
        newest.estimator = module


def _restore_conversion_function() -> None:
    """`ops.register_tensor_conversion_function` moved to a module of its own."""
    from tensorflow.python.framework import ops
    if not hasattr(ops, "register_tensor_conversion_function"):
        from tensorflow.python.framework import tensor_conversion_registry
        ops.register_tensor_conversion_function = (
            tensor_conversion_registry.register_tensor_conversion_function)


_restore_estimator()
_restore_conversion_function()
