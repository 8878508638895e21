"""What the PaSE paper (Elango, IPDPS 2021, arXiv 2407.04001) reports: Tables I and II, and the bars of Figure 6."""

from __future__ import annotations

from pase_mtf.configurations import Configuration
from pase_mtf.errors import UsageError
from pase_mtf.graph import ComputationGraph, Layer

__all__ = ["DEVICES", "FIGURE_6", "TABLE_1", "paper_strategy"]

DEVICES = (4, 8, 16, 32, 64)

TABLE_1 = {
    "alexnet": {"PaSE": (0.226, 0.253, 0.295, 0.361, 0.475), "FlexFlow": (2.54, 2.77, 6.98, 7.92, 257)},
    "inception_v3": {"PaSE": (14.4, 20.0, 39.8, 86.0, 196), "FlexFlow": (69.2, 146.5, 365.8, 938, 2237)},
    "rnnlm": {"PaSE": (0.057, 0.086, 0.069, 0.131, 0.215), "FlexFlow": (107, 164, 432, 668, 1042)},
    "transformer": {"PaSE": (9.75, 28.8, 130.9, 553, 1883)},
}
"""Seconds to find a strategy, per number of `DEVICES`, on the paper's machine."""

FIGURE_6 = {
    "1080ti": {
        "alexnet": {"PaSE": (1.65, 1.75, 1.85, 1.44, 1.41), "expert": (1.53, 1.56, 1.47, 0.96, 0.84),
                    "FlexFlow": (1.53, 1.56, 1.47, 1.16, 1.38)},
        "inception_v3": {"PaSE": (1.03, 1.08, 1.07, 1.09, 1.12), "expert": (1.00, 1.01, 1.00, 0.99, 1.00),
                         "FlexFlow": (1.00, 1.01, 1.00, 1.01, 0.99)},
        "rnnlm": {"PaSE": (1.85, 1.76, 1.45, 1.41, 1.36), "expert": (1.61, 1.36, 0.77, 0.98, 0.91),
                  "FlexFlow": (1.79, 1.56, 0.93, 1.16, 1.29)},
        "transformer": {"PaSE": (1.03, 1.02, 1.55, 1.50, 1.43), "expert": (1.01, 0.91, 1.41, 1.39, 1.43)},
    },
    "2080ti": {
        "alexnet": {"PaSE": (3.54, 4.01, 4.00, 2.78, 1.76)},
        "inception_v3": {"PaSE": (1.01, 1.09, 1.10, 1.12, 1.18)},
        "rnnlm": {"PaSE": (2.03, 2.41, 1.68, 1.62, 1.33)},
        "transformer": {"PaSE": (1.00, 1.83, 1.75, 1.60, 2.70)},
    },
}
"""Measured speedup over data parallelism, per number of `DEVICES`, read off the figure (+- 0.01)."""


def paper_strategy(model: str, graph: ComputationGraph) -> tuple[Configuration, ...]:
    """Table II: the paper's best strategy on 32 GTX 1080 Ti, in the dims of our graph.

    The paper names groups of layers; layers that it does not name (normalisations between the named ones) follow the
    split of what they belong to. Where a row splits into fewer than 32 parts, the other devices idle, as in the paper.

    Args:
      model: "alexnet" or "transformer".
      graph: of that model.

    Raises:
      UsageError: another model.
    """
    rows = {"alexnet": _alexnet, "transformer": _transformer}.get(model)
    if rows is None:
        raise UsageError(f"no row of the paper's Table II is written down for {model!r}; take alexnet or transformer")
    return tuple(Configuration(tuple((dim, parts) for dim, parts in rows(layer) if parts > 1))
                 for layer in graph.layers)


def _alexnet(layer: Layer) -> list[tuple[str, int]]:
    """conv 1-4: b 32; conv 5: b 16, c 2; fc 1 and fc 3: n 4, c 8; fc 2: n 8, c 4; softmax: n 4."""
    name = layer.name.partition("/")[0]
    if name == "conv5":
        return [("batch", 16), ("conv4", 2)]
    if name.startswith("conv"):
        return [("batch", 32)]
    return {"fc1": [("fc1", 4), ("conv5", 8)], "fc2": [("fc2", 8), ("fc1", 4)], "fc3": [("classes", 4), ("fc2", 8)],
            "loss": [("classes", 4)]}[name]


def _transformer(layer: Layer) -> list[tuple[str, int]]:
    """embedding and fc: v 16; attention: b 16, h 2; feed forward: b 16, e 2."""
    if "vocab" in layer.dims:
        return [("vocab", 16)]
    other = next((dim for dim in ("heads", "d_ff") if dim in layer.dims), None)
    return [("batch", 16), (other, 2)] if other else [("batch", 16)]
