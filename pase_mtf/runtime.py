"""What this process runs on: its cores and memory, the TensorFlow devices of a run, and how their sessions are set up.

TensorFlow is imported within functions only: cores and devices are asked about where a light start matters.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import itertools
import os
import platform
import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pase_mtf.errors import UsageError, nearest
from pase_mtf.host import PROC, control_groups, read

if TYPE_CHECKING:
    from pase_mtf.compat import tf

__all__ = ["JOB", "MAX_DEVICES", "Devices", "choose_devices", "cores", "describe_host", "gpu_bytes", "gpu_names",
           "operation_threads", "processor_name", "runnable_cores", "session_config", "thread_seconds",
           "unfolding_threads", "uses_onednn"]

JOB = "worker"
"""What TensorFlow calls the processes of a run over several of them; each is a task of this job."""

# Far beyond what one process can drive; it keeps a slip of the finger from building a graph for a million devices.
MAX_DEVICES = 1024


def runnable_cores() -> int:
    """Cores that the threads of this process may run on at one moment, whatever their control groups' quota is."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores() -> float:
    """Cores this process may keep busy: those of the machine, or fewer by its affinity or its control groups' quota."""
    number = float(runnable_cores())
    for folder in control_groups("cpu"):
        quota, _, period = (read(folder / "cpu.max")
                            or f"{read(folder / 'cpu.cfs_quota_us')} {read(folder / 'cpu.cfs_period_us')}"
                            ).partition(" ")
        if quota.isdigit() and period.isdigit() and int(period):  # else "max" or -1: no quota
            number = min(number, int(quota) / int(period))
    return number


_CLOCK_OF_THREAD = 0b110
"""The clock of a thread in Linux: all bits of its number turned over, then these, for what it computed so far."""


def thread_seconds() -> dict[int, float]:
    """Thread of this process -> seconds that it has computed, up to now.

    `time.process_time` knows of the other threads what they had computed when the system last looked, at a tick: some
    milliseconds ago, where they never sleep. Only where there is no /proc is that told, as of one thread.
    """
    found = dict[int, float]()
    try:
        for entry in os.listdir(PROC / "self" / "task"):
            thread = int(entry)
            with contextlib.suppress(OSError):  # it has ended
                found[thread] = time.clock_gettime((~thread << 3) | _CLOCK_OF_THREAD)
    except OSError:
        found = {0: time.process_time()}
    return found


