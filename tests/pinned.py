"""Numbers that a change moves on purpose only: hashes of graphs, and what strategies are predicted to cost.

    python tests/pinned.py          writes tests/data/pinned.json anew; say in the commit which numbers moved, and why
    python tests/pinned.py mlp      only the numbers of the models that are named
"""

import json
import pathlib
import sys

from pase_mtf import models
from pase_mtf.compat import tf
from pase_mtf.export.exporter import export_graph
from pase_mtf.files import write_atomically
from pase_mtf.launch.arms.program import build_program, variables_by_name
from pase_mtf.machine.machine import Machine
from pase_mtf.strategy.find import find_strategy

FILE = pathlib.Path(__file__).parent / "data" / "pinned.json"
MACHINES, DEVICES = ("1080ti", "h100"), (4, 8)
_ADAM = ("transformer", "gnmt")
_BATCH = {"transformer": 16, "gnmt": 16, "rnnlm": 16, "biglstm": 16}


def numbers_of(model: str) -> dict[str, str | float]:
    """The pinned numbers of the tiny preset of a model: what they are -> the number."""
    with tf.Graph().as_default(), variables_by_name():
        program = build_program(models.get(model), models.load_config(model, "tiny"), _BATCH.get(model, 64),
                                "adam" if model in _ADAM else "sgd", 0.01, seed=3)
        graph = export_graph(program.graph, name=model)
    found = {"hash": graph.hash, "layers": len(graph.layers), "edges": len(graph.edges), "FLOP": graph.flops,
             "parameters": graph.parameters}
    for machine in map(Machine.load, MACHINES):
        for devices in DEVICES:
            for method in ("exact", "data_parallel", "expert"):
                strategy = find_strategy(graph, devices=devices, machine=machine, method=method, simulate=0)
                found[f"{method} on {devices} of {machine.name}, seconds"] = strategy.seconds
    return found


if __name__ == "__main__":
    kept = json.loads(FILE.read_text(encoding="utf-8")) if sys.argv[1:] else {}
    kept |= {name: numbers_of(name) for name in sys.argv[1:] or models.names()}
    write_atomically(FILE, json.dumps({name: kept[name] for name in models.names()}, indent=1) + "\n")
