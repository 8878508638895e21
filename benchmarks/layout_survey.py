"""Every program of `benchmarks/programs` through `find_layout`, each in a process of its own with a time limit.

    python -m benchmarks.layout_survey t5_base full_8,full_16,tiny       # one program: a line of JSON per piece

`python -m benchmarks.layout --sections=survey` does this for all of them. Pieces: `full_8` and `full_16` (full size, so
many devices: seconds of processor time, and what the program's own layout, data parallelism and ours are predicted to
cost), `tiny` (the reduced size on virtual devices: losses under stock lowering and under a strategy per layer,
beside one device), `auto_8` and `auto_16` (auto_mtf's layout, and what it is predicted to cost).
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks import auto_mtf
from pase_mtf.errors import PaseError
from pase_mtf.machine.machine import Machine

__all__ = ["AUTO_MESH", "PIECES", "STEPS", "run"]

PIECES = ("full_8", "full_16", "tiny", "auto_8", "auto_16")
AUTO_MESH = {8: "a:2;b:4", 16: "a:4;b:4"}
STEPS = 2
_EQUAL = 1e-4


def run(name: str, pieces: Sequence[str], machine: str, limit: float,
        auto_limit: float = 60.0) -> dict[str, dict[str, Any]]:
    """Runs pieces of a program in a process of its own.

    Args:
      name: of the program.
      pieces: of PIECES, in order.
      machine: whose numbers count at full size.
      limit: seconds until the process is killed; what it has answered by then stands.
      auto_limit: seconds of processor time that auto_mtf gets.

    Returns:
      Piece -> what came out; {"problem": ...} for what did not.
    """
    command = [sys.executable, "-m", "benchmarks.layout_survey", name, ",".join(pieces), machine,
               str(auto_limit)]
    found: dict[str, dict[str, Any]] = {}
    end = time.monotonic() + limit
    # A session of its own, so that what it started ends with it.
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        try:
            output, errors = process.communicate(timeout=max(0.0, end - time.monotonic()))
            why = (errors.decode(errors="replace").strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            why = f"no answer after {limit:.0f} s"
        except BaseException:  # Ctrl-C does not reach its session, and nobody else knows its limit
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
    for line in output.decode().splitlines():
        if line.startswith("{"):
            found.update(json.loads(line))
    return {piece: found.get(piece, {"problem": why[:300]}) for piece in pieces}


# -- in the process of a program --------------------------------------------------------------------------------------
class _Clock:
    """Processor seconds spent in parts of a search.

    Attributes:
      seconds: part -> seconds, those of a part within another counted once, in the inner one.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner = [0.0]

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its time added to a part."""
        @functools.wraps(function)
        def run(*arguments: Any, **named: Any) -> Any:
            start = time.process_time()
            self._inner.append(0.0)
            try:
                return function(*arguments, **named)
            finally:
                whole = time.process_time() - start
                self.seconds[part] = self.seconds.get(part, 0.0) + whole - self._inner.pop()
                self._inner[-1] += whole
        return run


@contextlib.contextmanager
def _clocked() -> Iterator[_Clock]:
    """Within it, building, export and verification are timed."""
    # It loads TensorFlow, which the process that starts the others does without.
    from pase_mtf.layout import exports, program
    from pase_mtf.layout.verify import Verifier
    clock = _Clock()
    places = [(exports, "export_graph", "export"), (exports, "export_for_stock", "export"),
              (program.Program, "build", "building"), (Verifier, "problem", "verification"),
              (Verifier, "__init__", "verification")]
    before = [getattr(owner, name) for owner, name, _ in places]
    for (owner, name, part), function in zip(places, before, strict=True):
        setattr(owner, name, clock.timed(part, function))
    try:
        yield clock
    finally:
        for (owner, name, _), function in zip(places, before, strict=True):
            setattr(owner, name, function)


def _cost(entry: Any) -> dict[str, Any] | None:
    if entry is None:
        return None
    return {"mesh_shape": entry.mesh_shape, "rules": entry.layout_rules, "seconds": entry.seconds,
            "bytes": entry.memory_bytes, "problem": entry.problem[:300]}


def _full(name: str, devices: int, machine: str) -> dict[str, Any]:
    from benchmarks import layout_cases  # as in `_clocked`
    from pase_mtf.layout.find import find_layout
    operations: list[int] = []
    build = layout_cases.builder(name, "full", devices, lambda graph: operations.append(len(graph.operations)))
    loaded = Machine.load(machine)
    start = time.process_time()
    with _clocked() as clock:
        try:
            found, problem = find_layout(build, devices, machine=loaded, name=name), ""
        except PaseError as error:
            found, problem = None, str(error)[:600]
    result = {"operations": max(operations, default=0), "builds": len(operations),
              "cpu_seconds": time.process_time() - start, "parts": clock.seconds, "limit": loaded.memory_bytes}
    if found is None:
        return {**result, "problem": problem}
    return {**result, "ours": _cost(found.best), "own": _cost(found.own), "data_parallel": _cost(found.data_parallel),
            "optimal": bool(found.search["optimal"]), "gap": found.search["gap"],
            "notes": [note[:200] for note in found.notes[:4]]}


def _tiny(name: str) -> dict[str, Any]:
    """Losses of the reduced program: on one device, under the layout found by stock lowering, under the best strategy
    per layer by ours; where they differ, on one device with other noise."""
    from benchmarks import layout_cases, programs  # as in `_clocked`
    from pase_mtf.compat import tf
    from pase_mtf.export.exporter import export_graph
    from pase_mtf.lowering.lowering import lower
    from pase_mtf.runtime import Devices
    from pase_mtf.strategy.find import find_strategy
    # Owners of the small programs run them on 8 devices. TensorFlow nodes of large ones take long: 4 will do.
    count = 8 if name in programs.tables()["small"] else 4
    machine, devices = layout_cases.slow_machine(), Devices.first(count, "cpu")
    layout = layout_cases.find(name, "reduced", count, machine)
    built = layout.mesh_shape, layout.layout_rules
    with tf.Graph().as_default():
        exported = export_graph(programs.build(name, "reduced", *built).graph, name=name)
    strategy = find_strategy(exported, count, machine, simulate=0)

    def losses(lowering: Callable[[Any], Any], values: Mapping[str, Any] | None = None, seed: int = 1,
               layout: tuple[str | None, str | None] = built) -> tuple[list[float], dict[str, Any]]:
        return layout_cases.losses(lambda: programs.build(name, "reduced", *layout, seed=seed), lowering, STEPS,
                                   devices, values)

    # A program that puts blocks together may run under its own layout only.
    alone, single = ("", ""), layout_cases.for_one_device(name, *built)
    try:
        one, values = losses(lambda program: layout_cases.lower_stock(program, *alone), layout=single)
    except ValueError:
        alone = programs.own_layout(name, count) or alone
        one, values = losses(lambda program: layout_cases.lower_stock(program, *alone), layout=single)
    result: dict[str, Any] = {"mesh_shape": built[0], "rules": built[1], "devices": count, "one_device": one,
                              "beside": ";".join(alone)}
    arms = {"stock": lambda program: layout_cases.lower_stock(program, *built),
            "per_layer": lambda program: lower(program.graph, strategy, devices.names)}
    for arm, lowering in arms.items():
        try:
            result[arm] = {"losses": losses(lowering, values)[0]}
            result[arm]["difference"] = _difference(result[arm]["losses"], one)
        except Exception as error:  # whatever a lowering raises is the result
            result[arm] = {"problem": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}
    if any(result[arm].get("difference", 0.0) > _EQUAL for arm in arms):
        other, _ = losses(lambda program: layout_cases.lower_stock(program, *alone), values, 2, single)
        result["other_noise"] = _difference(other, one)
    return result


def _difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """The largest relative difference; inf where a loss is no finite number: `max` passes over a later nan."""
    found = [abs(one - other) / max(abs(other), 1e-30) for one, other in zip(losses, others, strict=True)]
    return max(found) if all(map(math.isfinite, found)) else math.inf


def _auto(name: str, devices: int, machine: str, limit: float) -> dict[str, Any]:
    from benchmarks import layout_cases  # as in `_clocked`
    answer = auto_mtf.solve(name, "full", AUTO_MESH[devices], limit)
    if "layout" not in answer:
        return {"problem": answer["failure"], "answer_seconds": answer["seconds"]}
    return {"mesh_shape": AUTO_MESH[devices], "rules": answer["layout"], "answer_seconds": answer["seconds"],
            **layout_cases.predicted_cost(name, "full", devices, Machine.load(machine), AUTO_MESH[devices],
                                          answer["layout"])}


def _main(name: str, pieces: str, machine: str = "h100", auto_limit: str = "60") -> None:
    for piece in pieces.split(","):
        kind, _, devices = piece.partition("_")
        try:
            result = (_tiny(name) if kind == "tiny" else _full(name, int(devices), machine) if kind == "full"
                      else _auto(name, int(devices), machine, float(auto_limit)))
        except Exception as error:  # the other pieces are worth having
            result = {"problem": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300], "crash": True}
        print(json.dumps({piece: result}), flush=True)
    # What TensorFlow leaves behind is not taken down in order: that can crash, and nobody is waiting for it.
    os._exit(0)


if __name__ == "__main__":
    _main(*sys.argv[1:])
