"""TensorFlow and Mesh-TensorFlow, made to fit each other.

The only module that knows which TensorFlow is installed: everything else imports ``tf`` (the v1 graph API, which
Mesh-TensorFlow is written for) and ``mtf`` from here. `_tensorflow` makes the two fit each other.
"""

import contextlib
import os
import sys
import tempfile

# Read by TensorFlow's C++ core when it is loaded: without them every command of ours would open with its banner.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Each session has the threads that it asks for. Otherwise the first one of a process decides for all: kernels are timed
# on other threads than train, and sums of convolutions, which are made in as many pieces as there are threads, round
# otherwise in another process.
os.environ.setdefault("TF_OVERRIDE_GLOBAL_THREADPOOL", "1")


@contextlib.contextmanager
def _without_banner():
    """Holds stderr back (the file descriptor: the banner is written in C++), then writes all of it but the banner."""
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
    from pase_mtf._tensorflow import tf

__all__ = ["func_graph", "mtf", "op_def_registry", "placement_mesh_impl", "resource_variable_ops", "tf",
           "variable_scope"]

tf.logging.set_verbosity(tf.logging.ERROR)

import mesh_tensorflow as mtf  # noqa: E402
from mesh_tensorflow import placement_mesh_impl  # noqa: E402
from tensorflow.python.framework import (  # noqa: E402  # private to TensorFlow, so they may move
    func_graph,
    op_def_registry,
)
from tensorflow.python.ops import (  # noqa: E402  # private to TensorFlow, so they may move
    resource_variable_ops,
    variable_scope,
)
