"""The value of --mesh: a number of devices, or a mesh shape such as rows:2;cols:4."""

from __future__ import annotations

import dataclasses
import math
import re

from pase_mtf.errors import UsageError

__all__ = ["MAX_DEVICES", "MeshFlag", "parse_mesh"]

# Far beyond one process's reach; it keeps a slip of the finger from building a graph for a million devices.
MAX_DEVICES = 1024

_REMEDY = "give a number of devices (--mesh=8) or a mesh shape (--mesh='rows:2;cols:4')"


@dataclasses.dataclass(frozen=True)
class MeshFlag:
    """What the user said about the mesh.

    Attributes:
      text: as it was written.
      axes: (axis name, size) where a mesh shape was given, else empty: the search is free to choose.
      devices: number of devices in all.
    """

    text: str
    axes: tuple[tuple[str, int], ...]
    devices: int

    @property
    def file_name(self) -> str:
        """The mesh as part of a file name: 8, or rows2-cols4."""
        return "-".join(f"{name}{size}" for name, size in self.axes) or str(self.devices)


def parse_mesh(text: str) -> MeshFlag:
    """Reads the value of --mesh.

    Raises:
      UsageError: it does not parse, has fewer than one device, or repeats an axis.
    """
    stripped = text.strip()
    if re.fullmatch(r"[+-]?\d+", stripped):
        axes: tuple[tuple[str, int], ...] = ()
        devices = int(stripped)
    else:
        axes = tuple(_axis(part, text) for part in re.split(r"[;,]", stripped))
        names = [name for name, _ in axes]
        if len(set(names)) != len(names):
            raise UsageError(f"--mesh={text}: an axis appears twice; give every axis its own name")
        devices = math.prod(size for _, size in axes)
    if devices < 1:
        raise UsageError(f"--mesh={text}: fewer than one device; {_REMEDY}")
    if devices > MAX_DEVICES:
        raise UsageError(f"--mesh={text}: {devices} devices, at most {MAX_DEVICES} can be driven; {_REMEDY}")
    return MeshFlag(text, axes, devices)


def _axis(part: str, text: str) -> tuple[str, int]:
    match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*:\s*(-?\d+)\s*", part)
    if not match:
        raise UsageError(f"--mesh={text}: {part!r} is not axis:size; {_REMEDY}")
    if int(match[2]) < 1:
        raise UsageError(f"--mesh={text}: axis {match[1]} has fewer than one device; {_REMEDY}")
    return match[1], int(match[2])
