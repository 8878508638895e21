"""The names that Mesh-TensorFlow reads of TensorFlow while it is imported, put back where they have gone.

mesh-tensorflow 0.1.21 was written for TensorFlow 2.12 and older, and so were the programs that use it. What they name
and has gone is put back; nothing that is there is changed. To import this module is to do it: `compat` does so, and
`_import_hook` for programs that import Mesh-TensorFlow themselves.
"""

import contextlib
import fractions
import importlib
import importlib.util
import math
import sys
from collections.abc import Iterator
from typing import Any

from pase_mtf._estimator import estimator_modules

# mesh_tensorflow.auto_mtf solves by ortools, whose library crashes the process where it is loaded after TensorFlow's.
if "tensorflow" not in sys.modules and importlib.util.find_spec("ortools") is not None:
    importlib.import_module("ortools.sat.python.cp_model_helper")


@contextlib.contextmanager
def _keras_later() -> Iterator[None]:
    """Imports TensorFlow without Keras; what first reads `tf.keras`, or imports from it, imports that.

    TensorFlow's last import is Keras (and by it matplotlib), so that models which Keras saved are known: a fifth of
    the time that `import tensorflow` takes, in every process of a run.
    """
    if "tensorflow" in sys.modules or "keras" in sys.modules:
        yield
        return
    missing: Any = None  # what Python takes for a module that is not there
    # Of all Keras the one module that TensorFlow imports: were "keras" itself not there, TensorFlow would not take its
    # folder into its own path either, and `from tensorflow.keras.layers import Dense` would find nothing ever after.
    sys.modules["keras.src.optimizers"] = missing
    try:
        yield
    finally:
        del sys.modules["keras.src.optimizers"]


with _keras_later():
    import tensorflow.compat.v1 as tf

__all__ = ["tf"]


def _restore_estimator() -> None:
    """`tf.estimator` left TensorFlow in 2.16; Mesh-TF subclasses two of its names, and programs read a few more."""
    try:
        from tensorflow.compat.v1 import estimator  # noqa: F401
        return
    except ImportError:
        pass
    modules = estimator_modules(tf)
    for name, module in modules.items():
        sys.modules.setdefault(name, module)
        parent, _, last = name.rpartition(".")
        if parent in sys.modules and not hasattr(sys.modules[parent], last):
            setattr(sys.modules[parent], last, module)
    # `import tensorflow.compat.v1 as tf` may give a lazily loading wrapper beside the real module.
    tf.estimator = modules["tensorflow.compat.v1.estimator"]
    # gin, by which Mesh-TF's transformer is configured, reads it there.
    newest: Any = sys.modules["tensorflow"]
    if not hasattr(newest, "estimator"):
        newest.estimator = tf.estimator


def _restore_gcd() -> None:
    """`fractions.gcd` left Python in 3.9; programs of Mesh-TF's time read it there."""
    if not hasattr(fractions, "gcd"):
        vars(fractions)["gcd"] = math.gcd


def _restore_conversion_function() -> None:
    """`ops.register_tensor_conversion_function` moved to a module of its own."""
    from tensorflow.python.framework import ops  # here, as importing this module imports no TensorFlow
    if not hasattr(ops, "register_tensor_conversion_function"):
        from tensorflow.python.framework import tensor_conversion_registry  # earlier TensorFlow has none
        ops.register_tensor_conversion_function = (
            tensor_conversion_registry.register_tensor_conversion_function)


_restore_estimator()
_restore_gcd()
_restore_conversion_function()
