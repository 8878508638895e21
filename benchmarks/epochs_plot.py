"""The pictures of docs/benchmarks/epochs.md: measured curves, and a projection per model."""

from __future__ import annotations

import io
import pathlib
from collections.abc import Mapping
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from benchmarks.epochs_document import CURVES, PLACES, curve_of, projection_of
from pase_mtf.epochs.picture import draw_curve
from pase_mtf.files import write_atomically
from pase_mtf.launch.epochs.project_command import picture_of

__all__ = ["draw_page"]


def draw_page(results: Mapping[str, Any], folder: pathlib.Path) -> None:
    """Writes all pictures of the page.

    Args:
      results: as of `epochs_document.document`.
      folder: of the page.
    """
    figure = Figure(figsize=(14, 4), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(CURVES)), CURVES, strict=True):
        curve = curve_of(results, name)
        draw_curve(axes, curve)
        axes.set_title(curve.name)
    drawn = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "pase_mtf"}):
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    write_atomically(folder / "epochs.svg", drawn.getvalue())
    for row in results["steps"]:
        if row["machine"] == results["steps"][0]["machine"]:
            path = folder / f"epochs-{row['model']}.svg"
            write_atomically(path, picture_of(projection_of(results, row, PLACES[0]), str(path)))
