"""A step that TensorFlow traced, as a timeline."""

from types import SimpleNamespace

import numpy as np

from pase_mtf.launch.traced import Work, traced_step


def _node(name, operation, begin, end):
    return SimpleNamespace(node_name=name, timeline_label=f"{name} = {operation}(x, y)", all_start_nanos=1000,
                           op_start_rel_nanos=begin, op_end_rel_nanos=end)


def _metadata(**devices):
    return SimpleNamespace(step_stats=SimpleNamespace(dev_stats=[
        SimpleNamespace(device=f"/job:localhost/replica:0/task:0/device:{name.replace('_', ':')}", node_stats=nodes)
        for name, nodes in devices.items()]))


def test_what_nodes_are_made_for():
    works = {"einsum": Work("dense", "forward"), "loop/einsum": Work("inner", "backward")}
    step = traced_step(_metadata(
        CPU_0=[_node("einsum/Einsum", "Einsum", 500, 700), _node("einsum/all_reduce_1/AddN", "AddN", 700, 800),
               _node("einsum/Const", "Const", 0, 9000), _node("feed/Mul", "Mul", 0, 9000)],
        CPU_1=[_node("loop/einsum/resharding/Slice", "Slice", 800, 900),
               _node("loop/einsum/all_reduce/AddN", "AddN", 900, 1000)],
        CPU_9=[_node("einsum/Einsum", "Einsum", 0, 9000)]), works, {"CPU:0": 0, "CPU:1": 1}, "step")
    assert [(one.kind, one.phase, one.layer, one.device) for one in step.slices] == [
        ("kernels", "forward", "dense", 0), ("all-reduce", "forward", "dense", 0),
        ("resharding", "backward", "inner", 1), ("gradient all-reduce", "backward", "inner", 1)]
    np.testing.assert_allclose([(one.begin, one.end) for one in step.slices],
                               np.array([(0, 200), (200, 300), (300, 400), (400, 500)]) * 1e-9, atol=1e-15)
    assert step.devices == 2
    np.testing.assert_allclose(step.seconds, 500e-9)
    assert traced_step(_metadata(CPU_0=[]), works, {"CPU:0": 0}, "nothing").seconds == 0.0
