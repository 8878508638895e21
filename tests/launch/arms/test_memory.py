from types import SimpleNamespace

import numpy as np
import pytest

from pase_mtf.compat import tf
from pase_mtf.errors import OutOfMemoryError
from pase_mtf.launch.arms.memory import check_memory, peak_bytes_per_device, variable_bytes_per_device
from pase_mtf.pipeline.pipeline import Pipeline, Stage
from pase_mtf.runtime import Devices


def _device(name, *nodes):
    def memory(records):
        return SimpleNamespace(
            allocation_records=[SimpleNamespace(alloc_micros=at, alloc_bytes=size) for at, size in records])
    return SimpleNamespace(device=f"/job:localhost/replica:0/task:0/device:{name}",
                           node_stats=[_node(memory=[memory(records)]) for records in nodes])


def _node(name="node", label="", end=0, nbytes=0, memory=()):
    described = SimpleNamespace(allocation_description=SimpleNamespace(requested_bytes=nbytes))
    return SimpleNamespace(node_name=name, timeline_label=label, all_start_micros=0, op_end_rel_micros=end,
                           memory=list(memory), output=[SimpleNamespace(slot=0, tensor_description=described)])


def _metadata(*devices):
    return SimpleNamespace(step_stats=SimpleNamespace(dev_stats=devices))


def test_peak_is_what_lives_at_once():
    metadata = _metadata(
        _device("CPU:0", [(1, 100), (5, -100)], [(3, 50), (9, -50)], [(5, 80)]),
        _device("CPU:1", [(1, 10)]))
    # 100+50 at 3; at 5 the 100 go and 80 come: 130.
    assert peak_bytes_per_device(metadata) == {"CPU:0": 150, "CPU:1": 10}


def test_variables_are_added():
    metadata = _metadata(_device("CPU:0", [(1, 100), (2, -100)]))
    assert peak_bytes_per_device(metadata, {"/device:CPU:0": 1000, "/device:CPU:3": 7}) == {"CPU:0": 1100, "CPU:3": 7}


def test_masters_count_where_a_step_touches_them():
    """One that is its own only slice does; one whose slices are elsewhere does not."""
    with tf.Graph().as_default() as graph:
        held, read = tf.get_collection_ref("slices"), []
        for name, master, slices in (("whole", "CPU:1", ()), ("split", "CPU:0", ("CPU:0", "CPU:1"))):
            with tf.device(f"/device:{master}"):
                variable = tf.get_variable(name, [8, 4], use_resource=True)
            for number, device in enumerate(slices):
                with tf.device(f"/device:{device}"):
                    held.append(tf.get_variable(f"{name}_{number}", [4, 4], use_resource=True, collections=["slices"]))
            read += held if slices else [variable]
        with tf.control_dependencies([variable.read_value() for variable in read]):
            step = tf.no_op()
        assert variable_bytes_per_device(graph, [step]) == {"/device:CPU:1": 128 + 64, "/device:CPU:0": 64}


def test_the_new_value_of_a_variable_takes_the_place_of_the_old_when_it_is_assigned():
    device = _device("CPU:0", [(1, 100)], [(2, 50), (3, -50)], [(5, 70), (6, -70)])
    device.node_stats += [_node("new", nbytes=100),
                          _node("assign", "assign = AssignVariableOp(variable, new)", end=4)]
    # The old and the new value and 50 more at 2; at 5 the old one is gone.
    assert peak_bytes_per_device(_metadata(device), {"/device:CPU:0": 100}) == {"CPU:0": 250}
    device.node_stats[-1] = _node("assign", "assign = AssignVariableOp(variable, new, ^other)", end=2)
    assert peak_bytes_per_device(_metadata(device), {"/device:CPU:0": 100}) == {"CPU:0": 200}


def test_values_of_a_real_step_are_given_back_when_they_are_assigned():
    """The old value, the product that waits to become the new one, and what is added to it last."""
    size = 256 * 256 * 4
    with tf.Graph().as_default():
        with tf.device("/device:CPU:1"):
            variable = tf.get_variable("v", initializer=np.ones((256, 256), np.float32), use_resource=True)
            kept = variable * 0.9
            with tf.control_dependencies([kept]):
                product = tf.matmul(variable, variable)
            step = variable.assign(kept + product).op
        with tf.Session(config=tf.ConfigProto(device_count={"CPU": 2})) as session:
            session.run(tf.global_variables_initializer())
            metadata = tf.RunMetadata()
            session.run(step, None, tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), metadata)
    assert 3 * size <= peak_bytes_per_device(metadata, {"/device:CPU:1": size})["CPU:1"] < 3.1 * size


@pytest.mark.parametrize("changed", ["assign_add", "scatter_add"])
def test_a_value_that_is_copied_to_be_changed_counts_once(changed):
    """In its first step a slice that shares the memory of its master is copied; from the second on it is changed where
    it lies: what the device holds of its own is the same."""
    size, peaks = 256 * 256 * 4, []
    with tf.Graph().as_default():
        with tf.device("/device:CPU:1"):
            master = tf.get_variable("master", [256, 256], use_resource=True)
            held = tf.get_variable("slice", [256, 256], use_resource=True)
            fill = held.assign(master.read_value())
            rows = tf.placeholder(tf.float32, [None, 256])
            step = (held.assign_add(rows) if changed == "assign_add" else
                    held.scatter_add(tf.IndexedSlices(rows, [0, 1])))
        with tf.Session(config=tf.ConfigProto(device_count={"CPU": 2})) as session:
            session.run(tf.global_variables_initializer())
            session.run(fill)
            for _ in range(2):
                metadata = tf.RunMetadata()
                session.run(step.op, {rows: np.ones((256 if changed == "assign_add" else 2, 256), np.float32)},
                            tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), metadata)
                allocated = sum(entry.alloc_bytes for device in metadata.step_stats.dev_stats
                                for node in device.node_stats for memory in node.memory
                                for entry in memory.allocation_records if entry.alloc_bytes >= size)
                peaks.append((allocated, peak_bytes_per_device(metadata, {"/device:CPU:1": size})["CPU:1"]))
    (copied, first), (in_place, second) = peaks
    assert copied >= size > in_place
    assert first == pytest.approx(second, rel=0.02)


