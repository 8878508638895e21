"""Ranks: processes that train over all their devices, each with a graph of its own (tests/rank_worker.py), and what is
to be true of such graphs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pase_mtf.compat import tf
from pase_mtf.lowering.lowering import PlanLowering

_WORKER = Path(__file__).with_name("rank_worker.py")


def train_on_ranks(cases: Sequence[dict[str, Any]], ranks: int, folder: Path, *, each: int = 1, seconds: float = 300,
                   ) -> list[list[dict[str, np.ndarray]]]:
    """What `rank_worker.train_case` returns, per rank and case.

    Args:
      cases: what to train, one after the other.
      ranks: number of processes.
      folder: for what they write.
      each: devices of each.
      seconds: after which they are ended, when they train and when they are to end by themselves.
    """
    ports = _free_ports(ranks)
    environment = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    outputs = [folder / f"rank{rank}.npz" for rank in range(ranks)]
    logs = [folder / f"rank{rank}.log" for rank in range(ranks)]
    workers = []
    try:
        for rank in range(ranks):
            with open(logs[rank], "w", encoding="utf-8") as log:
                workers.append(subprocess.Popen(
                    [sys.executable, str(_WORKER), str(rank), ",".join(map(str, ports)), str(each),
                     json.dumps(list(cases)), str(outputs[rank])], stdin=subprocess.PIPE, stdout=log, stderr=log,
                    env={**environment, "CUDA_VISIBLE_DEVICES": "-1"}, cwd=folder))
        end = time.monotonic() + seconds
        while not all(path.exists() for path in outputs):
            ended = [rank for rank, worker in enumerate(workers) if worker.poll() is not None]
            if ended or time.monotonic() > end:
                told = "\n".join(log.read_text(encoding="utf-8")[-3000:] for log in logs)
                raise AssertionError(f"ended: {ended or 'none, but too slow'}\n{told}")
            time.sleep(0.1)
        for worker in workers:
            worker.communicate(b"\n", timeout=seconds)
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
            worker.wait()
    return [_by_case(output, len(cases)) for output in outputs]


def reached(*operations: tf.Operation) -> set[tf.Operation]:
    """What runs where operations are fetched."""
    found, stack = set(operations), list(operations)
    while stack:
        one = stack.pop()
        for other in (*(tensor.op for tensor in one.inputs), *one.control_inputs):
            if other not in found:
                found.add(other)
                stack.append(other)
    return found


def assert_all_ends_or_none(lowered: Sequence[tuple[PlanLowering, Sequence[tf.Operation]]]) -> None:
    """Whatever is fetched, all ends of a transfer run, or none: what one rank would prune another would wait for.

    Args:
      lowered: of every rank, the lowering and what is fetched.
    """
    for fetches in zip(*(fetches for _, fetches in lowered), strict=True):
        ends: dict[int, set[bool]] = {}
        for (lowering, _), fetch in zip(lowered, fetches, strict=True):
            run = reached(fetch)
            for number, own in lowering.emitter.ledger._own.items():
                ends.setdefault(number, set()).update(operation in run for operation in own)
        assert all(len(found) == 1 for found in ends.values()), fetches[0].name


def _by_case(path: Path, cases: int) -> list[dict[str, np.ndarray]]:
    found: list[dict[str, np.ndarray]] = [{} for _ in range(cases)]
    with np.load(path) as arrays:
        for key, value in arrays.items():
            number, _, name = key.partition("/")
            found[int(number)][name] = value
    return found


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("localhost", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
