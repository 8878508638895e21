"""What the papers report: Tables I and II and the bars of Figure 6 of PaSE (Elango, IPDPS 2021, arXiv 2407.04001), and
the projections of Pal et al. (IEEE Micro 2019, arXiv 1907.13257)."""

from __future__ import annotations

import dataclasses

from pase_mtf.errors import UsageError
from pase_mtf.graph.computation_graph import ComputationGraph, Layer

__all__ = ["DEVICES", "FIGURE_6", "PAL", "TABLE_1", "TABLE_2", "Row", "paper_rows"]

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

PAL = {"inception_v3": 1.265, "gnmt": 1.08, "biglstm": 1.22}
"""Pal et al.: how far hybrid parallelism is ahead of data parallelism alone at scale, at least (their projection)."""

TABLE_2 = {
    "alexnet": {"conv 1-4": ("b c h w n r s", "32,1,1,1,1,1,1"), "conv 5": ("b c h w n r s", "16,2,1,1,1,1,1"),
                "fc 1, fc 3": ("b n c", "1,4,8"), "fc 2": ("b n c", "1,8,4"), "softmax": ("b n", "1,4")},
    "inception_v3": {"modules A-D": ("b c h w n r s", "32,1,1,1,1,1,1"),
                     "module E": ("b c h w n r s", "16,1,1,1,2,1,1"), "fc": ("b n c", "1,2,16")},
    "rnnlm": {"embedding": ("b s d v", "1,1,1,32"), "LSTM": ("l b s d e", "2,4,1,2,2"),
              "fc": ("b s v d", "1,1,32,1")},
    "transformer": {"embedding": ("b s d v", "1,1,1,16"), "attention": ("b s h c k", "16,1,2,1,1"),
                    "feed forward": ("b s d e", "16,1,1,2"), "fc": ("b s v d", "1,1,16,1")},
}
"""Model -> row -> (the paper's dims, its best configuration on 32 GTX 1080 Ti)."""


@dataclasses.dataclass(frozen=True)
class Row:
    """What Table II says about a layer of our graph.

    Attributes:
      name: of the row in `TABLE_2`; "" for a layer that the table does not name.
      splits: dim of ours -> parts, those that are split; empty where there is no row.
    """

    name: str = ""
    splits: tuple[tuple[str, int], ...] = ()


def paper_rows(model: str, graph: ComputationGraph) -> tuple[Row, ...]:
    """Table II in the dims of our graph: for every layer, the row that it belongs to.

    The paper names groups of layers. What it does not name (normalisations, pools and concatenations between them, the
    loss of all but AlexNet) has no row.

    Args:
      model: "alexnet", "inception_v3", "rnnlm" or "transformer".
      graph: of that model.

    Raises:
      UsageError: another model.
    """
    rows = {"alexnet": _alexnet, "inception_v3": _inception_v3, "rnnlm": _rnnlm, "transformer": _transformer}
    if model not in rows:
        raise UsageError(f"no row of the paper's Table II is about {model!r}; take one of {', '.join(rows)}")
    return tuple(rows[model](layer) for layer in graph.layers)


def _alexnet(layer: Layer) -> Row:
    name = layer.name.partition("/")[0]
    if name == "conv5":
        return Row("conv 5", (("batch", 16), ("conv4", 2)))
    if name.startswith("conv"):
        return Row("conv 1-4", (("batch", 32),))
    return {"fc1": Row("fc 1, fc 3", (("fc1", 4), ("conv5", 8))), "fc2": Row("fc 2", (("fc2", 8), ("fc1", 4))),
            "fc3": Row("fc 1, fc 3", (("classes", 4), ("fc2", 8))), "loss": Row("softmax", (("classes", 4),))}[name]


def _inception_v3(layer: Layer) -> Row:
    module = layer.name.partition("/")[0]
    if module == "classifier":
        return Row("fc", (("classes", 2), ("mixed", 16)))
    if layer.kind != "convolution":
        return Row()
    # Three modules A, one B, four C, one D, two E; the convolutions before them with the first.
    if module in ("mixed10", "mixed11"):
        return Row("module E", (("batch", 16), (_out_dim(layer), 2)))
    return Row("modules A-D", (("batch", 32),))


def _rnnlm(layer: Layer) -> Row:
    module = layer.name.partition("/")[0]
    if module == "lstm":
        # d is what a cell makes, e what it reads.
        return Row("LSTM", (("layers", 2), ("batch", 4), ("units", 2), ("inputs", 2)))
    return {"embedding": Row("embedding", (("vocab", 32),)), "output": Row("fc", (("vocab", 32),))}.get(module, Row())


def _transformer(layer: Layer) -> Row:
    module = layer.name.partition("/")[0]
    if "embedding" in module:
        return Row("embedding", (("vocab", 16),))
    if module == "output":
        return Row("fc", (("vocab", 16),))
    if "heads" in layer.dims:
        return Row("attention", (("batch", 16), ("heads", 2)))
    return Row("feed forward", (("batch", 16), ("d_ff", 2))) if "d_ff" in layer.dims else Row()


def _out_dim(layer: Layer) -> str:
    """The out-channels of a convolution: what its weights and its output share."""
    weights = {name for variable in layer.variables for name in variable.operand.dims}
    return next(name for operation in layer.operations if operation.phase == "forward"
                and operation.kind == "convolution" for name in operation.outputs[0].dims if name in weights)
