"""Flags whose values have a syntax of their own: --mesh (devices or a mesh shape), --strategy and --compare (arms)."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import sys

from pase_mtf.errors import FormatError, UsageError, nearest, shortened
from pase_mtf.files import read_json
from pase_mtf.models.checks import divisors
from pase_mtf.runtime import MAX_DEVICES

__all__ = ["ARM_NAMES", "BY_BATCH", "PIPELINE", "STOCK", "ArmName", "MeshFlag", "fitting_arms", "is_called",
           "largest_divisor", "parse_arms", "parse_mesh", "trained_name"]

STOCK = "stock_data_parallel"
PIPELINE = "pipeline"
_TRAINED = ("data_parallel", "zero", "expert", "search", PIPELINE)
ARM_NAMES = (*_TRAINED, STOCK, "mcmc", "mcmc_expert", "auto_mtf", "random:N", "changed:N", "within:N")

BY_BATCH = ("stock", "data_parallel", "zero")
"""Methods that give every device as many examples of a (micro)batch: data parallelism, whoever lowers or updates it."""

_COUNTED = ("random", "changed", "within")
_MAX_COUNTED = 64
_COMPARED = ("mcmc", "mcmc_expert", "auto_mtf")
"""Compared with, never trained on their own: other people's searches."""
_BY_NAME = (*_TRAINED, *_COMPARED)
_ORDER = ("stock", *_BY_NAME, "file", *_COUNTED)

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
    if re.search(r"\d{10}", stripped):  # Python does not even write down what thousands of digits multiply to
        raise UsageError(f"--mesh={shortened(text, quoted=False)}: at most {MAX_DEVICES} devices can be driven; "
                         f"{_REMEDY}")
    if re.fullmatch(r"[+-]?\d+", stripped):
        axes: tuple[tuple[str, int], ...] = ()
        devices = int(stripped)
    else:
        axes = tuple(_parse_axis(part, text) for part in re.split(r"[;,]", stripped))
        names = [name for name, _ in axes]
        if len(set(names)) != len(names):
            raise UsageError(f"--mesh={text}: an axis appears twice; give every axis its own name")
        devices = math.prod(size for _, size in axes)
    if devices < 1:
        raise UsageError(f"--mesh={text}: fewer than one device; {_REMEDY}")
    if devices > MAX_DEVICES:
        count = devices if devices < 10 ** 18 else "far too many"
        raise UsageError(f"--mesh={text}: {count} devices, at most {MAX_DEVICES} can be driven; {_REMEDY}")
    return MeshFlag(text, axes, devices)


def _parse_axis(part: str, text: str) -> tuple[str, int]:
    match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*:\s*(-?\d+)\s*", part)
    if not match:
        raise UsageError(f"--mesh={text}: {part!r} is not axis:size; {_REMEDY}")
    if int(match[2]) < 1:
        raise UsageError(f"--mesh={text}: axis {match[1]} has fewer than one device; {_REMEDY}")
    return match[1], int(match[2])


@dataclasses.dataclass(frozen=True)
class ArmName:
    """One arm.

    Attributes:
      name: in tables and files.
      method: "stock", "data_parallel", "zero", "expert", "search", "pipeline", "mcmc", "mcmc_expert", "auto_mtf",
        "random", "changed" (the best strategy with some layers changed at random), "within" (the fastest within a
        limit on memory) or "file".
      argument: number of the random strategy, number of the limit and of how many ("0/4"), path of the file of a
        strategy or pipeline, or the devices of data parallelism (with sharded updates or without) or of an expert that
        leaves others idle.
    """

    name: str
    method: str
    argument: str = ""