def test_processes_are_told_apart():
    metadata = _metadata(_device("CPU:0", [(1, 100), (2, -100)]), _device("CPU:0", [(1, 10), (2, -10)]))
    for task, device in enumerate(metadata.step_stats.dev_stats):
        device.device = f"/job:worker/replica:0/task:{task}/device:CPU:0"
    assert peak_bytes_per_device(metadata, {"/job:worker/task:1/device:CPU:0": 5}) == {
        "task:0/CPU:0": 100, "task:1/CPU:0": 15}


def test_real_trace_of_a_step():
    """A chain of matrix products on a virtual device: at least the operands that live together, at most all."""
    with tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [256, 256])
        with tf.device("/device:CPU:1"):
            y = x
            for _ in range(6):
                y = tf.matmul(y, y)
            y = tf.reduce_sum(y)
        with tf.Session(config=tf.ConfigProto(device_count={"CPU": 2})) as session:
            metadata = tf.RunMetadata()
            session.run(y, {x: np.zeros((256, 256), np.float32)},
                        tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), metadata)
    size = 256 * 256 * 4
    assert 2 * size <= peak_bytes_per_device(metadata)["CPU:1"] <= 6 * size + 4096


def test_arms_that_share_a_gpu_have_to_fit_together():
    """Each by itself does: 4 of weights that stay, and 3 that one of them at a time needs."""
    arm = SimpleNamespace(memory={"weights": 3.0, "optimizer slots": 1.0, "activations": 3.0}, memory_bytes=7.0)
    plan = SimpleNamespace(devices=Devices("gpu", ("/device:GPU:0",), "a GPU"))
    arms = {"search": arm, "data_parallel": arm, "expert": arm}
    check_memory(plan, arms, list(arms), SimpleNamespace(name="local", memory_bytes=15.0))
    with pytest.raises(OutOfMemoryError, match=r"all arms together need .* per device.*fewer arms in --compare"):
        check_memory(plan, arms, list(arms), SimpleNamespace(name="local", memory_bytes=14.0))


def test_the_weights_of_a_pipeline_are_those_of_the_stage_with_most():
    """Which is not the one that holds most in all."""
    held = [{"weights": 1.0, "activations": 9.0}, {"weights": 8.0, "activations": 1.0}]
    stages = tuple(Stage(number, number + 1, number, 1, 1.0, 1.0, 0.0, 0.0, 1, memory)
                   for number, memory in enumerate(held))
    piped = Pipeline("net", "", 2, "gpu", 2, "1f1b", ("a", "b"), (), stages, 1.0, {})
    other = SimpleNamespace(memory={"weights": 3.0, "activations": 3.0}, memory_bytes=6.0)
    plan = SimpleNamespace(devices=Devices("gpu", ("/device:GPU:0", "/device:GPU:1"), "GPUs"))
    with pytest.raises(OutOfMemoryError, match="all arms together"):
        check_memory(plan, {"pipeline": piped, "search": other}, ["pipeline", "search"],
                     SimpleNamespace(name="local", memory_bytes=13.5))


def test_every_device_of_a_pipeline_holds_its_own_stage(monkeypatch):
    """On one host: 1 and 8 of weights, as much in masters, and 2 and 1 besides."""
    held = [{"weights": 1.0, "activations": 2.0}, {"weights": 8.0, "activations": 1.0}]
    stages = tuple(Stage(number, number + 1, number, 1, 1.0, 1.0, 0.0, 0.0, 1, memory)
                   for number, memory in enumerate(held))
    piped = Pipeline("net", "", 2, "local", 2, "1f1b", ("a", "b"), (), stages, 1.0, {})
    plan = SimpleNamespace(devices=Devices("cpu", ("/device:CPU:0", "/device:CPU:1"), "CPUs"))
    machine = SimpleNamespace(name="local", memory_bytes=100.0)
    monkeypatch.setattr("pase_mtf.launch.arms.memory.available_bytes", lambda: 21)
    check_memory(plan, {"pipeline": piped}, ["pipeline"], machine)
    monkeypatch.setattr("pase_mtf.launch.arms.memory.available_bytes", lambda: 20)
    with pytest.raises(OutOfMemoryError, match="all arms together"):
        check_memory(plan, {"pipeline": piped}, ["pipeline"], machine)


def test_masters_are_whole_however_the_weights_are_split(monkeypatch):
    """Two slices of 1 of weights that take 8, which are there once whole; and 1 besides on either device."""
    arm = SimpleNamespace(memory={"weights": 1.0, "activations": 1.0}, memory_bytes=2.0)
    plan = SimpleNamespace(devices=Devices("cpu", ("/device:CPU:0", "/device:CPU:1"), "CPUs"))
    machine = SimpleNamespace(name="local", memory_bytes=100.0)
    monkeypatch.setattr("pase_mtf.launch.arms.memory.available_bytes", lambda: 12)
    check_memory(plan, {"search": arm}, ["search"], machine, 8.0)
    monkeypatch.setattr("pase_mtf.launch.arms.memory.available_bytes", lambda: 11)
    with pytest.raises(OutOfMemoryError, match="all arms together"):
        check_memory(plan, {"search": arm}, ["search"], machine, 8.0)
