"""What trial steps took, kept beside the times of kernels: the same strategies of a program are not tried again."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping

from pase_mtf.calibration.cache import fingerprint_of_kernels, kernels_path
from pase_mtf.errors import FormatError, UsageError
from pase_mtf.files import read_json, write_atomically
from pase_mtf.launch.plan import Plan
from pase_mtf.launch.training import Timing
from pase_mtf.strategy.strategy import Strategy

__all__ = ["keep_trial", "kept_trial"]

_FORMAT, _VERSION = "pase_mtf.trial", 1
"""Another version where strategies are lowered so that their steps take another time."""


def kept_trial(plan: Plan, graph_hash: str, tried: Mapping[str, Strategy]) -> dict[str, Timing] | None:
    """What steps of these strategies took when they were tried before; None where they were not, or --recalibrate asks
    for new numbers.

    Args:
      plan: of the run. Of devices of several processes nothing is kept: what they take depends on who shares the hosts.
      graph_hash: of the program.
      tried: arm -> strategy.
    """
    if plan.devices.tasks or plan.options.recalibrate:
        return None
    try:
        found = read_json(_path(plan, graph_hash, tried), _FORMAT, _VERSION)["timings"]
        timings = {name: Timing(**found[key]) for name, key in _keys(tried).items() if key in found}
        # Only what is no nonsense: whoever has been at the file, it is measured again.
        sound = all(0.0 < one.lower <= one.median <= one.upper and one.steps > 0 for one in timings.values())
    except (FormatError, KeyError, TypeError, ValueError):
        return None
    return timings if sound and timings else None


def keep_trial(plan: Plan, graph_hash: str, tried: Mapping[str, Strategy], timings: Mapping[str, Timing]) -> None:
    """Keeps what steps took; where nothing can be written, the next run tries them again.

    Args:
      plan, graph_hash, tried: of `kept_trial`.
      timings: arm -> what its steps took.
    """
    if plan.devices.tasks:
        return
    path, keys = _path(plan, graph_hash, tried), _keys(tried)
    data = {"format": _FORMAT, "version": _VERSION,
            "timings": {keys[name]: dataclasses.asdict(timing) for name, timing in timings.items()}}
    with contextlib.suppress(OSError, UsageError):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        write_atomically(path, json.dumps(data) + "\n")


def _path(plan: Plan, graph_hash: str, tried: Mapping[str, Strategy]) -> str:
    on = fingerprint_of_kernels(plan.devices.count, plan.devices.kind)
    # Who gives more time wants longer trials, too.
    key = _hash([on, graph_hash, plan.options.measure_seconds, sorted(_keys(tried).values())])
    return os.path.join(kernels_path(plan.devices.count, plan.devices.kind).parent, f"trial-{key}.json")


def _keys(tried: Mapping[str, Strategy]) -> dict[str, str]:
    return {name: _hash([configuration.axes for configuration in strategy.configurations])
            for name, strategy in tried.items()}


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