def parse_arms(strategy: str, compare: str) -> tuple[ArmName, ...]:
    """The arms to measure, the one of --strategy first, stock data parallelism and our own before the others.

    Args:
      strategy: value of --strategy: the arm that is trained, kept and resumed.
      compare: value of --compare: arms separated by commas. `data_parallel` stands for data parallelism through stock
        mtf.Lowering and through ours, so that a speedup is never just our lowering; "none" for nothing.

    Raises:
      UsageError: a name that is no arm.
    """
    main = _parse_arm(strategy, "--strategy")
    if len(main) != 1 or main[0].method in ("stock", *_COUNTED, *_COMPARED):
        raise UsageError(f"--strategy={strategy}: choose one of {', '.join(reversed(_TRAINED))}, or a "
                         "strategy file")
    arms = {arm.name: arm for arm in main}
    for item in filter(None, (part.strip() for part in compare.split(","))):
        if item == "none":
            continue
        found = _parse_arm(item, "--compare")
        if item == "data_parallel":
            found = [ArmName(STOCK, "stock"), *found]
        for arm in found:
            if arm.method in ("file", PIPELINE) and arm.argument and arms.get(arm.name, arm) != arm:
                arm = dataclasses.replace(arm, name=_as_text(arm.argument))
            if arms.setdefault(arm.name, arm) != arm and arm.method == "within":
                given = arms[arm.name].argument.partition("/")[2]
                raise UsageError(f"--compare={shortened(compare, quoted=False)}: limits of within:{given} and of "
                                 f"{item} have the same names; give one of them")
    return (arms.pop(main[0].name), *sorted(arms.values(), key=lambda arm: _ORDER.index(arm.method)))


def largest_divisor(batch: int, devices: int) -> int:
    """Over how many of the devices a batch splits evenly, at most."""
    return divisors(batch, devices)[-1]


def fitting_arms(arms: tuple[ArmName, ...], batch: int, devices: int) -> tuple[ArmName, ...]:
    """The arms that there are for a batch: where it does not split over all devices, data parallelism is an arm of its
    own name over as many as divide it, while the others idle; over one device it is none.

    Args:
      arms: of `parse_arms`.
      batch: examples per step.
      devices: p.
    """
    if batch % devices == 0:
        return arms
    count = largest_divisor(batch, devices)
    result = []
    for arm in arms:
        if arm.method not in BY_BATCH:
            result.append(arm)
        elif count > 1:
            result.append(dataclasses.replace(arm, name=f"{arm.name}_{count}", argument=str(count)))
    return tuple(result)


def is_called(name: str, method: str) -> bool:
    """Whether an arm is called like one of data parallelism: as that, or with the devices it runs on (`fitting_arms`).
    An arm of a file may begin alike."""
    return re.fullmatch(rf"{method}(_\d+)?", name) is not None


def trained_name(strategy: str) -> str:
    """What the arm of a --strategy is called, also where its file is not there any more."""
    return strategy if strategy in _BY_NAME else _name_of_file(strategy)


def _name_of_file(path: str) -> str:
    """What an arm is called that a file holds: as the file, but never as an arm that is found, nor like one."""
    stem = _as_text(os.path.splitext(os.path.basename(path))[0] or path)
    found = any(stem == name or stem.startswith(f"{name}_") for name in (*_BY_NAME, STOCK, *_COUNTED))
    return f"file_{stem}" if found else stem


def _as_text(path: str) -> str:
    """A path as pictures and TensorFlow take it: of one that is no UTF-8, escapes stand for what is none."""
    return path.encode(errors="backslashreplace").decode()


def _parse_arm(item: str, flag: str) -> list[ArmName]:
    method, _, count = item.partition(":")
    if method in _COUNTED and flag == "--compare":
        if not re.fullmatch("[0-9]{1,9}", count) or not 1 <= int(count) <= _MAX_COUNTED:
            raise UsageError(f"{flag}={item}: say how many {method} strategies, as in {method}:3 "
                             f"(at most {_MAX_COUNTED})")
        of = f"/{int(count)}" if method == "within" else ""  # where a limit lies depends on how many there are
        return [ArmName(f"{method}_{number}", method, f"{number}{of}") for number in range(int(count))]
    if item in _BY_NAME:
        return [ArmName(item, item)]
    if item == STOCK:
        return [ArmName(STOCK, "stock")]
    if os.path.exists(item) and not (os.path.isfile(item) or os.path.isdir(item)):  # it is read more than once
        raise UsageError(f"{flag}={item}: is a device or a pipe; name a file")
    if item.endswith(".json") or os.sep in item or os.path.isfile(item):
        method = PIPELINE if _is_pipeline_file(item) else "file"
        return [ArmName(_name_of_file(item), method, item)]
    names = ARM_NAMES if flag == "--compare" else _TRAINED
    raise UsageError(f"{flag}={item}: no such arm and no strategy file; {nearest(item, names)}")


def _is_pipeline_file(path: str) -> bool:
    """Whether there is a file that says it is a pipeline's, of whatever version."""
    from pase_mtf.pipeline.pipeline import FORMAT  # loads what only a file needs
    try:
        read_json(path, FORMAT, sys.maxsize)
    except FormatError:
        return False
    return True