def operation_threads(devices: int) -> int:
    """Threads within one operation on virtual devices: what the cores leave for each device when all are busy.

    More make a training step slower (on 2 cores and 8 devices by a third): the operations of the devices keep all cores
    busy, and those that are spread over several threads wait for them. Each device of a session has a pool of so many
    (`compat` asks TensorFlow for that).
    """
    return max(1, int(cores() // devices))


_ONEDNN = frozenset({"avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16"})
"""What a processor has for which TensorFlow takes oneDNN's kernels by itself (IsMklEnabled of its util/port.cc)."""
_VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2", "avx": "AVX", "sve": "SVE"}
"""Instructions for vectors by the kernel's word for them, the widest of a processor first."""


def processor_name() -> str:
    """What the system calls its processor, and its widest vectors, as in "Xeon Gold 6130 with AVX-512".

    The name alone may not tell processors apart: on a virtual machine it can be that of a whole family, "AMD EPYC",
    and TensorFlow chooses its kernels by the vectors.
    """
    name, features = _processor()
    name = name or platform.processor() or platform.machine()
    return next((f"{name} with {vectors}" for flag, vectors in _VECTORS.items() if flag in features), name)


def _processor() -> tuple[str, frozenset[str]]:
    """The name of the first processor, empty where there is none, and the kernel's words for what it can."""
    said: dict[str, str] = {}
    for line in read(PROC / "cpuinfo").splitlines():
        field, _, value = line.partition(":")
        said.setdefault(field.strip().lower(), value.strip())
    return said.get("model name", ""), frozenset(f"{said.get('flags', '')} {said.get('features', '')}".split())


def uses_onednn() -> bool:
    """Whether TensorFlow takes oneDNN's kernels on this processor, as told by TF_ENABLE_ONEDNN_OPTS or by itself."""
    told = os.environ.get("TF_ENABLE_ONEDNN_OPTS", "").strip().lower()
    if told in ("0", "false", "1", "true"):
        return told in ("1", "true")
    return not _ONEDNN.isdisjoint(_processor()[1])


def unfolding_threads(devices: int) -> int:
    """`Machine.unfolding_threads` of virtual devices of this processor."""
    return 0 if uses_onednn() else operation_threads(devices)


def describe_host() -> str:
    """The processor and how many cores this process may use, as in "Xeon Gold 6130 (2 cores)"."""
    number = cores()
    return f"{processor_name()} ({number:.3g} core{'s' * (number != 1)})"


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of a run.

    Attributes:
      kind: "cpu" (virtual devices that share the host's cores) or "gpu".
      names: TensorFlow's names, as in "/device:CPU:3", or "/job:worker/replica:0/task:1/device:CPU:3" of a device of
        one of several processes.
      models: what they are, for people.
      tasks: the address ("host:port") of every process that the devices belong to, by its rank; empty: this one alone.
      rank: of this process, where every process has a graph of its own; None: that of rank 0 has the graph of all.
    """

    kind: str
    names: tuple[str, ...]
    models: str = ""
    tasks: tuple[str, ...] = ()
    rank: int | None = None

    @classmethod
    def first(cls, count: int, kind: str, models: str = "") -> Devices:
        """The first devices of a kind."""
        return cls(kind, tuple(f"/device:{kind.upper()}:{number}" for number in range(count)), models)

    @classmethod
    def over_tasks(cls, count: int, kind: str, tasks: Sequence[str], models: str = "",
                   rank: int | None = None) -> Devices:
        """As many devices of every process, those of one after those of the other.

        Raises:
          UsageError: they do not split evenly.
        """
        if count % len(tasks):
            raise UsageError(f"{count} devices do not split over {len(tasks)} processes; take "
                             f"{len(tasks) * max(1, round(count / len(tasks)))} devices")
        names = (f"{_job(rank)}/device:{kind.upper()}:{number}"
                 for rank in range(len(tasks)) for number in range(count // len(tasks)))
        return cls(kind, tuple(names), models, tuple(tasks), rank)

    @property
    def count(self) -> int:
        """p."""
        return len(self.names)

    @property
    def target(self) -> str:
        """Where sessions of this process run their graphs: at its own server; empty: in the session itself."""
        return f"grpc://{self.tasks[self.rank or 0]}" if self.tasks else ""

    @property
    def client(self) -> str:
        """The device that nodes without a device of their own belong to: of the process that feeds and fetches."""
        return _job(self.rank or 0) if self.tasks else ""

    @property
    def on_one_host(self) -> int:
        """How many of the devices there are, at most, on one computer."""
        return self.count * self.processes_on_one_host // max(1, len(self.tasks))

    @property
    def processes_on_one_host(self) -> int:
        """How many of the processes there are, at most, on one computer: their addresses name one host."""
        return max(map(self.hosts.count, self.hosts), default=1)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The computer of every process, by rank: its address without the port."""
        return tuple(task.rpartition(":")[0] for task in self.tasks)

    @property
    def link_groups(self) -> tuple[int, ...]:
        """How many consecutive devices one process has, one computer, and all together: the levels of links between
        devices, innermost first, each a multiple of the one before. Those of computers only where all have as many."""
        each = self.count // max(1, len(self.tasks))
        runs = [len(list(run)) for _, run in itertools.groupby(self.hosts)]
        even = len(set(runs)) == 1 and len(runs) == len(set(self.hosts))
        sizes = {each, each * runs[0] if even else each, self.count}
        return tuple(sorted(size for size in sizes if size > 1)) or (1,)

    def __str__(self) -> str:
        what = f"{self.count} virtual CPU device{'s' * (self.count > 1)}" if self.kind == "cpu" else f"{self.count} GPU"
        hosts = dict.fromkeys(self.hosts)
        if self.tasks:
            what += f" in {len(self.tasks)} process{'es' * (len(self.tasks) > 1)}"
        if len(hosts) > 1:
            what += f" on {len(hosts)} hosts ({', '.join(hosts)}), the first"
        return f"{what} on {self.models}"


def _job(rank: int) -> str:
    return f"/job:{JOB}/replica:0/task:{rank}"


def choose_devices(flag: str, count: int, sharing: int = 1, processes: int = 1) -> Devices:
    """Reads the value of --devices. TensorFlow is loaded only where there is a GPU to ask about.

    Args:
      flag: "auto", "cpu", "gpu", or device names separated by commas.
      count: how many devices --mesh asks for, on this host.
      sharing: among how many processes these are shared out.
      processes: of the run, on all hosts.

    Raises:
      UsageError: no such device, more than there are, or as many names as --mesh does not want.
    """
    if "/" in flag or ":" in flag:
        return _explicit(flag, count)
    if flag not in ("auto", "cpu", "gpu"):
        raise UsageError(f"--devices={flag}: unknown; {nearest(flag, ('auto', 'cpu', 'gpu'))}, or a list such as "
                         "/device:CPU:0,/device:CPU:1")
    gpus = [] if flag == "cpu" else gpu_names()
    if flag == "gpu" and len(gpus) < count:
        mesh, most = (number // sharing * processes for number in (count, len(gpus)))
        raise UsageError(f"--devices=gpu --mesh={mesh}: more GPUs than there are ({len(gpus)}); use "
                         + (f"--mesh={most} or less, or " if most else "") + "--devices=cpu")
    if gpus and len(gpus) >= count:
        return Devices.first(count, "gpu", ", ".join(sorted(set(gpus[:count]))))
    return Devices.first(count, "cpu", describe_host())


# As TensorFlow writes a device of this process.
_DEVICE_NAME = re.compile(
    r"(/job:localhost)?(/replica:0)?(/task:0)?/?(device:)?(?P<kind>CPU|GPU):(?P<number>[0-9]{1,9})", re.IGNORECASE)


def _explicit(flag: str, count: int) -> Devices:
    names = [name.strip() for name in flag.split(",") if name.strip()]
    if len(names) != count:
        raise UsageError(f"--devices={flag}: names {len(names)} devices, --mesh wants {count}; make them agree")
    devices = []
    for name in names:
        written = re.fullmatch(_DEVICE_NAME, name)
        if written is None:
            raise UsageError(f"--devices={flag}: {name!r} is no device name; write /device:CPU:0 or /device:GPU:0")
        kind, number = written["kind"].lower(), int(written["number"])
        if number >= MAX_DEVICES:  # TensorFlow makes all CPU devices up to that number
            raise UsageError(f"--devices={flag}: at most {MAX_DEVICES} devices can be driven; number {name} below that")
        if kind == "gpu" and number >= len(gpu_names()):
            raise UsageError(f"--devices={flag}: more GPUs than there are ({len(gpu_names())}); leave {name} out")
        devices.append((kind, number))
    if len(set(devices)) != len(devices):
        raise UsageError(f"--devices={flag}: a device is named twice; name {count} different ones")
    if len({kind for kind, _ in devices}) > 1:
        raise UsageError(f"--devices={flag}: CPUs and GPUs mixed; a strategy is priced for devices of one kind")
    kind, names = devices[0][0], [f"/device:{kind.upper()}:{number}" for kind, number in devices]
    if kind == "cpu":
        return Devices(kind, tuple(names), describe_host())
    known = gpu_names()
    return Devices(kind, tuple(names), ", ".join(sorted({known[number] for _, number in devices})))


_GPU_FILES = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg")
"""What GPUs are to the system: NVIDIA's, AMD's, and any of the Windows around a Linux (WSL 2)."""


def gpu_names() -> list[str]:
    """The GPUs TensorFlow can use; answered without loading it where the system has none."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "any") in ("", "-1"):
        return []
    if not any(map(glob.glob, _GPU_FILES)):
        return []
    from pase_mtf.compat import tf  # TensorFlow takes seconds to import
    found = tf.config.experimental.list_physical_devices("GPU")
    return [tf.config.experimental.get_device_details(gpu).get("device_name", "GPU") for gpu in found]


def gpu_bytes(devices: Devices) -> int:
    """What TensorFlow may hold on the GPU of a run that has least memory, in bytes.

    Args:
      devices: GPUs.
    """
    from pase_mtf.compat import tf  # TensorFlow takes seconds to import
    with tf.Session(devices.target, config=session_config(devices)) as session:
        listed = [device for device in session.list_devices() if device.device_type == "GPU"]
    if devices.tasks:  # a process may see more GPUs than are its part
        return min(int(device.memory_limit_bytes) for device in listed if device.name in devices.names)
    return min(int(listed[int(name.rpartition(":")[2])].memory_limit_bytes) for name in devices.names)


def session_config(devices: Devices) -> tf.ConfigProto:
    """How the sessions of training and of calibration are set up.

    Grappler's passes stay off: on a graph that names the device of every node they find next to nothing, and cost
    minutes before the first step (docs/launcher.md). Operations of virtual devices run on as many threads as the cores
    leave for each device. Over several processes this configures the server of each, and a session keeps its variables
    to itself: else the sessions of a server share those of one name. Where every process has a graph of its own, a
    session knows no devices but its own, and rank 0 tells who takes part in a collective.
    """
    from pase_mtf.compat import tf  # TensorFlow takes seconds to import
    config = tf.ConfigProto(allow_soft_placement=True)
    config.device_count["CPU"] = 1 + max(
        [int(name.rpartition(":")[2]) for name in devices.names if "CPU" in name.upper()], default=0)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    config.gpu_options.allow_growth = True
    config.isolate_session_state = bool(devices.tasks)
    if devices.rank is not None:
        config.experimental.collective_group_leader = _job(0)
        config.device_filters.append(_job(devices.rank))
    if devices.kind == "cpu":
        config.intra_op_parallelism_threads = operation_threads(devices.on_one_host)
    return config
