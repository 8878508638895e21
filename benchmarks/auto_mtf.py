"""Mesh-TF's own layout optimiser, `mesh_tensorflow.auto_mtf`, on one program, in a process of its own.

    python -m benchmarks.auto_mtf bert full "a:2;b:4"

It minimises memory by integer programming (ortools' CP-SAT). Wants `pip install ortools`, which `compat`
loads before TensorFlow. Prints a line of JSON. It may be given seconds of processor time, too: what takes longer is
ended.
"""

from __future__ import annotations

import importlib
import json
import resource
import signal
import subprocess
import sys
import time
from typing import Any

__all__ = ["NO_ANSWER", "solve"]

NO_ANSWER = "no answer after"


def solve(name: str, size: str, mesh_shape: str, limit: float) -> dict[str, Any]:
    """Runs the optimiser on a program in a process of its own.

    Args:
      name: of the program.
      size: "full" or "reduced".
      mesh_shape: such as "a:2;b:4".
      limit: seconds of processor time that it gets, without those of building the program.

    Returns:
      "layout" (a string of layout rules) and "seconds" (of processor time); or "failure" (what happened) and "seconds".
    """
    start = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.auto_mtf", name, size, mesh_shape, f"{limit:.0f}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == -signal.SIGXCPU:
        return {"failure": f"{NO_ANSWER} {limit:.0f} s of processor time", "seconds": limit}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return {"failure": last[:200], "seconds": time.perf_counter() - start}
    return json.loads(done.stdout.splitlines()[-1])


def _main(name: str, size: str, mesh_shape: str, limit: str = "") -> None:
    # These load TensorFlow.
    from benchmarks import programs
    from pase_mtf.compat import mtf, tf
    auto_mtf = importlib.import_module("mesh_tensorflow.auto_mtf")

    with tf.Graph().as_default():
        program = programs.build(name, size)
        start = time.process_time()
        if limit:
            resource.setrlimit(resource.RLIMIT_CPU, (round(start) + int(limit), resource.RLIM_INFINITY))
        rules = auto_mtf.layout(program.graph, mtf.convert_to_shape(mesh_shape), program.outputs)
        seconds = time.process_time() - start
    layout = ";".join(f"{dim}:{axis}" for dim, axis in sorted(rules._pairs))
    print(json.dumps({"layout": layout, "seconds": seconds, "operations": len(program.graph.operations)}))


if __name__ == "__main__":
    _main(*sys.argv[1:])
