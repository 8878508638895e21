"""The page docs/benchmarks/search.md, from what benchmarks.search has measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks import markdown
from benchmarks.facts import facts_text
from benchmarks.search_memory import largest_gap
from benchmarks.search_networks import DEEP, LAUNCHER, MACHINE
from benchmarks.search_sections import DENSE_DEVICES, METHODS

__all__ = ["comparison", "document", "limits"]

Rows = dict[str, dict[str, Any]]

_START = 0.5
_EXPORT = 15.0
_SEARCH_64, _BUILD_1024, _DENSE, _DEEP, _DEEP_BYTES, _VARIATION = 0.05, 1.0, 2.0, 20.0, 1e9, 5.0
_MEMORY_GAP = 0.01
# Proofs of optimality may differ by rounding where costs are not whole numbers.
_SAME = 1e-9


def seconds_text(value: float) -> str:
    """Seconds, as people write them."""
    if value < 0.0995:
        return f"{value * 1e3:.1f} ms"
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.2f} s" if value < 10 else f"{value:.0f} s"


def _bytes_text(value: float) -> str:
    return f"{value / 1e6:.0f} MB" if value < 1e9 else f"{value / 1e9:.2f} GB"


def _search_seconds(row: dict[str, Any]) -> float:
    return row.get("warm_seconds", row["seconds"])


def _whole(rows: Rows) -> tuple[Rows, Rows]:
    """Whole processes without their start-up: from a network, and from an exported graph."""
    above = {name: {**row, "above": row["process_seconds"] - row["start_seconds"]} for name, row in rows.items()
             if "error" not in row}
    suffix = ", from its graph"
    return ({name: row for name, row in above.items() if not name.endswith(suffix)},
            {name.removesuffix(suffix): row for name, row in above.items() if name.endswith(suffix)})


def limits(results: dict[str, Rows]) -> list[tuple[str, str, str, str, bool]]:
    """What was to be shown: (what, limit, measured, proven, whether the limit is met), of what has been measured."""
    lines: list[tuple[str, str, str, str, bool]] = []

    def add(what: str, limit: str, measured: str, rows: Sequence[dict[str, Any]], met: bool) -> None:
        proven = sum(row["optimal"] for row in rows)
        lines.append((what, limit, measured, f"{proven} of {len(rows)}", met and proven == len(rows)))
    for rows, what in zip(_whole(results.get("instances", {})), (
            "networks of the paper's graphs, and of the launcher's on 4 to 64 devices; whole process",
            "the launcher's graphs on 4 to 64 devices; whole process, from the exported graph"), strict=True):
        if rows:
            worst = max(rows, key=lambda name: rows[name]["above"])
            add(what, f"{_START} s above start-up",
                f"at most {seconds_text(rows[worst]['above'])} ({worst})", list(rows.values()),
                rows[worst]["above"] < _START)
    scale = {name: row for name, row in results.get("scale", {}).items() if "error" not in row}
    if row := scale.get("transformer-big_64"):
        add("transformer, p = 64, the search alone", seconds_text(_SEARCH_64).replace(".0", ""),
            seconds_text(row["warm_search_seconds"]), [row], row["warm_search_seconds"] < _SEARCH_64)
    if row := scale.get("transformer-big_1024"):
        add("transformer, p = 1024, our own cost model, build and search", "1 s",
            f"{seconds_text(row['warm_seconds'])} ({seconds_text(row['warm_build_seconds'])} + "
            f"{seconds_text(row['warm_search_seconds'])})", [row], row["warm_seconds"] < _BUILD_1024)
    if row := scale.get(f"transformer-big-{DEEP}+{DEEP}_1024"):
        add(f"{DEEP}+{DEEP}-layer transformer ({row['layers']} layers, {row['edges']} edges), p = 1024; whole process",
            "20 s and 1 GB", f"{seconds_text(row['process_seconds'])} (read {seconds_text(row['load_seconds'])}, build "
            f"{seconds_text(row['build_seconds'])}, search {seconds_text(row['search_seconds'])}) and "
            f"{_bytes_text(row['peak_bytes'])}", [row],
            row["process_seconds"] < _DEEP and row["peak_bytes"] < _DEEP_BYTES)
    if row := scale.get(f"transformer-big-{DEEP}+{DEEP}, exported"):
        lines.append((f"the graph of {row['layers']} layers exported, from a program of {row['operations']} operations",
                      seconds_text(_EXPORT), f"{seconds_text(row['export_seconds'])} (making the program "
                      f"{seconds_text(row['program_seconds'])}; whole process {seconds_text(row['process_seconds'])})",
                      "", row["export_seconds"] < _EXPORT))
    dense = {name: row for name, row in results.get("dense", {}).items()
             if not name.startswith("instance") and "error" not in row}
    if dense:
        def together(name: str) -> float:
            return dense[name]["build_seconds"] + _search_seconds(dense[name])
        worst = max(dense, key=together)
        add(f"densenet-direct, p = {DENSE_DEVICES[0]} to {DENSE_DEVICES[-1]}, build and search", "2 s",
            f"at most {seconds_text(together(worst))} ({worst})", list(dense.values()), together(worst) < _DENSE)
    varied = list(results.get("variations", {}).values())
    if varied:
        worst_row = max(varied, key=_variation_seconds)
        add(f"{len(varied)} random variations, build and search", "5 s",
            f"at most {seconds_text(_variation_seconds(worst_row))} ({worst_row['what']})", varied,
            _variation_seconds(worst_row) < _VARIATION)
    lines += _memory_limits(results.get("memory", {}))
    for name, row in results.get("shuffled", {}).items():
        if "error" in row:
            lines.append((name, "an honest gap, bounded memory", row["error"], "no", False))
        else:
            gap = (row["cost"] - row["lower_bound"]) / abs(row["cost"])
            lines.append((name, "an honest gap, bounded memory",
                          f"gap {gap:.1%} after {seconds_text(row['seconds'])}, {_bytes_text(row['peak_bytes'])}",
                          "yes" if row["optimal"] else "no (hard by construction)",
                          math.isfinite(gap) and row["seconds"] < 1.5 * row["limit"] + 5))
    lines += [(name, "", row["error"], "no", False) for section in ("instances", "scale", "dense", "memory")
              for name, row in results.get(section, {}).items() if "error" in row]
    return lines


def _memory_limits(rows: Rows) -> list[tuple[str, str, str, str, bool]]:
    """The lines of `limits` on strategies within a memory limit."""
    swept = {name: row for name, row in rows.items() if "error" not in row}
    if not swept:
        return []
    points = [point for row in swept.values() for point in row["points"]]
    proven = sum(point["optimal"] for point in points)
    worst = max(swept, key=lambda name: largest_gap(swept[name]))
    gap, refused = largest_gap(swept[worst]), sum(row["below"]["right"] for row in swept.values())
    return [(f"the cheapest strategy within a memory limit, {len(points)} limits on {len(swept)} networks",
             f"gap at most {_MEMORY_GAP:.0%}", "gap 0 everywhere" if gap == 0 else f"largest gap {gap:.3%} ({worst})",
             f"{proven} of {len(points)}", gap <= _MEMORY_GAP),
            ("a memory limit one byte below what any strategy needs", "proven infeasible, the least memory said",
             f"at most {seconds_text(max(row['below']['seconds'] for row in swept.values()))}",
             f"{refused} of {len(swept)}", refused == len(swept))]


def _variation_seconds(row: dict[str, Any]) -> float:
    return row["build_seconds"] + row["search_seconds"]


def networks_of(rows: Rows) -> dict[str, dict[str, dict[str, Any]]]:
    """Rows "network | method" -> network -> method -> what was measured."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for key, row in rows.items():
        network, _, method = key.partition(" | ")
        found.setdefault(network, {})[method] = row
    return found


