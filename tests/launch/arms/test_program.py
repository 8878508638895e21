"""The program that every arm trains."""

import dataclasses

import pytest

from pase_mtf import models
from pase_mtf.compat import tf
from pase_mtf.errors import MismatchError
from pase_mtf.export.exporter import export_graph
from pase_mtf.launch.arms import program
from pase_mtf.launch.arms.program import build_program, export_with_program, exported, variables_by_name
from pase_mtf.launch.checkpoints.checkpoint import CheckpointInfo
from pase_mtf.launch.options import Options
from pase_mtf.launch.plan import resolve


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


@pytest.fixture
def built(monkeypatch):
    """The runs whose programs are built, one after the other."""
    found, build = [], program.mesh_graph

    def seen(plan):
        found.append((plan.microbatches, plan.recomputed))
        return build(plan)
    monkeypatch.setattr(program, "mesh_graph", seen)
    return found


def _resumed(graph_hash, **told):
    """A run that goes on from the checkpoint of a graph."""
    plan = resolve(Options(model="alexnet", preset="tiny", batch=16, mesh="2", devices="cpu", machine="1080ti",
                           microbatches="4", recompute="all"))
    return dataclasses.replace(plan, checkpoint=CheckpointInfo("checkpoint/step-5", 5, graph_hash, **told))


@pytest.mark.parametrize("tells", ["checkpoint", "folder"])
def test_a_run_that_goes_on_builds_one_program_more_where_it_is_told_which(built, tells):
    """In other microbatches, with other blocks computed again, and updates that were layers of their own: that is one
    of hundreds."""
    plan = _resumed("")
    earlier = plan.in_microbatches(2).recomputing(("conv1", "conv3"))
    earlier = dataclasses.replace(earlier, options=dataclasses.replace(earlier.options, sharded_updates=True))
    graph_hash = exported(earlier)[0].hash
    told = {"microbatches": 2, "recompute": ["conv1", "conv3"]} if tells == "checkpoint" else {}
    options = {} if tells == "checkpoint" else {"microbatches": "2", "recompute": "conv1,conv3"}
    built.clear()
    graph, _ = export_with_program(dataclasses.replace(_resumed(graph_hash, **told), earlier=options))
    assert graph.hash != graph_hash
    assert built == [(4, ("all",)), (2, ("conv1", "conv3"))]


@pytest.mark.parametrize("recompute", [[], ["a block that there is no more"]])
def test_a_checkpoint_of_another_program_is_refused_after_one_more(built, recompute):
    with pytest.raises(MismatchError, match=r"the checkpoint is of graph abc.*; resume with the version"):
        export_with_program(_resumed("abc", microbatches=2, recompute=recompute))
    assert len(built) == 2


@pytest.mark.slow
def test_what_nobody_tells_is_looked_for_in_all_programs(built):
    """A folder may tell of a run that went on in it, and was ended before its first checkpoint."""
    graph_hash = exported(_resumed("").in_microbatches(2).recomputing(()))[0].hash
    built.clear()
    export_with_program(dataclasses.replace(_resumed(graph_hash), earlier={"microbatches": "8", "recompute": "conv2"}))
    assert built[:2] == [(4, ("all",)), (8, ("conv2",))]
    assert built[-1] == (2, ())
