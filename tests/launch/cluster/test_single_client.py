"""One client over the servers of two processes, here of one: devices, variables, memory, losses."""

import socket
import threading

import numpy as np
import pytest
from cluster_runs import two_servers

from pase_mtf.compat import mtf, tf
from pase_mtf.errors import ClusterError
from pase_mtf.export.exporter import export_graph
from pase_mtf.launch.arms.arm import Arm
from pase_mtf.launch.arms.program import Program
from pase_mtf.launch.arms.recipe import lower_stock_data_parallel
from pase_mtf.launch.cluster import server
from pase_mtf.launch.cluster.launcher import local_addresses
from pase_mtf.launch.cluster.server import check_servers, start_server
from pase_mtf.lowering.lowering import lower
from pase_mtf.machine.machine import Machine
from pase_mtf.runtime import Devices
from pase_mtf.strategy.experts import data_parallel
from pase_mtf.strategy.strategy import evaluate_strategy


@pytest.fixture(scope="module")
def served():
    yield from two_servers()


def _program():
    tf.set_random_seed(1)
    step = tf.train.get_or_create_global_step()
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    placeholder = tf.placeholder(tf.float32, [8, 12], name="x")
    batch, wide, hidden = mtf.Dimension("batch", 8), mtf.Dimension("wide", 12), mtf.Dimension("hidden", 16)
    x = mtf.import_tf_tensor(mesh, placeholder, mtf.Shape([batch, wide]))
    y = mtf.layers.dense(mtf.relu(mtf.layers.dense(x, [hidden], name="in")), [wide], name="out")
    loss = mtf.reduce_mean(mtf.square(x - y))
    variables = graph.trainable_variables
    gradients = mtf.gradients([loss], [variable.outputs[0] for variable in variables])
    updates = mtf.optimize.SgdOptimizer(0.5).apply_grads(gradients, variables)
    return Program(graph, mesh, {"x": placeholder}, loss, updates, step)


def _arm(devices, stock=False):
    def lowered(program):
        if stock:
            return lower_stock_data_parallel(program, devices.names, "batch")
        graph = export_graph(program.graph)
        strategy = evaluate_strategy(graph, data_parallel(graph, 4), devices=4, machine=Machine.load("a100"))
        return lower(program.graph, strategy, list(devices.names))
    return Arm("stock" if stock else "ours", _program, lowered, devices)


def _losses(arm, steps=6):
    generator = np.random.default_rng(0)
    return [arm.step({"x": generator.standard_normal((8, 12)).astype(np.float32)}, trace=step == 0)[0]
            for step in range(steps)]


def test_losses_are_those_of_one_process(served):
    alone, over = _arm(Devices.first(4, "cpu")), _arm(served)
    expected = _losses(alone)
    assert expected[-1] < expected[0]
    assert _losses(over) == pytest.approx(expected, rel=1e-6)
    stock = _arm(served, stock=True)
    # Of stock Mesh-TF the first: it reads a variable before or after its update, as it happens (docs/lowering.md).
    assert _losses(stock)[:1] == pytest.approx(expected[:1], rel=1e-5)
    # A second one beside it, from the same initial values: it has variables of its own, of the same names.
    again = _arm(served)
    assert _losses(again) == pytest.approx(expected, rel=1e-6)
    for arm, certain in ((over, len(expected)), (stock, 1)):
        arm.restart()
        assert _losses(arm)[:certain] == pytest.approx(expected[:certain], rel=1e-5)
    for arm in (alone, over, again):
        assert arm.measured_bytes > 0
        assert arm.differing_replicas() is None
    # The slices of the variables lie where they are used, the masters with the client.
    assert sorted(over._held) == sorted(served.names)
    assert {variable.device for variable in over._masters.values()} <= {
        "/job:worker/replica:0/task:0", "/job:worker/replica:0/task:0/device:CPU:0"}
    for arm in (alone, over, stock, again):
        arm.close()


def test_checkpoints_of_several_processes_are_those_of_one(served, tmp_path):
    over = _arm(served)
    _losses(over, 2)
    over.save(str(tmp_path / "model"))
    over.close()
    alone = _arm(Devices.first(4, "cpu"))
    _losses(alone, 2)
    for name, value in alone.values():
        # Between processes a rounding may fall otherwise from run to run: 3e-8, which is much of a weight near 0.
        assert tf.train.load_checkpoint(str(tmp_path / "model")).get_tensor(name) == pytest.approx(
            value, rel=1e-5, abs=1e-7)
    alone.close()


def test_a_missing_process_is_named(served):
    gone, = local_addresses(1)
    with pytest.raises(ClusterError, match=rf"no answer from rank 2 \({gone}\) within 0.3 s"):
        check_servers([*served.tasks, gone], within=0.3)


def test_a_port_that_is_taken(served):
    with pytest.raises(ClusterError, match=f"rank 1: cannot listen at {served.tasks[1]}"):
        start_server(served, 1)


def test_a_connection_with_itself_is_no_server(monkeypatch):
    gone, = local_addresses(1)
    known = socket.create_connection
    monkeypatch.setattr(socket, "create_connection", lambda address, timeout: known(
        address, timeout, source_address=address))  # as the system happens to choose it
    with pytest.raises(ClusterError, match="no answer from rank 0"):
        check_servers([gone], within=0.3)
    socket.create_server(("127.0.0.1", int(gone.rpartition(":")[2]))).close()  # nothing holds it


def test_a_host_that_drops_what_comes_keeps_no_other_waiting(monkeypatch):
    """All are asked at once: by turns, those that came meanwhile were named with it."""
    together = threading.Barrier(3)

    def connect(address, timeout):
        together.wait(5)  # broken where one is asked after the other
        raise TimeoutError
    monkeypatch.setattr(server, "connect", connect)
    with pytest.raises(ClusterError, match=r"no answer from rank 0 \(a:1\), rank 1 \(b:1\), rank 2 \(c:1\)"):
        check_servers(("a:1", "b:1", "c:1"), within=0.3)
