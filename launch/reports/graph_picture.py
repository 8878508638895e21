"""A strategy as a picture of its graph: layers coloured by how they are split, with the reason on hover."""

from __future__ import annotations

from collections import Counter

import jinja2

from pase_mtf.errors import shortened
from pase_mtf.graph.computation_graph import ComputationGraph, Edge, Layer
from pase_mtf.graph.configurations import Configuration
from pase_mtf.strategy.strategy import Strategy

__all__ = ["MOST_LAYERS", "graph_picture"]

MOST_LAYERS = 400
"""Of more layers nobody sees anything, and browsers are slow."""
_WIDTH, _HEIGHT, _ACROSS, _DOWN, _LEGEND = 190, 24, 206, 40, 22
_ALTERNATIVES = 4
_COLORS = ("#8fb8cf", "#f2c6a0", "#b8d8ba", "#d9b8d8", "#e8e0a0", "#f0b0b0", "#b0c4de", "#c9c9c4", "#a8dadc", "#ffd6a5",
           "#caffbf", "#bdb2ff")
_OTHER = "#f6f6f4"

_SVG = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
                          lstrip_blocks=True).from_string("""\
<svg xmlns="http://www.w3.org/2000/svg" width="{{ width }}" height="{{ height }}"
 font-family="sans-serif" font-size="11">
{% for split, color in legend %}
<rect x="8" y="{{ 6 + loop.index0 * line }}" width="14" height="14" fill="{{ color }}" stroke="#888"/>
<text x="28" y="{{ 17 + loop.index0 * line }}">{{ split }}</text>
{% endfor %}
{% for edge in edges %}
<line x1="{{ edge.x1 }}" y1="{{ edge.y1 }}" x2="{{ edge.x2 }}" y2="{{ edge.y2 }}" stroke="{{ edge.color }}"\
 stroke-width="{{ edge.width }}"><title>{{ edge.title }}</title></line>
{% endfor %}
{% for box in boxes %}
<g><title>{{ box.title }}</title>
<rect x="{{ box.x }}" y="{{ box.y }}" width="{{ box_width }}" height="{{ box_height }}" rx="4" fill="{{ box.color }}"\
 stroke="#888"/>
<text x="{{ box.x + 6 }}" y="{{ box.y + 16 }}">{{ box.name }}</text></g>
{% endfor %}
</svg>
""")


def graph_picture(graph: ComputationGraph, strategy: Strategy) -> str:
    """Draws a strategy: the layers from top to bottom in the order in which the forward pass comes to them.

    Args:
      graph: of the strategy.
      strategy: one that knows its prices.

    Returns:
      SVG, as text; empty for a graph of more than `MOST_LAYERS` layers.
    """
    if len(graph.layers) > MOST_LAYERS:
        return ""
    forward = [edge for edge in graph.edges if edge.phase == "forward" and edge.source < edge.target]
    places = _places(len(graph.layers), forward)
    splits = [str(configuration) for configuration in strategy.configurations]
    colors = {split: _COLORS[number] for number, (split, _) in enumerate(Counter(splits).most_common(len(_COLORS)))}
    top = 16 + _LEGEND * (len(colors) + (len(set(splits)) > len(colors)))
    at = [(10 + _ACROSS * column, top + _DOWN * row) for row, column in places]
    boxes = [{"x": x, "y": y, "color": colors.get(split, _OTHER), "name": shortened(layer.name, 30, quoted=False),
              "title": f"{layer.name}\n{strategy.explain(number, _ALTERNATIVES)}"}
             for number, (layer, split, (x, y)) in enumerate(zip(graph.layers, splits, at, strict=True))]
    lines = [_line(edge, at, graph.layers, strategy.configurations) for edge in forward]
    legend = [*colors.items(), *([("other", _OTHER)] if len(set(splits)) > len(colors) else [])]
    return _SVG.render(width=20 + max((x for x, _ in at), default=0) + _WIDTH, line=_LEGEND, legend=legend,
                       height=20 + max((y for _, y in at), default=0) + _HEIGHT, boxes=boxes, edges=lines,
                       box_width=_WIDTH, box_height=_HEIGHT)


def _places(layers: int, edges: list[Edge]) -> list[tuple[int, int]]:
    """(row, column) of every layer: below all that it reads."""
    rows, columns, found = [0] * layers, Counter[int](), []
    for edge in sorted(edges, key=lambda edge: edge.target):
        rows[edge.target] = max(rows[edge.target], rows[edge.source] + 1)
    for row in rows:
        found.append((row, columns[row]))
        columns[row] += 1
    return found


def _line(edge: Edge, at: list[tuple[int, int]], layers: tuple[Layer, ...],
          configurations: tuple[Configuration, ...]) -> dict[str, int | str]:
    """An edge, red where its ends shard the tensor differently."""
    (x1, y1), (x2, y2) = at[edge.source], at[edge.target]
    ends = []
    for end, dims in ((edge.source, edge.source_dims), (edge.target, edge.target_dims)):
        names = [layers[end].aliases.get(name, name) for name in dims]
        ends.append(configurations[end].partition(names))
    moved = ends[0] != ends[1]
    return {"x1": x1 + _WIDTH // 2, "y1": y1 + _HEIGHT, "x2": x2 + _WIDTH // 2, "y2": y2,
            "color": "#c1121f" if moved else "#aaa", "width": 2 if moved else 1,
            "title": f"{edge.tensor} [{', '.join(map(str, edge.shape))}]" + (", moved" if moved else "")}
