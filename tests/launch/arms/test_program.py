"""The program that every arm trains."""

import pytest

from pase_mtf import models
from pase_mtf.compat import tf
from pase_mtf.export.exporter import export_graph
from pase_mtf.launch.arms.program import build_program, variables_by_name


@pytest.mark.parametrize(("model", "optimizer"), [("transformer", "adam"), ("alexnet", "sgd"), ("rnnlm", "adafactor")])
def test_variables_by_name(model, optimizer):
    """An export needs no TensorFlow variables, and is the same without them."""
    def export():
        program = build_program(models.get(model), models.load_config(model, "tiny"), 16, optimizer, None
                                if optimizer == "adafactor" else 0.1, 0)
        return export_graph(program.graph), {variable.op.name for variable in tf.global_variables()}

    with tf.Graph().as_default():
        whole, variables = export()
    with tf.Graph().as_default(), variables_by_name():
        light, left = export()
    assert light == whole
    assert light.hash == whole.hash
    assert left == {"global_step"}
    assert len(variables) > 10
