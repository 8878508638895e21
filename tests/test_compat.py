"""Mesh-TensorFlow on today's TensorFlow: Mesh-TF's own tests, and what a user sees of the two."""

import importlib.util
import re
import subprocess
import sys

import pytest

# As `python -m mesh_tensorflow.ops_test` would, but with what compat.py puts back.
_RUN_AS_MAIN = """
import runpy, sys
import pase_mtf.compat
sys.argv = [sys.argv[1], "--verbosity=-1"]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def _run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300)


# A process each: they switch TensorFlow's behaviour for the whole process.
@pytest.mark.slow
@pytest.mark.parametrize(("module", "passing"), [("ops_test", 58), ("layers_test", 21)])
def test_mesh_tensorflow_passes_its_own_tests(module, passing):
    if module == "layers_test" and importlib.util.find_spec("tf_keras") is None:
        pytest.fail("layers_test needs tf-keras: make it with `make environment`, or pip install --no-deps tf-keras")
    result = _run("-c", _RUN_AS_MAIN, f"mesh_tensorflow.{module}")
    assert result.returncode == 0, result.stdout + result.stderr
    ran = int(re.search(r"^Ran (\d+) tests", result.stderr, re.MULTILINE)[1])
    skipped = re.findall(r"SKIPPED +\] \w+\.(\w+)$", result.stdout + result.stderr, re.MULTILINE)
    # tf.test.TestCase brings a helper along that looks like a test.
    assert set(skipped) <= {"test_session"}
    assert ran - len(skipped) >= passing


def test_importing_says_nothing():
    result = _run("-c", "from pase_mtf.compat import mtf, tf; print(mtf.Graph.__name__, tf.Session.__name__)")
    assert (result.returncode, result.stdout, result.stderr) == (0, "Graph Session\n", "")


def test_a_message_that_is_not_the_banner_is_handed_on():
    code = ("import os, pase_mtf.compat as c\n"
            "with c._without_banner():\n"
            "    os.write(2, b'a warning\\nWARNING: All log messages before absl::InitializeLog() is called\\n')")
    assert _run("-c", code).stderr == "a warning\n"


def test_mesh_trains_on_virtual_devices():
    """The two names that are put back are enough to build, lower and run: y = 3x from data, on a mesh of two."""
    from pase_mtf.compat import mtf, placement_mesh_impl, tf
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        batch, one = mtf.Dimension("batch", 4), mtf.Dimension("one", 1)
        x = mtf.import_tf_tensor(mesh, tf.constant([[1.], [2.], [3.], [4.]]), mtf.Shape([batch, one]))
        w = mtf.get_variable(mesh, "w", mtf.Shape([one]), initializer=tf.zeros_initializer())
        loss = mtf.reduce_mean(mtf.square(x * w - 3 * x))
        gradients = mtf.gradients([loss], [w])
        updates = mtf.optimize.SgdOptimizer(0.1).apply_grads(gradients, graph.trainable_variables)
        implementation = placement_mesh_impl.PlacementMeshImpl(
            mtf.Shape([mtf.Dimension("rows", 2)]), mtf.LayoutRules([("batch", "rows")]),
            ["/device:CPU:0", "/device:CPU:1"])
        lowering = mtf.Lowering(graph, {mesh: implementation})
        step = [lowering.lowered_operation(update) for update in updates]
        with tf.Session(config=tf.ConfigProto(device_count={"CPU": 2})) as session:
            session.run(tf.global_variables_initializer())
            session.run(lowering.copy_masters_to_slices())
            for _ in range(20):
                session.run(step)
            assert session.run(lowering.export_to_tf_tensor(loss)) < 1e-6
            assert session.run(lowering.export_to_tf_tensor(w)) == pytest.approx([3.], abs=1e-4)
