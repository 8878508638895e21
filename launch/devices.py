"""Which TensorFlow devices a run uses."""

from __future__ import annotations

import dataclasses
import glob
import os
import platform

from pase_mtf.errors import UsageError, nearest

__all__ = ["Devices", "available_bytes", "choose_devices", "describe_host"]


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of a run.

    Attributes:
      kind: "cpu" (virtual devices that share the host's cores) or "gpu".
      names: TensorFlow's names, as in "/device:CPU:3".
      models: what they are, for people.
    """

    kind: str
    names: tuple[str, ...]
    models: str

    @property
    def count(self) -> int:
        """p."""
        return len(self.names)

    def __str__(self) -> str:
        what = f"{self.count} virtual CPU device{'s' * (self.count > 1)}" if self.kind == "cpu" else f"{self.count} GPU"
        return f"{what} on {self.models}"


def choose_devices(flag: str, count: int) -> Devices:
    """Reads the value of --devices. TensorFlow is loaded only where there is a GPU to ask about.

    Args:
      flag: "auto", "cpu", "gpu", or device names separated by commas.
      count: how many devices --mesh asks for.

    Raises:
      UsageError: no such device, more than there are, or as many names as --mesh does not want.
    """
    if "/" in flag or ":" in flag:
        return _explicit(flag, count)
    if flag not in ("auto", "cpu", "gpu"):
        raise UsageError(f"--devices={flag}: unknown; {nearest(flag, ('auto', 'cpu', 'gpu'))}, or a list such as "
                         "/device:CPU:0,/device:CPU:1")
    gpus = [] if flag == "cpu" else _gpus()
    if flag == "gpu" and len(gpus) < count:
        raise UsageError(f"--devices=gpu --mesh={count}: more GPUs than there are ({len(gpus)}); "
                         f"use --mesh={len(gpus)} or less, or --devices=cpu" if gpus else
                         f"--devices=gpu --mesh={count}: more GPUs than there are (0); use --devices=cpu")
    if gpus and len(gpus) >= count:
        return Devices("gpu", tuple(f"/device:GPU:{number}" for number in range(count)), ", ".join(sorted(set(gpus))))
    return Devices("cpu", tuple(f"/device:CPU:{number}" for number in range(count)), describe_host())


def _explicit(flag: str, count: int) -> Devices:
    names = [name.strip() for name in flag.split(",") if name.strip()]
    if len(set(names)) != len(names):
        raise UsageError(f"--devices={flag}: a device is named twice; name {count} different ones")
    if len(names) != count:
        raise UsageError(f"--devices={flag}: names {len(names)} devices, --mesh wants {count}; make them agree")
    kinds = set()
    for name in names:
        kind, _, number = name.upper().rpartition("DEVICE:")[2].partition(":")
        if kind not in ("CPU", "GPU") or not number.isdigit():
            raise UsageError(f"--devices={flag}: {name!r} is no device name; write /device:CPU:0 or /device:GPU:0")
        if kind == "GPU" and int(number) >= len(_gpus()):
            raise UsageError(f"--devices={flag}: more GPUs than there are ({len(_gpus())}); leave {name} out")
        kinds.add(kind.lower())
    if len(kinds) > 1:
        raise UsageError(f"--devices={flag}: CPUs and GPUs mixed; a strategy is priced for devices of one kind")
    kind = kinds.pop()
    return Devices(kind, tuple(names), describe_host() if kind == "cpu" else ", ".join(sorted(set(_gpus()))))


def _gpus() -> list[str]:
    """The GPUs TensorFlow can use; answered without loading it where the system has none."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "any") in ("", "-1"):
        return []
    if not glob.glob("/dev/nvidia[0-9]*") and not glob.glob("/dev/kfd"):
        return []
    from pase_mtf.compat import tf
    found = tf.config.experimental.list_physical_devices("GPU")
    return [tf.config.experimental.get_device_details(gpu).get("device_name", "GPU") for gpu in found]


def describe_host() -> str:
    """The processor and how many cores this process may use, as in "Xeon Gold 6130 (2 cores)"."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
        name = names[0] if names else name
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name} ({cores} core{'s' * (cores != 1)})"


def available_bytes() -> int | None:
    """Memory this process can still get, in bytes, by the kernel and by the control group; None if unknown."""
    found = []
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            found += [int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable")]
    except OSError:
        pass
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as limit, \
                open("/sys/fs/cgroup/memory.current", encoding="ascii") as current:
            text = limit.read().strip()
            if text != "max":
                found.append(int(text) - int(current.read()))
    except (OSError, ValueError):
        pass
    return max(0, min(found)) if found else None