def _verdict(result: dict[str, Any], best: float, known: bool) -> str:
    """What became of it; `known`: some method has proved that `best` is the optimum."""
    if not math.isfinite(result["cost"]):
        return "nothing found"
    above = result["cost"] / best - 1
    if result["optimal"]:
        return "proven" if above <= _SAME else f"WRONG: {above:+.2%}"
    text = f"{above:+.2%}" if above < 10 else f"{1 + above:.0f} times"
    if above <= _SAME:
        text = "optimal, no proof" if known else "best known"
    if math.isfinite(result["lower_bound"]) and result["lower_bound"] < result["cost"]:
        text += f", gap {(result['cost'] - result['lower_bound']) / abs(result['cost']):.1%}"
    return text


def _refusal(message: str) -> str:
    """The gist of an error, short enough for a table."""
    if "tables of" in message:  # pase: ... need 1.2e+05 GB, ...
        return f"refused: tables of {message.partition(' need ')[2].partition(',')[0]}"
    if message in ("MemoryError", "out of memory") or "bad_alloc" in message or "with code -" in message:
        return "out of memory"
    return message if len(message) <= 60 else message[:57] + "..."


def comparison(rows: Rows) -> str:
    """Networks down, methods across: time, peak memory, proof."""
    lines = []
    for name, row in networks_of(rows).items():
        cells, size = [], row.get("size", {})
        for method in METHODS:
            result = row.get(method)
            if result is None:
                cells.append("")
                continue
            # With other prices the optimum is another: rows are held against those of their own network alone.
            alike = [other for other in row.values() if other.get("network") == result.get("network")]
            earlier = ", earlier run" if size and size.get("network") != result.get("network") else ""
            if "error" in result:
                cells.append(_refusal(result["error"]) + earlier)
                continue
            best = min(other["cost"] for other in alike if "cost" in other)
            known = any(other.get("optimal", False) for other in alike)
            cells.append(f"{seconds_text(_search_seconds(result))}, {_bytes_text(result['peak_bytes'])}, "
                         f"{_verdict(result, best, known)}{earlier}")
        lines.append([name, f"{size['layers']}, {size['edges']}, {size['configurations']}" if size else "", *cells])
    return markdown.table(["network", "layers, edges, configurations", *METHODS], lines, range(2 + len(METHODS)))


