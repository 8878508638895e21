"""The launcher's own graphs as files, for the search benchmarks; the one part of them that needs TensorFlow.

    python -m benchmarks.search_export transformer big 64 transformer.json --layers=96
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.commands import told_in_one_line
from pase_mtf import models
from pase_mtf.compat import tf
from pase_mtf.export.exporter import export_graph
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.launch.arms.program import build_program, variables_by_name

__all__ = ["Exported", "export", "main"]


class Exported(NamedTuple):
    """A graph, and what it took to come by it.

    Attributes:
      graph: of the training step.
      program_seconds: for Mesh-TensorFlow's program, forward, backward and update, as the launcher builds it.
      export_seconds: for the graph of layers, from the program.
    """

    graph: ComputationGraph
    program_seconds: float
    export_seconds: float


def export(model: str, preset: str, batch: int, layers: int | None = None) -> Exported:
    """The training step that the launcher would build, exported.

    Args:
      model, preset: as for the launcher.
      batch: examples per step.
      layers: of the transformer's encoder, and of its decoder; None: the preset's.

    Raises:
      PaseError: no such model or preset, or sizes that make no sense.
    """
    config = models.load_config(model, preset, batch=batch, layers=layers)
    start = time.perf_counter()
    with tf.Graph().as_default(), variables_by_name():
        program = build_program(models.get(model), config, batch, config.optimizer, config.learning_rate, 0)
        built = time.perf_counter()
        depth = "" if layers is None else f"-{layers}+{layers}"
        graph = export_graph(program.graph, name=f"{model}-{preset}{depth}",
                             meta={"batch": batch, "optimizer": config.optimizer, "preset": preset})
    return Exported(graph, built - start, time.perf_counter() - built)


@told_in_one_line()
def main(arguments: Sequence[str] | None = None) -> int:
    """Exports one graph to a file, and prints what that took: one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("preset")
    parser.add_argument("batch", type=int)
    parser.add_argument("output")
    parser.add_argument("--layers", type=int)
    flags = parser.parse_args(arguments)
    graph, program, exported = export(flags.model, flags.preset, flags.batch, flags.layers)
    graph.save(flags.output)
    print(json.dumps({"layers": len(graph.layers), "edges": len(graph.edges), "operations": graph.operations,
                      "program_seconds": program, "export_seconds": exported}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
