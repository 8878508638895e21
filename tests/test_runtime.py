"""What this process runs on: control groups as the kernel shows them (fake files), devices by flag, sessions."""

import contextlib
import pathlib
import sys
import threading
import time
import types

import pytest

from pase_mtf import host, runtime
from pase_mtf.errors import UsageError
from pase_mtf.host import available_bytes, memory_bytes
from pase_mtf.runtime import (
    Devices,
    choose_devices,
    cores,
    describe_host,
    operation_threads,
    session_config,
    thread_seconds,
)


@pytest.fixture
def kernel(monkeypatch, tmp_path):
    """Writes files of /proc and /sys/fs/cgroup: a computer of 16 cores, until it is given others."""
    def write(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    for module, name, folder in ((host, "PROC", "proc"), (runtime, "PROC", "proc"), (host, "CONTROL_GROUPS", "cgroup")):
        monkeypatch.setattr(module, name, tmp_path / folder)
    monkeypatch.setattr(runtime.os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    write({"proc/cpuinfo": "processor : 0\nmodel name\t: Abacus 7\nprocessor : 1\nmodel name\t: Abacus 8\n",
           "proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n"})
    return write


@pytest.mark.parametrize(("files", "expected"), [
    ({}, 16.0),
    ({"cgroup/cpu.max": "max 100000\n"}, 16.0),
    ({"cgroup/cpu.max": "250000 100000\n"}, 2.5),
    ({"cgroup/cpu.max": "6400000 100000\n"}, 16.0),
    ({"cgroup/cpu.max": "nonsense"}, 16.0),
    # A group of systemd's within another one that is smaller.
    ({"proc/self/cgroup": "0::/jobs/this\n", "cgroup/jobs/this/cpu.max": "400000 100000",
      "cgroup/jobs/cpu.max": "300000 100000"}, 3.0),
    # Version 1, by the process's own group and, in a container, by the root.
    ({"proc/self/cgroup": "4:cpuacct,cpu:/jobs\n1:memory:/\n", "cgroup/cpu/jobs/cpu.cfs_quota_us": "200000\n",
      "cgroup/cpu/jobs/cpu.cfs_period_us": "100000\n"}, 2.0),
    ({"proc/self/cgroup": "4:cpu:/docker/f00\n", "cgroup/cpu/cpu.cfs_quota_us": "50000",
      "cgroup/cpu/cpu.cfs_period_us": "100000"}, 0.5),
    ({"cgroup/cpu/cpu.cfs_quota_us": "-1", "cgroup/cpu/cpu.cfs_period_us": "100000"}, 16.0),
])
def test_cores(kernel, files, expected):
    kernel(files)
    assert cores() == expected


@pytest.mark.parametrize(("lines", "expected"), [
    ("model name\t: Abacus 7\nflags\t\t: fpu avx avx2 fma avx512f avx512bw\n", "Abacus 7 with AVX-512"),
    ("model name\t: Abacus 7\nflags\t\t: fpu avx avx2 fma\n", "Abacus 7 with AVX2"),
    ("model name\t: Abacus 7\nflags\t\t: fpu sse4_2\n", "Abacus 7"),
    ("Features\t: fp asimd sve\nCPU part\t: 0xd40\n", "loom with SVE"),  # ARM's kernel tells no name
    ("processor\t: 0\n", "loom"),
])
def test_processors_of_one_name_are_told_apart_by_their_vectors(kernel, monkeypatch, lines, expected):
    monkeypatch.setattr(runtime.platform, "processor", lambda: "loom")
    kernel({"proc/cpuinfo": f"{lines}\n{lines}"})
    assert runtime.processor_name() == expected


@pytest.mark.parametrize(("flags", "told", "expected"), [
    ("avx avx2 fma", None, False), ("avx2 avx512f avx512_vnni", None, True), ("avx2 avx512f", None, False),
    ("avx2", "1", True), ("avx2 avx512_vnni", "0", False), ("avx2 avx512_vnni", "maybe", True)])
def test_whose_kernels_tensorflow_takes(kernel, monkeypatch, flags, told, expected):
    kernel({"proc/cpuinfo": f"model name\t: Abacus 7\nflags\t\t: {flags}\n"})
    monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS", raising=False)
    if told is not None:
        monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", told)
    assert runtime.uses_onednn() is expected
    assert runtime.unfolding_threads(16) == (0 if expected else 1)


def test_tensorflow_says_the_same_of_this_processor():
    from tensorflow.python.util import _pywrap_util_port
    assert runtime.uses_onednn() == _pywrap_util_port.IsMklEnabled()


def test_the_host_is_described_with_the_cores_of_its_quota(kernel):
    assert describe_host() == "Abacus 7 (16 cores)"
    kernel({"cgroup/cpu.max": "200000 100000"})
    assert describe_host() == "Abacus 7 (2 cores)"
    kernel({"cgroup/cpu.max": "100000 100000"})
    assert describe_host() == "Abacus 7 (1 core)"
    kernel({"cgroup/cpu.max": "150000 100000"})
    assert describe_host() == "Abacus 7 (1.5 cores)"


@pytest.mark.parametrize(("files", "expected"), [
    ({}, 8000 * 1024),
    ({"cgroup/memory.max": "max", "cgroup/memory.current": "1000"}, 8000 * 1024),
    ({"cgroup/memory.max": "5000", "cgroup/memory.current": "1000"}, 4000),
    ({"cgroup/memory.max": "5000", "cgroup/memory.current": "6000"}, 0),
    # Pages of files that were read are given up as soon as memory is wanted.
    ({"cgroup/memory.max": "5000", "cgroup/memory.current": "4900",
      "cgroup/memory.stat": "anon 900\nfile 4000\ninactive_file 3000\n"}, 3100),
    ({"proc/self/cgroup": "4:memory:/jobs", "cgroup/memory/jobs/memory.limit_in_bytes": "7000",
      "cgroup/memory/jobs/memory.usage_in_bytes": "6500",
      "cgroup/memory/jobs/memory.stat": "inactive_file 1\ntotal_inactive_file 6000\n"}, 6500),
    ({"proc/self/cgroup": "4:memory:/jobs", "cgroup/memory/jobs/memory.limit_in_bytes": "7000",
      "cgroup/memory/jobs/memory.usage_in_bytes": "500"}, 6500),
])
def test_available_bytes(kernel, files, expected):
    kernel(files)
    assert available_bytes() == expected


@pytest.mark.parametrize(("files", "expected"), [
    ({}, 9000 * 1024), ({"cgroup/memory.max": "max"}, 9000 * 1024), ({"cgroup/memory.max": "5000"}, 5000),
    ({"cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}, 9000 * 1024),
    ({"proc/self/cgroup": "4:memory:/jobs/this", "cgroup/memory/jobs/this/memory.limit_in_bytes": "7000",
      "cgroup/memory/jobs/memory.limit_in_bytes": "6000"}, 6000)])
def test_memory_is_that_of_the_control_groups_where_these_have_less(kernel, monkeypatch, files, expected):
    monkeypatch.setattr(host.os, "sysconf", {"SC_PAGE_SIZE": 1024, "SC_PHYS_PAGES": 9000}.__getitem__)
    kernel(files)
    assert memory_bytes() == expected


def test_nothing_is_known_of_the_memory(kernel, monkeypatch, tmp_path):
    monkeypatch.setattr(host, "PROC", tmp_path / "nowhere")
    assert available_bytes() is None


def test_this_computer():
    assert cores() > 0
    assert "core" in describe_host()
    found = available_bytes()
    assert found is None or 0 < found < 2**50


def test_threads_of_an_operation(monkeypatch):
    monkeypatch.setattr(runtime, "cores", lambda: 16.0)
    assert [operation_threads(devices) for devices in (1, 4, 8, 64)] == [16, 4, 2, 1]


def test_sessions(monkeypatch):
    monkeypatch.setattr(runtime, "cores", lambda: 16.0)
    config = session_config(Devices.first(4, "cpu"))
    assert (config.device_count["CPU"], config.intra_op_parallelism_threads) == (4, 4)
    assert config.graph_options.rewrite_options.disable_meta_optimizer
    # Named devices: as many as there are numbers up to the last.
    config = session_config(Devices("cpu", ("/device:CPU:5", "/device:CPU:1"), "here"))
    assert (config.device_count["CPU"], config.intra_op_parallelism_threads) == (6, 8)
    config = session_config(Devices.first(2, "gpu"))
    assert (config.device_count["CPU"], config.intra_op_parallelism_threads) == (1, 0)
    assert config.gpu_options.allow_growth


def test_devices_of_several_processes(monkeypatch):
    monkeypatch.setattr(runtime, "cores", lambda: 16.0)
    devices = Devices.over_tasks(4, "cpu", ("a:1", "b:1"), "here")
    assert devices.names == tuple(f"/job:worker/replica:0/task:{task}/device:CPU:{number}"
                                  for task in range(2) for number in range(2))
    assert (devices.target, devices.client, devices.on_one_host) == ("grpc://a:1", "/job:worker/replica:0/task:0", 2)
    assert str(devices) == "4 virtual CPU devices in 2 processes on 2 hosts (a, b), the first on here"
    config = session_config(devices)
    assert (config.device_count["CPU"], config.intra_op_parallelism_threads) == (2, 8)
    assert config.isolate_session_state
    assert not config.device_filters
    # Where every process has a graph of its own, it runs it at its own server.
    second = Devices.over_tasks(4, "cpu", ("a:1", "b:1"), rank=1)
    assert second.names == devices.names
    assert (second.target, second.client) == ("grpc://b:1", "/job:worker/replica:0/task:1")
    config = session_config(second)
    assert config.device_filters == ["/job:worker/replica:0/task:1"]
    assert config.experimental.collective_group_leader == "/job:worker/replica:0/task:0"
    # Of one computer they share the cores.
    devices = Devices.over_tasks(4, "cpu", ("a:1", "a:2"), "here")
    assert (devices.on_one_host, session_config(devices).intra_op_parallelism_threads) == (4, 4)
    assert str(devices) == "4 virtual CPU devices in 2 processes on here"
    alone = Devices.first(4, "cpu")
    assert (alone.target, alone.client, alone.on_one_host) == ("", "", 4)
    assert not session_config(alone).isolate_session_state
    with pytest.raises(UsageError, match="3 devices do not split over 2 processes; take 4 devices"):
        Devices.over_tasks(3, "cpu", ("a:1", "b:1"))


@pytest.fixture
def gpus(monkeypatch):
    def present(*names):
        monkeypatch.setattr(runtime, "gpu_names", lambda: list(names))
    return present


def test_auto_takes_gpus_where_there_are_enough(gpus):
    gpus("A100", "A100")
    assert choose_devices("auto", 2).names == ("/device:GPU:0", "/device:GPU:1")
    assert choose_devices("auto", 2).models == "A100"
    assert choose_devices("auto", 4).names == tuple(f"/device:CPU:{number}" for number in range(4))
    assert choose_devices("cpu", 2).kind == "cpu"


@pytest.mark.parametrize(("present", "count", "says"), [
    ((), 8, r"--mesh=8: more GPUs than there are \(0\); use --devices=cpu"),
    (("A100",), 8, r"--mesh=8: more GPUs than there are \(1\); use --mesh=1 or less"),
])
def test_more_gpus_than_there_are(gpus, present, count, says):
    gpus(*present)
    with pytest.raises(UsageError, match=says):
        choose_devices("gpu", count)


def test_a_list(gpus):
    gpus("A100")
    assert choose_devices("/device:CPU:3,/device:CPU:1", 2).names == ("/device:CPU:3", "/device:CPU:1")
    assert choose_devices("/device:GPU:0", 1).kind == "gpu"
    assert choose_devices("cpu:1,/job:localhost/replica:0/task:0/device:CPU:0", 2).names == (
        "/device:CPU:1", "/device:CPU:0")


@pytest.mark.parametrize(("flag", "count", "says"), [
    ("/device:CPU:0", 2, "names 1 devices, --mesh wants 2"),
    ("/device:CPU:0,/device:CPU:0", 2, "named twice"),
    ("/device:CPU:0,CPU:0", 2, "named twice"),
    ("/device:CPU:0,/job:localhost/replica:0/task:0/device:cpu:0", 2, "named twice"),
    ("/job:nowhere/xdevice:CPU:0", 1, "no device name"),
    ("/device:TPU:0", 1, "no device name"),
    ("/device:CPU:x", 1, "no device name"),
    ("/device:GPU:7", 1, "more GPUs than there are"),
    ("/device:CPU:0,/device:GPU:0", 2, "mixed"),
    ("gpus", 2, "did you mean 'gpu'"),
    ("CPU:0,CPU:1024", 2, "at most 1024 devices can be driven; number CPU:1024 below that"),
    ("CPU:0,CPU:999999999", 2, "number CPU:999999999 below that"),
])
def test_refuses(gpus, flag, count, says):
    gpus("A100")
    with pytest.raises(UsageError, match=says):
        choose_devices(flag, count)


@pytest.mark.parametrize(("there", "expected"), [
    ("/dev/nvidia[0-9]*", ["A100"]), ("/dev/kfd", ["A100"]), ("/dev/dxg", ["A100"]), ("/dev/null", [])])
def test_tensorflow_is_asked_where_the_system_has_a_gpu(monkeypatch, there, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = "pase_mtf.compat.tf.config.experimental"
    monkeypatch.setattr(f"{config}.list_physical_devices", lambda kind: [kind])
    monkeypatch.setattr(f"{config}.get_device_details", lambda gpu: {"device_name": "A100"})
    monkeypatch.setattr(runtime.glob, "glob", lambda pattern: [pattern] * (pattern == there))
    assert runtime.gpu_names() == expected


def test_the_smallest_gpu_of_a_run_says_what_one_may_hold(monkeypatch):
    listed = [types.SimpleNamespace(device_type=kind, memory_limit_bytes=nbytes) for kind, nbytes in (
        ("CPU", 256), ("GPU", 24_000), ("GPU", 16_000), ("GPU", 8_000))]
    session = types.SimpleNamespace(list_devices=lambda: listed)
    monkeypatch.setattr("pase_mtf.compat.tf.Session", lambda target, config: contextlib.nullcontext(session))
    assert runtime.gpu_bytes(Devices("gpu", ("/device:GPU:0", "/device:GPU:1"), "two GPUs")) == 16_000
    assert runtime.gpu_bytes(Devices("gpu", ("/device:GPU:0", "/device:GPU:2"), "two GPUs")) == 8_000


@pytest.mark.skipif(not pathlib.Path("/proc/self/task").is_dir(), reason="threads are counted where Linux shows them")
def test_each_session_has_the_threads_that_it_asks_for(monkeypatch):
    """The first session of a process must not decide for all: calibration and training would run on other threads."""
    from pase_mtf.compat import tf
    monkeypatch.setattr(runtime, "cores", lambda: 12.0)

    def threads():
        return len(list(pathlib.Path("/proc/self/task").iterdir()))

    with tf.Graph().as_default():
        constant = tf.constant(1.0)
        with tf.Session(config=tf.ConfigProto(intra_op_parallelism_threads=1)) as session:
            session.run(constant)
            before = threads()
            with tf.Session(config=session_config(Devices.first(4, "cpu"))) as other:
                other.run(constant)
                assert threads() >= before + 4  # a pool for every device


@pytest.mark.skipif(sys.platform != "linux", reason="the clocks of threads are Linux's")
def test_what_threads_compute_is_known_at_once():
    """Also of one that has not slept since: the clock of the process has that at the system's next tick."""
    computed, enough = threading.Event(), threading.Event()

    def compute():
        while time.thread_time() < 0.03:
            pass
        computed.set()
        while not enough.is_set():
            pass

    before = thread_seconds()
    assert before[threading.get_native_id()] == pytest.approx(time.thread_time(), abs=1e-2)
    thread = threading.Thread(target=compute)
    thread.start()
    assert computed.wait(60)
    found = thread_seconds()[thread.native_id]
    enough.set()
    thread.join()
    assert found >= 0.03


def test_where_threads_have_no_clocks_the_process_has_one(kernel):
    assert thread_seconds() == {0: pytest.approx(time.process_time(), abs=1.0)}


def test_of_several_processes_only_the_gpus_of_the_run_count(monkeypatch):
    """Each sees all GPUs of its host."""
    listed = [types.SimpleNamespace(name=f"/job:worker/replica:0/task:{task}/device:GPU:{number}", device_type="GPU",
                                    memory_limit_bytes=nbytes)
              for task, number, nbytes in ((0, 0, 80_000), (0, 1, 16_000), (1, 0, 24_000), (1, 1, 8_000))]
    session = types.SimpleNamespace(list_devices=lambda: listed)
    monkeypatch.setattr("pase_mtf.compat.tf.Session", lambda target, config: contextlib.nullcontext(session))
    assert runtime.gpu_bytes(Devices.over_tasks(2, "gpu", ("a:1", "b:1"))) == 24_000


def test_only_the_gpus_of_a_run_are_said(gpus):
    gpus("T4", "A100", "H100")
    assert choose_devices("gpu", 1).models == "T4"
    assert choose_devices("auto", 2).models == "A100, T4"
    assert choose_devices("/device:GPU:2,/device:GPU:1", 2).models == "A100, H100"
