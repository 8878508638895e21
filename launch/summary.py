"""summary.json: the numbers of a run for other programs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence

from typing_extensions import NotRequired, TypedDict

from pase_mtf.files import check_schema, read_json
from pase_mtf.launch.arms.chosen import Chosen
from pase_mtf.launch.flag_values import STOCK, is_called
from pase_mtf.launch.training import History
from pase_mtf.pipeline.pipeline import Pipeline

__all__ = ["ArmRow", "Summary", "arm_rows", "read_summary", "summary_json"]

_FORMAT, _VERSION = "pase_mtf.summary", 1


class ArmRow(TypedDict):
    """The numbers of one arm, as they stand in summary.json; None where nothing was measured or predicted.

    Attributes:
      predicted_ms, measured_ms: time of a step (measured: the median of `measured_steps`).
      simulated_ms: of a simulated step, where devices have cores of their own: `predicted_ms` is a sum, in which
        nothing overlaps, but for a pipeline, of which nothing but simulated steps is known. Files of earlier versions
        lack it.
      stages, microbatches: of a pipeline; None of other arms. Files of earlier versions lack them.
      pipeline_gap: of a pipeline that was searched, the "gap" of its search; None where no bound is known. Files of
        earlier versions lack it.
      measured_ms_spread, measured_ms_quartiles: half the distance of the quartiles, and these.
      examples_per_second, speedup_over_data_parallel, speedup_over_stock: by the measured times.
      predicted_bytes, measured_bytes: memory of the fullest device.
      final_loss: of the last step.
      same_as: the arm with the very same strategy that was trained in its stead.
    """

    predicted_ms: float | None
    simulated_ms: NotRequired[float | None]
    stages: NotRequired[int | None]
    microbatches: NotRequired[int | None]
    pipeline_gap: NotRequired[float | None]
    measured_ms: float | None
    measured_ms_spread: float | None
    examples_per_second: float | None
    speedup_over_data_parallel: float | None
    speedup_over_stock: float | None
    predicted_bytes: float | None
    measured_bytes: int | None
    final_loss: float | None
    measured_ms_quartiles: list[float] | None
    measured_steps: int
    same_as: str | None


class Summary(TypedDict):
    """What a run found out.

    Attributes:
      status: "search only", "done", "interrupted", "diverged", "losses disagree", or "not kept": the run has come
        to its end, and the last checkpoint could not be written.
      model, preset, batch, mesh: as the flags say; `devices` is the number of them.
      first_step: 0, or the step of the checkpoint that the run began with.
      steps_done: steps of training at its end, those before `first_step` too. Files of earlier versions lack it.
      arms: arm -> its numbers, in the order of the table.
      left_out: arm -> why there is none.
      disagreement: which arm computed something else, and how that was seen; None: none.
      note: what was suspected of the losses and turned out to be rounding.
      slowness: how many times what prices say this machine took for what steps run most while the steps were timed,
        in the median; None where that was not looked at.
      search: what the exact search says about itself: seconds, whether its result is proven, its gap, and more; None
        where no arm used it.
      nodes, build_seconds: arm -> TensorFlow nodes of its graph, and what it took to make it.
      memory_method: how `measured_bytes` was measured.
      facts: the header of the run, as people read it.
      fitting: of --microbatches=auto and --recompute=auto, the number of microbatches, the blocks that are computed
        again, out of how many (None: that was not open), the predicted seconds, the gap, and the programs that were
        looked at, with seconds and bytes of the fastest strategy of each; None: nothing was left open. Files of
        earlier versions lack it.
      spent: seconds before the first step, by what they went to (`spent.Spent`). Files of earlier versions lack it.
    """

    status: str
    model: str
    preset: str
    batch: int
    mesh: str
    devices: int
    first_step: int
    steps_done: NotRequired[int]
    arms: dict[str, ArmRow]
    left_out: dict[str, str]
    disagreement: str | None
    note: str | None
    slowness: NotRequired[float | None]
    search: dict[str, object] | None
    nodes: dict[str, int]
    build_seconds: dict[str, float]
    memory_method: str
    facts: dict[str, str]
    fitting: NotRequired[dict[str, object] | None]
    spent: NotRequired[dict[str, float]]


def arm_rows(names: Sequence[str], history: History, strategies: Mapping[str, Chosen], same_as: Mapping[str, str],
             measured_bytes: Mapping[str, int | None], batch: int) -> dict[str, ArmRow]:
    """The numbers of every arm.

    Args:
      names: all arms, in the order of the rows.
      history: of the arms that were trained.
      strategies: arm -> strategy or pipeline; stock Mesh-TF has neither, and no prediction: the cost model describes
        our lowering.
      same_as: arm -> the arm with the very same strategy that was trained in its stead.
      measured_bytes: arm -> peak bytes of the fullest device.
      batch: examples per step.

    Returns:
      arm -> its numbers.
    """
    timings = {name: history.timing(same_as.get(name, name)) for name in names}
    # Where the batch does not split over all devices their names say over how many it does.
    stock, ours = (next((name for name in names if is_called(name, base)), base) for base in (STOCK, "data_parallel"))

    def speedup(name: str, over: str) -> float | None:
        timing, base = timings[name], timings.get(over)
        return base.median / timing.median if timing and base else None

    simulated_seconds = _simulated_seconds(strategies)
    rows: dict[str, ArmRow] = {}
    for name in names:
        trained, timing, strategy = same_as.get(name, name), timings[name], strategies.get(name)
        losses, simulated = history.losses(trained), simulated_seconds.get(name)
        pipeline = strategy if isinstance(strategy, Pipeline) else None
        rows[name] = {
            "predicted_ms": strategy.seconds * 1e3 if strategy else None,
            "simulated_ms": None if simulated is None else simulated * 1e3,
            "measured_ms": timing.median * 1e3 if timing else None,
            "measured_ms_spread": timing.spread * 1e3 if timing else None,
            "examples_per_second": batch / timing.median if timing else None,
            "speedup_over_data_parallel": speedup(name, ours),
            "speedup_over_stock": speedup(name, stock),
            "predicted_bytes": strategy.memory_bytes if strategy else None,
            "measured_bytes": measured_bytes.get(trained),
            "final_loss": losses[-1] if losses else None,
            "measured_ms_quartiles": [timing.lower * 1e3, timing.upper * 1e3] if timing else None,
            "measured_steps": timing.steps if timing else 0,
            "same_as": same_as.get(name),
            "stages": len(pipeline.stages) if pipeline else None,
            "microbatches": pipeline.microbatches if pipeline else None,
            "pipeline_gap": pipeline.search.get("gap") if pipeline else None,
        }
    return rows


def _simulated_seconds(strategies: Mapping[str, Chosen]) -> dict[str, float]:
    """Arm -> simulated step. That is all that is known of a pipeline, which says so where there are others."""
    found = {name: seconds for name, chosen in strategies.items()
             if not isinstance(chosen, Pipeline) and (seconds := chosen.simulated_seconds) is not None}
    return found and {**found, **{name: chosen.seconds for name, chosen in strategies.items()
                                  if isinstance(chosen, Pipeline)}}


def summary_json(summary: Summary) -> str:
    """The text of summary.json; numbers that are not finite become null."""
    data = {"format": _FORMAT, "version": _VERSION, **summary}
    return json.dumps(_finite(data), indent=2) + "\n"


def read_summary(path: str | os.PathLike[str]) -> Summary:
    """Reads a summary.json.

    Raises:
      FormatError: the file is missing, truncated, something else, or an entry of it is not what it has to be.
    """
    data = {name: value for name, value in read_json(path, _FORMAT, _VERSION).items()
            if name not in ("format", "version")}
    check_schema(path, data, Summary)
    return data  # type: ignore[return-value]


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
