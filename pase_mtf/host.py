"""What Linux says of this process in its files: the control groups it is in, and how much memory it can have."""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Iterator

__all__ = ["CONTROL_GROUPS", "PROC", "available_bytes", "control_groups", "memory_bytes", "read"]

PROC = pathlib.Path("/proc")
CONTROL_GROUPS = pathlib.Path("/sys/fs/cgroup")


def read(path: pathlib.Path) -> str:
    """The text of a file of the kernel; empty where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def control_groups(controller: str) -> Iterator[pathlib.Path]:
    """Folders of the control groups that this process is in, of version 2 and of a controller of version 1.

    Each group's limit holds for all groups within it, so the folders go from the process's own group up to the root. In
    a container the kernel may tell a path of the host, which is not there; the container's group is the root.
    """
    paths = {"": "", controller: ""}
    for line in read(PROC / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for name in controllers.split(","):  # none: version 2
            if name in paths:
                paths[name] = path.strip("/")
    for name, path in paths.items():
        inner = pathlib.PurePosixPath(path)
        for folder in (inner, *inner.parents):
            yield CONTROL_GROUPS / name / folder


def memory_bytes() -> int:
    """Memory this process can have at most, in bytes: that of the computer, or less by its control groups."""
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for folder in control_groups("memory"):
        limits = (read(folder / "memory.max"), read(folder / "memory.limit_in_bytes"))
        most = min([most, *map(int, filter(str.isdigit, limits))])  # else "max" or -1: no limit
    return most


def available_bytes() -> int | None:
    """Memory this process can still get, in bytes, by the kernel and by its control groups; None if unknown."""
    found = [int(line.split()[1]) * 1024
             for line in read(PROC / "meminfo").splitlines() if line.startswith("MemAvailable")]
    for folder in control_groups("memory"):
        for limit, used, cached in (("memory.max", "memory.current", "inactive_file"),
                                    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")):
            most, now = read(folder / limit), read(folder / used)
            if most.isdigit() and now.isdigit():  # else "max" or -1: no limit
                # Pages of files that were read count as used, and go as soon as memory is wanted.
                stat = re.search(rf"^{cached} (\d+)$", read(folder / "memory.stat"), re.MULTILINE)
                found.append(int(most) - max(0, int(now) - (int(stat[1]) if stat else 0)))
    return max(0, min(found)) if found else None
