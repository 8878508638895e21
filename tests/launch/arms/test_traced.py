"""A step that TensorFlow traced, as a timeline."""

from types import SimpleNamespace

import numpy as np

from pase_mtf.compat import tf
from pase_mtf.launch.arms.traced import Work, fallen_to_cpu, timeline_of, traced_slices


def _node(name, operation, begin, end):
    return SimpleNamespace(node_name=name, timeline_label=f"{name} = {operation}(x, y)", all_start_nanos=1000,
                           op_start_rel_nanos=begin, op_end_rel_nanos=end)


def _metadata(**devices):
    return SimpleNamespace(step_stats=SimpleNamespace(dev_stats=[
        SimpleNamespace(device=f"/job:localhost/replica:0/task:0/device:{name.replace('_', ':')}", node_stats=nodes)
        for name, nodes in devices.items()]))


def test_what_nodes_are_made_for():
    works = {"einsum": Work("dense", "forward"), "loop/einsum": Work("inner", "backward")}
    step = timeline_of(traced_slices(_metadata(
        CPU_0=[_node("einsum/Einsum", "Einsum", 500, 700), _node("einsum/all_reduce_1/AddN", "AddN", 700, 800),
               _node("einsum/Const", "Const", 0, 9000), _node("feed/Mul", "Mul", 0, 9000)],
        CPU_1=[_node("loop/einsum/resharding/Slice", "Slice", 800, 900),
               _node("loop/einsum/all_reduce/AddN", "AddN", 900, 1000)],
        CPU_9=[_node("einsum/Einsum", "Einsum", 0, 9000)]), works, {"CPU:0": 0, "CPU:1": 1}), 2,
        "step")
    assert [(one.kind, one.phase, one.layer, one.device) for one in step.slices] == [
        ("kernels", "forward", "dense", 0), ("all-reduce", "forward", "dense", 0),
        ("resharding", "backward", "inner", 1), ("all-reduce", "backward", "inner", 1)]
    np.testing.assert_allclose([(one.begin, one.end) for one in step.slices],
                               np.array([(0, 200), (200, 300), (300, 400), (400, 500)]) * 1e-9, atol=1e-15)
    assert step.devices == 2
    np.testing.assert_allclose(step.seconds, 500e-9)
    assert timeline_of(traced_slices(_metadata(CPU_0=[]), works, {"CPU:0": 0}), 1, "nothing").seconds == 0.0


def test_what_is_copied_is_told_from_what_is_sent_where_devices_have_memory_of_their_own():
    metadata = _metadata(CPU_0=[_node("einsum/resharding/Split", "Split", 0, 1),
                                _node("einsum/resharding/Recv", "CollectiveGather", 1, 2),
                                _node("einsum/resharding/concat", "ConcatV2", 2, 3),
                                _node("einsum/Concat", "ConcatV2", 3, 4)])
    sent = ["resharding"] * 3
    for apart, kinds in ((True, ["copying", "resharding", "copying"]), (False, sent)):
        found = traced_slices(metadata, {"einsum": Work("dense", "forward")}, {"CPU:0": 0}, apart=apart)
        assert [one.kind for one in found] == [*kinds, "kernels"]


def test_operations_without_a_kernel_for_gpus_are_told():
    with tf.Graph().as_default() as graph:
        for device, name in (("GPU:0", "unique"), ("GPU:0", "product"), ("CPU:0", "feed"), ("GPU:0", "const")):
            with tf.device(f"/device:{device}"):
                tf.no_op(name)
    ran = {"GPU_0": [_node("product", "MatMul", 0, 9)],
           "CPU_0": [_node("unique", "Unique", 0, 9), _node("feed", "Mul", 0, 9), _node("const", "Const", 0, 9)]}
    assert fallen_to_cpu(_metadata(**ran), graph) == ["Unique"]
    assert fallen_to_cpu(_metadata(GPU_0=ran["GPU_0"]), graph) == []


def test_a_tenth_of_a_microsecond_is_told_on_the_clock_of_a_computer():
    """In seconds since 1970 a float is rounded to a quarter of a microsecond."""
    now = 1_764_547_200_000_000_000
    node = _node("einsum/Einsum", "Einsum", 100, 200)
    node.all_start_nanos = now
    one, = traced_slices(_metadata(CPU_0=[node]), {"einsum": Work("dense", "forward")}, {"CPU:0": 0}, since=now)
    np.testing.assert_allclose((one.begin, one.end), (1e-7, 2e-7), rtol=1e-9)


def test_only_gradients_of_weights_are_called_so():
    """What the backward pass hands on is summed in it; in simulated steps that is an all-reduce as any other."""
    metadata = _metadata(CPU_0=[_node(f"{phase}/all_reduce/AddN", "AddN", begin, begin + 1)
                                for begin, phase in enumerate(("forward", "backward", "update"))])
    works = {phase: Work("dense", phase) for phase in ("forward", "backward", "update")}
    assert [one.kind for one in traced_slices(metadata, works, {"CPU:0": 0})] == [
        "all-reduce", "all-reduce", "gradient all-reduce"]
