"""Mesh-TensorFlow on today's TensorFlow: Mesh-TF's own tests, and what a user sees of the two."""

import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile

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


@pytest.mark.slow
def test_importing_says_nothing():
    result = _run("-c", "from pase_mtf.compat import mtf, tf; print(mtf.Graph.__name__, tf.Session.__name__)")
    assert (result.returncode, result.stdout, result.stderr) == (0, "Graph Session\n", "")


@pytest.mark.slow
def test_keras_and_matplotlib_are_imported_when_they_are_asked_for():
    """TensorFlow imports them by itself, which takes a second in every process of a run."""
    result = _run("-c", "import sys\n"
                        "from pase_mtf.compat import tf\n"
                        "assert not {'keras', 'matplotlib'} & set(sys.modules)\n"
                        "import tensorflow\n"
                        "print(tf.keras.layers.Dense.__name__, tensorflow.keras.layers.Dense.__name__)\n"
                        "assert 'keras' in sys.modules")
    assert (result.returncode, result.stdout) == (0, "Dense Dense\n"), result.stderr


_PATH_FILE = "pase_mtf-mesh-tensorflow.pth"
# As in an environment where the package is not installed but on the path: without what the path file registered.
_NOT_INSTALLED = "import sys; sys.meta_path = [it for it in sys.meta_path if type(it).__name__ != 'PaseMtfFinder']\n"
_AGREE = ("from pase_mtf.compat import mtf as ours, placement_mesh_impl as theirs\n"
          "assert mtf is ours and mtf.placement_mesh_impl is theirs\nprint(mtf.Graph.__name__)")


def _without_notes(text: str) -> str:
    """Standard error but for what TensorFlow says of itself when a program imports it."""
    return "".join(line for line in text.splitlines(keepends=True)
                   if not re.match(r"WARNING: All log messages|I0000 |To enable the following", line))


@pytest.mark.parametrize("code", [
    # pase_mtf first, which stays light.
    "import pase_mtf\nassert 'tensorflow' not in sys.modules\nimport mesh_tensorflow as mtf\n",
    # mesh_tensorflow first fails halfway; then again.
    pytest.param(
        "try:\n    import mesh_tensorflow\nexcept ImportError as error:\n    assert 'estimator' in str(error)\n"
        "else:\n    raise SystemExit('TensorFlow has an estimator again: compat has nothing to do')\n"
        "import pase_mtf\nimport mesh_tensorflow as mtf\n", marks=pytest.mark.slow),
], ids=["after pase_mtf", "again"])
def test_a_program_imports_mesh_tensorflow_by_itself(code):
    result = _run("-c", _NOT_INSTALLED + code + _AGREE)
    assert (result.returncode, result.stdout, _without_notes(result.stderr)) == (0, "Graph\n", "")


@pytest.mark.slow
def test_names_that_old_programs_read_are_back():
    code = """
import mesh_tensorflow as mtf
import tensorflow
import tensorflow.compat.v1 as tf
from fractions import gcd
from tensorflow.compat.v1 import estimator
from tensorflow.compat.v1.estimator import tpu
from tensorflow.python.tpu import tpu_config, tpu_estimator
assert gcd(12, 18) == 6
spec = tf.estimator.EstimatorSpec(tf.estimator.ModeKeys.TRAIN, loss=1, train_op=2)
assert (spec.mode, spec.loss, spec.train_op, spec.predictions) == ("train", 1, 2, None)
assert tpu_estimator.TPUEstimatorSpec is tpu.TPUEstimatorSpec
assert tf.estimator.tpu.TPUEstimatorSpec("eval", eval_metrics=3).eval_metrics == 3
config = tpu_config.RunConfig(tpu_config=tpu_config.TPUConfig(iterations_per_loop=10))
assert (config.tpu_config.iterations_per_loop, config.model_dir) == (10, None)
assert tensorflow.estimator is estimator
assert issubclass(estimator.StopAtStepHook, estimator.SessionRunHook)
try:
    tf.estimator.Estimator
except AttributeError as error:
    print(error)
"""
    result = _run("-c", code)
    assert result.returncode == 0, result.stderr
    assert "'Estimator': it left TensorFlow in 2.16" in result.stdout


@pytest.mark.slow
def test_ortools_is_loaded_before_tensorflow_where_it_is_installed(tmp_path):
    """Loaded after TensorFlow, its solver crashes the process."""
    package = tmp_path / "ortools" / "sat" / "python"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "cp_model_helper.py").write_text("import sys\nprint('tensorflow' in sys.modules)\n")
    result = _run("-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import pase_mtf.compat")
    assert (result.returncode, result.stdout) == (0, "False\n")


@pytest.mark.slow
def test_an_installation_lets_mesh_tensorflow_be_imported_first(repository):
    line = (repository / "pase_mtf" / _PATH_FILE).read_text()
    code = f"{_NOT_INSTALLED}exec({line!r})\nassert 'pase_mtf' not in sys.modules\n"
    result = _run("-c", code + "import mesh_tensorflow.ops\nimport mesh_tensorflow as mtf\n" + _AGREE)
    assert (result.returncode, result.stdout, _without_notes(result.stderr)) == (0, "Graph\n", "")


