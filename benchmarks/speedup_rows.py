"""Rows of the speedup table: a model on so many devices, measured once and kept until it is asked for again."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks import distribute, markdown
from benchmarks.launching import processor
from pase_mtf.files import write_atomically
from pase_mtf.launch.flag_values import is_called

__all__ = ["ARMS", "MIRRORED", "Row", "Rows", "compact_table", "full_table"]

ARMS = ("data_parallel", "expert", "mcmc", "mcmc_expert", "auto_mtf", "search")
"""What is measured beside stock Mesh-TF: `--compare` of the launcher."""
MIRRORED = "mirrored"
"""A plain TensorFlow 2 model under tf.distribute.MirroredStrategy (`benchmarks.distribute`), for the models it has."""
_RIVALS = ("stock_data_parallel", MIRRORED, *ARMS[:-1])


@dataclasses.dataclass
class Row:
    """One run of the launcher.

    Attributes:
      summary: its summary.json, with "wall_seconds" and "losses_agree_to".
      data: what it trained on.
      commit: of the program that was measured; None: unknown.
      left_out: arm -> why it is missing.
      mirrored: milliseconds of the steps under MirroredStrategy; None where they were not measured.
    """

    summary: dict[str, Any]
    data: str
    commit: str | None = None
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    mirrored: list[float] | None = None

    @property
    def key(self) -> tuple[str, int, int, str]:
        """Model, devices, batch, and the processor that it was measured on."""
        summary = self.summary
        return summary["model"], summary["devices"], summary["batch"], processor(summary["facts"])

    @property
    def equal(self) -> bool:
        """Whether the launcher found the losses of all arms equal."""
        return not self.summary.get("disagreement")

    @property
    def without(self) -> dict[str, str]:
        """Arm -> why it is missing, whether the launcher left it out or this benchmark."""
        return {**self.summary.get("left_out", {}), **self.left_out}

    def holds(self, arms: Iterable[str]) -> bool:
        """Whether nothing is left to measure of these arms."""
        known = {*self.summary["arms"], *self.without}
        if self.mirrored or self.summary["model"] not in distribute.MODELS:
            known.add(MIRRORED)
        return self.equal and self.summary.get("status", "done") == "done" and all(
            any(is_called(name, arm) for name in known) for arm in arms)

    def measured(self) -> list[str]:
        """The arms that can be asked for and were measured."""
        return [arm for arm in (MIRRORED, *ARMS) if self.milliseconds(arm) is not None]

    def arm(self, arm: str) -> dict[str, Any] | None:
        """The numbers of an arm, whose name may say over how many devices the batch splits; None: it is missing."""
        return next((found for name, found in self.summary["arms"].items() if is_called(name, arm)), None)

    def milliseconds(self, arm: str) -> float | None:
        """The median step of an arm; None where it was not measured."""
        if arm == MIRRORED:
            return statistics.median(self.mirrored) if self.mirrored else None
        found = self.arm(arm)
        return found["measured_ms"] if found else None

    def speedup(self, over: str) -> float | None:
        """How many times as fast as an arm the searched strategy is."""
        other, ours = self.milliseconds(over), self.milliseconds("search")
        return other / ours if other and ours else None

    def over_best_rival(self) -> tuple[float, str] | None:
        """(how many times as fast as the fastest rival the searched strategy is, that rival)."""
        found = [(speedup, arm) for arm in _RIVALS if (speedup := self.speedup(arm)) is not None]
        return min(found, default=None)

    def predicted(self) -> float | None:
        """The speedup over data parallelism that the search promised."""
        parallel, search = self.arm("data_parallel"), self.arm("search")
        return parallel["predicted_ms"] / search["predicted_ms"] if parallel and search else None


class Rows:
    """The rows of a JSON file, which is written anew after every row: a run that was ended goes on where it was.

    Attributes:
      path: of the file; it need not exist.
    """

    def __init__(self, path: str) -> None:
        """Reads the rows that are there."""
        self.path = path
        self._rows: dict[tuple[str, int, int, str], Row] = {}
        if os.path.exists(path):
            for entry in json.loads(pathlib.Path(path).read_text(encoding="utf-8")):
                row = Row(**entry)
                self._rows[row.key] = row

    def __iter__(self) -> Iterable[Row]:
        """In order of model, devices, batch and processor."""
        return iter([self._rows[key] for key in sorted(self._rows)])

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, model: str, devices: int, batch: int, host: str) -> Row | None:
        """The row of a model on so many devices, if it was measured on this processor."""
        return self._rows.get((model, devices, batch, host))

    def add(self, row: Row) -> None:
        """Puts a row in the place of an earlier one, and writes the file."""
        self._rows[row.key] = row
        os.makedirs(os.path.dirname(os.path.abspath(self.path)), exist_ok=True)
        write_atomically(self.path, json.dumps([dataclasses.asdict(row) for row in self], indent=1) + "\n")


def full_table(rows: Sequence[Row]) -> str:
    """All rows with every rival, as a Markdown table."""
    names = {"stock_data_parallel": "stock", MIRRORED: "MirroredStrategy", "data_parallel": "data parallel",
             "search": "**searched**"}
    shown = ("stock_data_parallel", MIRRORED, *ARMS)
    head = ["model", "batch", "devices", *(names.get(arm, arm) for arm in shown), "over stock", "over data parallel",
            "predicted", "over best rival", "losses equal", "search", "measured on", "commit"]
    body = []
    for row in rows:
        best = row.over_best_rival()
        agree = row.summary.get("losses_agree_to")
        equal = ("yes" if row.equal else "**no**") + (f", to {agree:.0e}" if agree is not None else "")
        body.append([
            row.summary["model"], row.summary["batch"], row.summary["devices"], *(_milliseconds(row, arm, "")
                                                                                 for arm in shown),
            _times(row.speedup("stock_data_parallel")), _times(row.speedup("data_parallel")), _times(row.predicted()),
            f"{best[0]:.2f}× ({names.get(best[1], best[1])})" if best else "-", equal, _search_seconds(row),
            processor(row.summary["facts"]), row.commit or "-"])
    return markdown.table(head, body)


def compact_table(rows: Sequence[Row]) -> str:
    """The rows with stock Mesh-TF, data parallelism and the expert beside the searched strategy."""
    head = ["model", "devices", "stock Mesh-TF, data parallel", "data parallel, our lowering", "expert", "searched",
            "over stock", "over data parallel", "predicted", "search"]
    body = []
    for row in rows:
        summary = row.summary
        body.append([
            f"{summary['model']} ({summary['preset']}, batch {summary['batch']})", summary["devices"],
            *(_milliseconds(row, arm) for arm in ("stock_data_parallel", "data_parallel", "expert", "search")),
            _times(row.speedup("stock_data_parallel")), _times(row.speedup("data_parallel")), _times(row.predicted()),
            _search_seconds(row)])
    return markdown.table(head, body)


def _milliseconds(row: Row, arm: str, unit: str = " ms") -> str:
    if arm == MIRRORED and row.mirrored and len(row.mirrored) > 1:
        # As the launcher's (numpy.percentile), which the other columns are of.
        lower, median, upper = statistics.quantiles(row.mirrored, n=4, method="inclusive")
        return f"{median:.0f} ± {(upper - lower) / 2:.0f}{unit}"
    found = row.arm(arm)
    if not found or found["measured_ms"] is None:
        return "-"
    same = " (same)" if found["same_as"] else ""
    return f"{found['measured_ms']:.0f} ± {found['measured_ms_spread']:.0f}{unit}{same}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}×"


def _search_seconds(row: Row) -> str:
    seconds = (row.summary.get("search") or {}).get("seconds")
    return "-" if seconds is None else f"{seconds:.2f} s"