def _section_limits(results: dict[str, Rows]) -> str:
    rows = [(what, limit, measured, proven, "yes" if met else "**no**")
            for what, limit, measured, proven, met in limits(results)]
    return "## Limits\n\n" + markdown.table(["what", "limit", "measured", "proven", "met"], rows, range(5))


def _section_whole(results: dict[str, Rows]) -> str:
    rows = results.get("instances", {})
    from_network, from_graph = _whole(rows)
    if not from_network:
        return ""
    starts = sorted(row["start_seconds"] for row in (*from_network.values(), *from_graph.values()))
    start = " to ".join(dict.fromkeys(map(seconds_text, (starts[0], starts[-1]))))
    lines = []
    for name, row in from_network.items():
        graph = from_graph.get(name)
        lines.append([name, seconds_text(row["above"]), seconds_text(row["search_seconds"]),
                      "yes" if row["optimal"] else "no",
                      *([seconds_text(graph["above"]), seconds_text(graph["load_seconds"]),
                         seconds_text(graph["build_seconds"]), seconds_text(graph["search_seconds"])]
                        if graph else [""] * 4)])
    return f"""## Whole processes

Starting Python, numpy and numba, up to the first call of a compiled function, takes {start}, which is
subtracted from whole processes. "From the network" is `python -m pase_mtf.search FILE.npz`, certificate left out; "from
the graph" reads an exported graph, builds its network (machine {MACHINE}) and searches it. Compiled code is loaded from
its cache, in the process. Medians. Steps of a process are as its own clock shows them, with nothing subtracted: the
first one that calls a compiled function holds that part of the start as well, so that they may add up to more.

""" + markdown.table(["network", "from the network", "step: search", "proven", "from the graph", "step: read",
                      "build", "search"], lines, left=(0, 3))


def _section_dense(results: dict[str, Rows]) -> str:
    rows = results.get("dense", {})
    lines = [[name, f"{row['configurations']}", seconds_text(row["build_seconds"]), seconds_text(_search_seconds(row)),
              _bytes_text(row["peak_bytes"]), "yes" if row["optimal"] else "no"]
             for name, row in rows.items() if not name.startswith("instance") and "error" not in row]
    if not lines:
        return ""
    compared = []
    for name, row in rows.items():
        if name.startswith("instance"):
            devices = name.partition("_")[2]
            compared.append(
                f"On {devices} devices our optimum is {row['optimum']:.0f}, that of densenet-direct_{devices} in the "
                f"project {row['instance']:.0f} ({row['optimum'] / row['instance'] - 1:+.4%}); {row['same_vectors']} "
                f"of {row['layers']} cost vectors are equal, and the two optima split every layer alike but "
                f"{', '.join(row['different_layers']) or 'none'}.")
    if compared:
        compared.append("""What is left between them: the tool takes what goes back along an edge to be what went there,
lets blocks lie where they overlap most, and counts the input gradient of a convolution once per position of its kernel
(`benchmarks/search_densenet.py` has the list).""")
    table = markdown.table(["network", "configurations", "build", "search", "peak memory", "proven"], lines,
                           left=(0, 5))
    return "\n\n".join(["## densenet-direct", """DenseNet-121 with an edge from every earlier layer of a block to each
concatenation, priced with the paper's formulas over the paper's configurations. `layer`: normalisations priced as the
paper's tool does (as layer normalisation); `batch`: as the batch normalisations that they are.""", table,
                        *compared])


def _section_variations(results: dict[str, Rows]) -> str:
    rows = list(results.get("variations", {}).values())
    if not rows:
        return ""
    slowest = sorted(rows, key=_variation_seconds, reverse=True)[:5]
    by_search = max(rows, key=lambda row: row["search_seconds"])
    body = [[row["what"], seconds_text(row["build_seconds"]), seconds_text(row["search_seconds"]),
             "yes" if row["optimal"] else f"gap {row['gap']:.2%}"] for row in slowest]
    build, search = (statistics.median(row[f"{part}_seconds"] for row in rows) for part in ("build", "search"))
    return f"""## Random variations

Graph (the launcher's transformer in two sizes and AlexNet, DenseNet both ways, Inception-v3 and RNNLM), devices (2 to
64, also 6, 12 and 24), machine, its links' bandwidth times 1/16 to 16, and batch (16 to 512) drawn at random:
{len(rows)} draws, {sum(row['optimal'] for row in rows)} proven. Medians: build {seconds_text(build)}, search
{seconds_text(search)}. The longest search took {seconds_text(by_search['search_seconds'])}
({by_search['what']}). Slowest, build and search together:

""" + markdown.table(["variation", "build", "search", "proven"], body, left=(0, 3))


