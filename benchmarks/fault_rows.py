"""What all faults of `benchmarks.faults` have in common: rows of its table, and sizes that allow many runs."""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pase_mtf.launch.run_folder import LOCK

__all__ = ["Fault", "Found", "Row", "Sizes", "half_written", "losses", "told"]

_SIZES = {"preset": "tiny", "image": 12, "fully_connected": [32, 16], "batch": 12,
          "convolutions": [{"channels": 8, "kernel": 3, "stride": 2, "pool": 2}]}


@dataclasses.dataclass(frozen=True)
class Row:
    """One kind of fault.

    Attributes:
      fault: what was done.
      tries: how often.
      survived: how often all was as it should be.
      found: what was found, with how often.
      seconds: until a watchdog has found it, of every strike; empty: there is none.
      commit: of the program that was struck.
      where: the computer, and the versions of what ran on it.
    """

    fault: str
    tries: int
    survived: int
    found: str
    seconds: Sequence[float] = ()
    commit: str = ""
    where: str = ""

    @property
    def clustered(self) -> bool:
        """Whether it is a fault of a run over processes."""
        return "--clients=" in self.fault


class Found(NamedTuple):
    """What became of a fault: see Row."""

    tries: int
    survived: int
    found: str
    seconds: Sequence[float] = ()


class Fault(NamedTuple):
    """A fault, and what tries it."""

    name: str
    tried: Callable[[], Found]


class Sizes:
    """A preset of AlexNet with a few thousand parameters, whose batch splits over two, three and four devices."""

    def __init__(self, folder: pathlib.Path):
        """Writes it into a folder, where it is not there yet."""
        self._path = folder / "sizes.json"
        if not self._path.exists():
            self._path.write_text(json.dumps(_SIZES))

    @property
    def flags(self) -> list[str]:
        """Of the launcher; they come first, so that later ones count."""
        return ["--model=alexnet", f"--preset={self._path}", "--devices=cpu", "--log_every=1", "--compare=none"]


def half_written(folder: pathlib.Path) -> list[str]:
    """The names of files that whoever wrote them was to rename, or to remove."""
    return [path.name for path in folder.rglob(".*") if path.name != LOCK]


def losses(folder: pathlib.Path, arm: str = "") -> dict[int, float]:
    """Step -> loss of a run that has one arm, or of that arm."""
    entries = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {entry["step"]: entry["loss"] for entry in entries if entry["arm"] == (arm or entry["arm"])}


def told(found: collections.Counter[str]) -> str:
    """What was found, with how often."""
    return "; ".join(f"{what}: {count}" for what, count in found.most_common())
