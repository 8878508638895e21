"""TensorFlow and Mesh-TensorFlow, made to fit each other.

The only module that knows which TensorFlow is installed: everything else imports ``tf`` (the v1 graph API, which
Mesh-TensorFlow is written for) and ``mtf`` from here.

mesh-tensorflow 0.1.21 was written for TensorFlow 2.12 and older. Two names that it reads while it is imported have
gone since; they are put back here, before the import, and nothing else is changed.
"""

import contextlib
import os
import sys
import tempfile
import types

# Read by TensorFlow's C++ core when it is loaded: without them every command of ours would open with its banner.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


@contextlib.contextmanager
def _without_banner():
    """Holds stderr back (the file descriptor: the banner is written in C++) and hands on all but the banner."""
    try:
        stderr = os.dup(2)
    except OSError:  # no stderr at all: nothing to silence
        yield
        return
    with tempfile.TemporaryFile() as held:
        sys.stderr.flush()
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            held.seek(0)
            for line in held.read().decode(errors="replace").splitlines(keepends=True):
                if "absl::InitializeLog()" not in line and "oneDNN custom operations" not in line:
                    sys.stderr.write(line)


with _without_banner():
    import tensorflow.compat.v1 as tf

__all__ = ["func_graph", "mtf", "placement_mesh_impl", "resource_variable_ops", "tf"]


def _restore_estimator() -> None:
    """`tf.estimator` left TensorFlow in 2.16; Mesh-TF subclasses two of its names, and its models read a third."""
    try:
        from tensorflow.compat.v1 import estimator  # noqa: F401
        return
    except ImportError:
        pass
    module = types.ModuleType("tensorflow.compat.v1.estimator")
    module.CheckpointSaverListener = tf.train.CheckpointSaverListener
    module.SessionRunHook = tf.train.SessionRunHook
    module.ModeKeys = types.SimpleNamespace(TRAIN="train", EVAL="eval", PREDICT="infer")
    sys.modules["tensorflow.compat.v1.estimator"] = module
    tf.estimator = module
    # `import tensorflow.compat.v1 as tf` may hand out a lazily loading wrapper: the real module needs it as well.
    sys.modules["tensorflow.compat.v1"].estimator = module
    # gin, by which Mesh-TF's transformer is configured, reads it there.
    if not hasattr(sys.modules["tensorflow"], "estimator"):
        sys.modules["tensorflow"].estimator = module


def _restore_conversion_function() -> None:
    """`ops.register_tensor_conversion_function` moved to a module of its own."""
    from tensorflow.python.framework import ops
    if not hasattr(ops, "register_tensor_conversion_function"):
        from tensorflow.python.framework import tensor_conversion_registry
        ops.register_tensor_conversion_function = (
            tensor_conversion_registry.register_tensor_conversion_function)


_restore_estimator()
_restore_conversion_function()
tf.logging.set_verbosity(tf.logging.ERROR)

import mesh_tensorflow as mtf  # noqa: E402
from mesh_tensorflow import placement_mesh_impl  # noqa: E402
from tensorflow.python.framework import func_graph  # noqa: E402  # private to TensorFlow, so it may move
from tensorflow.python.ops import resource_variable_ops  # noqa: E402  # private to TensorFlow, so it may move
