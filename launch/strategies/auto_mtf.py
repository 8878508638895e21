"""The layout that Mesh-TensorFlow's own optimiser, `mesh_tensorflow.auto_mtf`, chooses for a program of the launcher.

It looks for the layout of least memory by integer programming. It wants ortools (`pip install 'pase_mtf[auto_mtf]'`),
which has to be loaded before TensorFlow (`compat` does so), and it runs in a process of its own, which can be stopped:

    python -m pase_mtf.launch.strategies.auto_mtf '{"model": "alexnet", "config": {...}, "batch": 32, ...}'
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from pase_mtf.errors import InfeasibleError
from pase_mtf.launch.cluster.membership import end_with_launcher
from pase_mtf.models.presets import ModelConfig, config_of

if TYPE_CHECKING:  # loads TensorFlow
    from pase_mtf.compat import mtf

__all__ = ["auto_mtf_layout", "auto_mtf_mesh"]

LIMIT = 600.0
"""Seconds after which it is given up."""


def auto_mtf_mesh(devices: int, axes: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    """The mesh that it is given, since it does not choose one: the axes of --mesh, or 2 x p/2 (2 x 4 for 8 devices)."""
    if axes:
        return axes
    return (("rows", 2), ("columns", devices // 2)) if devices > 2 and devices % 2 == 0 else (("all", devices),)


def auto_mtf_layout(model: str, config: ModelConfig, batch: int, optimizer: str, mesh: tuple[tuple[str, int], ...],
                    limit: float = LIMIT) -> dict[str, str]:
    """Runs the optimiser, which wants ortools, on the training step that the launcher builds.

    Args:
      model: of the registry.
      config: its sizes.
      batch: examples per step.
      optimizer: of the training.
      mesh: (axis, size), outermost first.
      limit: seconds it may take.

    Returns:
      Layout rules: dim name -> axis.

    Raises:
      InfeasibleError: no answer in time, or it failed.
    """
    asked = json.dumps({"model": model, "config": dataclasses.asdict(config), "batch": batch, "optimizer": optimizer,
                        "mesh": mesh})
    theirs, ours = os.pipe()  # ours is closed with this process, however that ends
    try:
        done = subprocess.run([sys.executable, "-m", "pase_mtf.launch.strategies.auto_mtf", asked], stdin=theirs,
                              capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        raise InfeasibleError(f"arm auto_mtf: no answer after {limit:.0f} s; leave it out") from None
    finally:
        os.close(theirs)
        os.close(ours)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise InfeasibleError(f"arm auto_mtf: it failed ({last[:200]}); leave it out")
    return json.loads(done.stdout.splitlines()[-1])


def _make_names_unique(graph: mtf.Graph) -> None:
    """Gives every operation and tensor of a Mesh-TF graph a unique name.

    The optimiser identifies them by name, and ends with a KeyError where two share one: all outputs of a slicewise
    operation or a split are called ":0" by Mesh-TF 0.1.21, and some of its functions use the name they are given twice.
    """
    used: set[str] = set()
    for operation in graph.operations:
        name, number = operation.name, 1
        while name in used:
            number += 1
            name = f"{operation.name}_{number}"
        used.add(name)
        operation._name = name
        for place, tensor in enumerate(operation.outputs):
            tensor._name = f"{name}:{place}"


def _main(text: str) -> None:
    end_with_launcher(lambda: os._exit(1))
    # These load TensorFlow.
    from pase_mtf import models
    from pase_mtf.compat import mtf, tf
    from pase_mtf.launch.arms.program import build_program
    auto_mtf = importlib.import_module("mesh_tensorflow.auto_mtf")

    asked = json.loads(text)
    with tf.Graph().as_default():
        program = build_program(models.get(asked["model"]), config_of(asked["model"], asked["config"]), asked["batch"],
                                asked["optimizer"], 1e-3, 0)
        mesh = mtf.Shape([mtf.Dimension(axis, size) for axis, size in asked["mesh"]])
        _make_names_unique(program.graph)
        rules = auto_mtf.layout(program.graph, mesh, [program.loss])
    print(json.dumps(dict(sorted(rules._pairs))))


if __name__ == "__main__":
    _main(*sys.argv[1:])
