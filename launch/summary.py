"""What a run found out, as numbers: summary.json and the table at its end."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tabulate import tabulate

from pase_mtf.launch.arm_names import STOCK
from pase_mtf.launch.training import History

__all__ = ["ARM_KEYS", "arm_rows", "final_table", "summary_json"]

ARM_KEYS = ("predicted_ms", "measured_ms", "measured_ms_spread", "examples_per_second", "speedup_over_data_parallel",
            "speedup_over_stock", "predicted_bytes", "measured_bytes", "final_loss")


def arm_rows(names: Sequence[str], history: History, strategies: Mapping[str, Any], same_as: Mapping[str, str],
             measured_bytes: Mapping[str, int | None], batch: int) -> dict[str, dict[str, Any]]:
    """The numbers of every arm.

    Args:
      names: all arms, in the order of the rows.
      history: of the arms that were trained.
      strategies: arm -> Strategy; stock Mesh-TF has none, and no prediction: the cost model describes our lowering.
      same_as: arm -> the arm with the very same strategy that was trained in its stead.
      measured_bytes: arm -> peak bytes of the fullest device.
      batch: examples per step.

    Returns:
      arm -> its ARM_KEYS (None where nothing was measured or predicted), the quartiles, and `same_as`.
    """
    timings = {name: history.timing(same_as.get(name, name)) for name in names}

    def speedup(name: str, over: str) -> float | None:
        if timings[name] is None or timings.get(over) is None:
            return None
        return timings[over].median / timings[name].median

    rows = {}
    for name in names:
        trained, timing, strategy = same_as.get(name, name), timings[name], strategies.get(name)
        losses = history.losses(trained)
        rows[name] = {
            "predicted_ms": strategy.seconds * 1e3 if strategy else None,
            "measured_ms": timing.median * 1e3 if timing else None,
            "measured_ms_spread": timing.spread * 1e3 if timing else None,
            "examples_per_second": batch / timing.median if timing else None,
            "speedup_over_data_parallel": speedup(name, "data_parallel"),
            "speedup_over_stock": speedup(name, STOCK),
            "predicted_bytes": strategy.memory_bytes if strategy else None,
            "measured_bytes": measured_bytes.get(trained),
            "final_loss": losses[-1] if losses else None,
            "measured_ms_quartiles": [timing.lower * 1e3, timing.upper * 1e3] if timing else None,
            "measured_steps": timing.steps if timing else 0,
            "same_as": same_as.get(name),
        }
    return rows


def summary_json(rows: Mapping[str, Mapping[str, Any]], **more: Any) -> str:
    """The text of summary.json; numbers that are not finite become null."""
    data = {"format": "pase_mtf.summary", "version": 1, **more, "arms": rows}
    return json.dumps(_finite(data), indent=2) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def final_table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The table a run ends with."""
    head = ["arm", "predicted ms", "measured ms", "examples/s", "over stock", "over data par.", "predicted memory",
            "measured memory"]
    lines = []
    for name, row in rows.items():
        spread = f" ± {row['measured_ms_spread']:.1f}" if row["measured_ms"] is not None else ""
        lines.append([
            f"{name} (= {row['same_as']})" if row["same_as"] else name, number(row["predicted_ms"], ".1f"),
            number(row["measured_ms"], ".1f") + spread, number(row["examples_per_second"], ".1f"),
            number(row["speedup_over_stock"], ".2f", "×"), number(row["speedup_over_data_parallel"], ".2f", "×"),
            size(row["predicted_bytes"]), size(row["measured_bytes"])])
    return tabulate(lines, head, disable_numparse=True, colalign=("left", *["right"] * (len(head) - 1)))


def number(value: float | None, form: str, unit: str = "") -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else f"{value:{form}}{unit}"


def size(value: float | None) -> str:
    """Bytes for people."""
    if value is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"