def _section_memory(results: dict[str, Rows]) -> str:
    rows = {name: row for name, row in results.get("memory", {}).items() if "error" not in row}
    if not rows:
        return ""
    lines = []
    for name, row in rows.items():
        below = row["below"]
        lines.append([name, f"{below['limit_bytes'] / 1e9:.4f}", "",
                      f"infeasible, proven; least: {row['least_bytes'] / 1e9:.4f}" if below["right"] else "**WRONG**",
                      "", seconds_text(below["seconds"])])
        for point in row["points"]:
            gap = (point["cost"] - point["lower_bound"]) / abs(point["cost"])
            lines.append(["", f"{point['limit_bytes'] / 1e9:.4f}", f"{point['bytes'] / 1e9:.4f}",
                          f"{point['cost'] / row['cost'] - 1:+.3%}",
                          "0, proven" if point["optimal"] else f"{gap:.3%}", seconds_text(point["seconds"])])
    caps = sorted({row["limit"] for row in rows.values()})
    return f"""## Memory limits

The cheapest strategy within a limit on the bytes of a device (weights, optimizer slots, gradients, kept activations,
communication buffers), in {' or '.join(f'{cap:.0f}' for cap in caps)} s at most: one byte below the least that any
strategy needs, that least, and so on up to what the cheapest strategy of all needs. "Above": its cost above that of the
cheapest of all. The paper's own networks do not say what memory their configurations take.

""" + markdown.table(["network", "limit, GB", "needs, GB", "above", "gap", "time"], lines, left=(0, 4)) + """

![time against memory](search-memory.svg)"""


def _section_rivals(results: dict[str, Rows]) -> str:
    rows = results.get("rivals", {})
    if not rows:
        return ""
    caps = sorted({row["limit"] for row in rows.values() if "limit" in row})
    return f"""## Side by side

{comparison(rows)}

Each cell: time of the search (of ours with their compiled code loaded, of `milp` and `toulbar2` with the making of
their models, and up to commit 22a8fde8 with the loading of their libraries, 100 and 8 ms), peak memory of its process
(starting Python, numpy and numba takes about 100 MB of it), and whether the optimum was proven, or how far
above the best known cost the result was. Limits of {' and '.join(f'{cap:.0f} s' for cap in caps)} (the shorter is
mcmc's); `pase` and `breadth_first` cannot stop early and were ended half a minute after that. No process may have more
than 12 GiB. "Earlier run": of the network as it was before, which may have been priced otherwise.

- `pase`, `breadth_first`: the paper's dynamic program in its own order and in the baseline's.
- `mcmc`: FlexFlow's search, from two starts: (1) data parallelism, (2) the expert's strategy, where it is known what
  the configurations are; on the paper's networks (1) each layer's cheapest configuration, (2) a random one. It stops
  when half of its time has brought nothing.
- `milp`: HiGHS through scipy.optimize.milp, a one-hot variable per layer and edge (Alpa's formulation). It is spared
  what has more variables than fit in 12 GiB; it does not always stop at its limit.
- `toulbar2`: through pytoulbar2 (`pip install '.[toulbar2]'`), costs rounded to 1e-9 of the largest.

![time against devices](search.svg)

![what mcmc reaches over time](search-mcmc.svg)"""


def document(results: dict[str, Rows]) -> str:
    """The whole page."""
    here = results.get("facts", {}).get("all", {})
    # Rows of before keep their commit alone.
    places = [{"machine": "", "versions": "", **here, **row.get("facts", {"commit": row.get("commit")})}
              for section, rows in results.items() if section != "facts" for row in rows.values()
              if "facts" in row or "commit" in row]
    sections = [f"# Searches measured\n\n{facts_text(places)}. Reproduce with `python -m benchmarks.search` "
                "(`pip install '.[cpu,launch,benchmark,toulbar2]'` first); the numbers are in "
                "[`search.json`](search.json)."
                + (f" {here['note']}" if here.get("note") else "")]
    sizes = ", ".join(f"{model}: preset {preset}, batch {batch}" for model, (preset, batch) in LAUNCHER.items())
    sections.append(f"The launcher's graphs are its training steps in the paper's sizes ({sizes}), optimizer included, "
                    "priced by our own cost model.")
    sections += [_section_limits(results), _section_whole(results), _section_dense(results),
                 _section_variations(results), _section_memory(results), _section_rivals(results)]
    return "\n\n".join(section for section in sections if section) + "\n"