def test_what_is_left_of_an_installation_does_no_harm(repository):
    line = (repository / "pase_mtf" / _PATH_FILE).read_text()
    assert line.startswith("import ")  # Python runs such lines only
    assert line.count("\n") == 1
    # -S: without site-packages there is neither pase_mtf nor mesh_tensorflow.
    code = (f"import sys; exec({line!r})\nimport json, importlib.util\n"
            "assert importlib.util.find_spec('mesh_tensorflow') is None\nprint(len(sys.modules) < 200)")
    result = _run("-I", "-S", "-c", code)
    assert (result.returncode, result.stdout, result.stderr) == (0, "True\n", "")


def test_asking_for_mesh_tensorflow_imports_no_tensorflow():
    code = ("import sys, importlib.util, pase_mtf\nspec = importlib.util.find_spec('mesh_tensorflow')\n"
            "print(spec.name, spec.has_location, 'tensorflow' in sys.modules, spec.loader.get_source(spec.name) != '')")
    assert _run("-c", code).stdout == "mesh_tensorflow True False True\n"


def test_wheels_hold_the_path_file_beside_the_package(repository, tmp_path):
    for folder in ("pase_mtf", "models", "launch", "configs"):
        shutil.copytree(repository / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repository / file, tmp_path)
    for kind in ("wheel", "editable"):
        subprocess.run([sys.executable, "-c", f"from setuptools import build_meta; build_meta.build_{kind}({kind!r})"],
                       cwd=tmp_path, check=True, capture_output=True, timeout=300)
        names = zipfile.ZipFile(next((tmp_path / kind).glob("*.whl"))).namelist()
        assert _PATH_FILE in names, kind


@pytest.mark.slow
def test_a_message_that_is_not_the_banner_is_passed_on():
    code = ("import os, pase_mtf.compat as c\n"
            "with c._without_banner():\n"
            "    os.write(2, b'a warning\\nWARNING: All log messages before absl::InitializeLog() is called\\n')")
    assert _run("-c", code).stderr == "a warning\n"


@pytest.mark.parametrize("missing", ["standard error", "temporary folder"])
def test_what_a_banner_is_held_back_with_may_be_missing(monkeypatch, missing):
    from pase_mtf import compat
    if missing == "standard error":
        monkeypatch.setattr(compat.sys, "stderr", None)
    else:
        monkeypatch.setattr(compat.tempfile, "tempdir", "/nowhere")
    with compat._without_banner():
        loaded = True
    assert loaded


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


def test_a_graph_of_nodes_is_as_it_is_defined():
    """Of many nodes Python sees those that are run; all others compute where the definition says."""
    from pase_mtf.compat import graph_of_nodes, tf
    with tf.Graph().as_default() as graph:
        with tf.device("/device:CPU:1"):
            total = tf.add(tf.constant(2.0), 3.0, name="total")
        tf.multiply(total, total, name="square")
    definition = graph.as_graph_def()
    bare, found = graph_of_nodes(definition, ["square"])
    assert [node.name for node in bare.get_operations()] == ["square"] == list(found)
    written = {node.name: node.device for node in bare.as_graph_def().node}
    assert written == {node.name: node.device for node in definition.node}
    assert len(written) == 4
    with tf.Session(graph=bare, config=tf.ConfigProto(device_count={"CPU": 2})) as session:
        assert session.run(found["square"].outputs[0]) == 25.0
    with pytest.raises(KeyError):
        graph_of_nodes(definition, ["cube"])


def test_a_custom_gradient_may_name_what_its_operations_do_not_read():
    from pase_mtf.compat import mtf, tf
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        x, unread = (mtf.zeros(mesh, [mtf.Dimension("x", 4)]) for _ in range(2))
        y = mtf.exp(x)
        made = mtf.ops.CustomGradientOperation([x], [x, unread], [y], None, [y.operation])
    assert all(one is other for one, other in zip(made.inputs, [x, unread, y], strict=True))


@pytest.mark.slow
def test_keras_is_found_below_tensorflow():
    """`from tensorflow.keras.layers import Dense` looks for it in the path of the package, not among its names."""
    result = _run("-c", "import sys\n"
                        "from pase_mtf.compat import tf\n"
                        "assert not {'keras', 'matplotlib'} & set(sys.modules)\n"
                        "from tensorflow.keras.layers import Dense\n"
                        "import tensorflow\n"
                        "print(Dense.__name__, None in tensorflow.__path__)")
    assert (result.returncode, result.stdout) == (0, "Dense False\n"), result.stderr


def test_what_lies_in_a_zip_file_beside_mesh_tensorflow_is_imported_as_ever(tmp_path):
    """One loader serves all modules of such a file."""
    with zipfile.ZipFile(tmp_path / "both.zip", "w") as both:
        both.writestr("mesh_tensorflow.py", "class ops:\n    class CustomGradientOperation:\n"
                                            "        def __init__(self):\n            pass\n")
        both.writestr("beside.py", "value = 3\n")
    code = (f"import sys, types\nsys.path.insert(0, {str(tmp_path / 'both.zip')!r})\nimport pase_mtf\n"
            "sys.modules['pase_mtf._tensorflow'] = types.ModuleType('pase_mtf._tensorflow')  # takes seconds\n"
            "import mesh_tensorflow, beside\n"
            "print(hasattr(mesh_tensorflow.ops.CustomGradientOperation.__init__, '__wrapped__'), beside.value)")
    result = _run("-c", code)
    assert (result.returncode, result.stdout) == (0, "True 3\n"), result.stderr
