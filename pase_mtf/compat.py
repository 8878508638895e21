"""TensorFlow and Mesh-TensorFlow, made to fit each other.

The only module that knows which TensorFlow is installed: everything else imports ``tf`` (the v1 graph API, which
Mesh-TensorFlow is written for) and ``mtf`` from here. `_tensorflow` makes the two fit each other.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterable

# Read by TensorFlow's C++ core when it is loaded: without them every command of ours would open with its banner.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Each session has the threads that it asks for. Otherwise the first one of a process decides for all: kernels are timed
# on other threads than train, and sums of convolutions, which are made in as many pieces as there are threads, round
# otherwise in another process.
os.environ.setdefault("TF_OVERRIDE_GLOBAL_THREADPOOL", "1")


@contextlib.contextmanager
def _without_banner():
    """Holds stderr back (the file descriptor: the banner is written in C++), then writes all of it but the banner."""
    with contextlib.ExitStack() as stack:
        try:
            sys.stderr.flush()
            stderr = os.dup(2)
            stack.callback(os.close, stderr)
            held = stack.enter_context(tempfile.TemporaryFile())
        except (AttributeError, OSError):  # there is no stderr: nothing to silence; or no folder for temporary files
            yield
            return
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            held.seek(0)
            for line in held.read().decode(errors="replace").splitlines(keepends=True):
                if "absl::InitializeLog()" not in line and "oneDNN custom operations" not in line:
                    sys.stderr.write(line)


with _without_banner():
    from pase_mtf._tensorflow import tf

__all__ = ["func_graph", "graph_of_nodes", "mtf", "op_def_registry", "placement_mesh_impl",
           "pywrap_tf_session", "random_seed", "resource_variable_ops", "tf", "tf_stack", "variable_scope"]

tf.logging.set_verbosity(tf.logging.ERROR)

import mesh_tensorflow as mtf  # noqa: E402
from mesh_tensorflow import placement_mesh_impl  # noqa: E402
from tensorflow.python.client import pywrap_tf_session  # noqa: E402  # private to TensorFlow, so it may move
from tensorflow.python.framework import (  # noqa: E402  # private to TensorFlow, so they may move
    func_graph,
    op_def_registry,
    random_seed,
)
from tensorflow.python.ops import (  # noqa: E402  # private to TensorFlow, so they may move
    resource_variable_ops,
    variable_scope,
)
from tensorflow.python.util import tf_stack  # noqa: E402  # private to TensorFlow, so it may move

from pase_mtf._same_graphs import mend  # noqa: E402

mend(mtf)  # of a program that imported it before any module of ours


class _BareGraph(tf.Graph):
    """A graph that makes Python's side of few of the nodes that are imported into it."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self._wanted = frozenset(names)

    def _add_new_tf_operations(self, compute_devices: bool = True) -> list[tf.Operation]:
        for node in self.new_operations():
            if pywrap_tf_session.TF_OperationName(node) in self._wanted:
                self._create_op_from_tf_operation(node, compute_device=False)
        return []  # there is nothing to be done with them: devices are as in the definition


def graph_of_nodes(definition: tf.GraphDef, names: Iterable[str]) -> tuple[tf.Graph, dict[str, tf.Operation]]:
    """A graph of many nodes of which few are run, in a tenth of the time that `tf.import_graph_def` takes.

    Args:
      definition: its nodes, each with its device, none of them colocated with another.
      names: of the nodes that are run.

    Returns:
      The graph and name -> node.

    Raises:
      KeyError: it has no node of a name.
      ValueError: the definition is of no graph.
    """
    graph = _BareGraph(names := list(names))
    with graph.as_default():
        tf.import_graph_def(definition, name="")
    return graph, {name: graph.get_operation_by_name(name) for name in names}
