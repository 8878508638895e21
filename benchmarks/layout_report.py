"""The tables and the picture of `benchmarks.layout`, from what it measured."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

from matplotlib.figure import Figure

from benchmarks import markdown, survey_report

__all__ = ["document", "plot"]


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _bytes(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _rules(row: dict[str, Any]) -> str:
    if not row["mesh_shape"]:
        return "one per layer"
    return f"`{row['mesh_shape']}` `{row['rules'] or '(none)'}`"


def _auto(answer: dict[str, Any]) -> str:
    return f"{answer['seconds']:.1f} s" if "layout" in answer else answer["failure"]


def _searches(found: dict[str, dict[str, Any]]) -> str:
    rows = [[name, f"{entry['forward']:,}", f"{entry['operations']:,}", f"{entry['parameters'] / 1e6:.1f} M",
             f"{entry['export_seconds']:.2f} s", f"{entry['once_seconds']:.2f} s", f"{entry['find_seconds']:.2f} s",
             "proven" if entry["optimal"] else f"gap {100 * entry.get('gap', 0.0):.2g} %",
             str(entry.get("builds", 1)), _auto(entry["auto_mtf"])] for name, entry in found.items()]
    return markdown.table(["program", "forward operations", "operations", "parameters", "export", "export + search",
                          "find_layout in all", "optimum", "graphs built", "auto_mtf"], rows)


def _predictions(found: dict[str, dict[str, Any]]) -> str:
    rows = []
    for name, entry in found.items():
        ours = next(row for row in entry["rows"] if row["layout"] == "pase_mtf")
        for row in entry["rows"]:
            if "problem" in row:
                cells = ["does not lower: " + row["problem"].split(";")[0], "", ""]
            else:
                cells = [_time(row["seconds"]), f"{row['seconds'] / ours['seconds']:.2f}×", _bytes(row["bytes"])]
            rows.append([name, row["layout"], _rules(row), *cells])
    return markdown.table(["program", "layout", "rules", "predicted step", "× ours", "memory per device"], rows,
                          range(3))


def _legality(found: dict[str, dict[str, Any]]) -> str:
    devices = sorted({count for entry in found.values() for count in entry}, key=int)
    rows = []
    for name, entry in found.items():
        cells = []
        for count in devices:
            found = entry[count]
            small = " `" + "` `".join(found["reduced"].split(" / ")) + "`" if "reduced" in found else ""
            cells.append(f"`{found['mesh_shape']}` `{found['rules'] or '(none)'}`<br>reduced:{small}"
                         if found["lowers"] else found["problem"])
        rows.append([name, *cells])
    return markdown.table(["program", *(f"p = {count}" for count in devices)], rows, range(1 + len(devices)))


def _measurements(found: dict[str, dict[str, Any]]) -> str:
    rows = []
    for name, entry in found.items():
        ours = next(row for row in entry["rows"] if row["layout"] == "pase_mtf")
        for row in entry["rows"]:
            predicted = [_time(row["seconds"]), _bytes(row["bytes"])] if "seconds" in row else ["", ""]
            if "measured_ms" in row:
                same = abs(row["measured_loss"] - row["one_device_loss"]) <= 1e-5 * abs(row["one_device_loss"])
                cells = [f"{row['measured_ms']:.1f} ± {row['measured_spread_ms']:.1f} ms",
                         f"{row['measured_ms'] / ours['measured_ms']:.2f}×" if "measured_ms" in ours else "-",
                         _bytes(row["measured_bytes"]),
                         "same" if same else f"{row['measured_loss']:.6g}, not {row['one_device_loss']:.6g}"]
            else:
                reason = row.get("problem") or row.get("fails") or ""
                cells = ["does not lower: " + reason.split(";")[0][:120], "", "", ""]
            rows.append([name, row["layout"], _rules(row), *predicted, *cells])
    return markdown.table(["program", "layout", "rules", "predicted step", "predicted memory", "measured step",
                          "× ours", "measured memory", "first loss, against one device"], rows, range(3))


def _peers(programs: dict[str, dict[str, Any]]) -> str:
    """auto_mtf beside us: everything about a program that was looked at, in one table."""
    def row_of(entry: dict[str, Any], section: str, layout: str) -> dict[str, Any]:
        return next((row for row in entry.get(section, {}).get("rows", ()) if row["layout"] == layout), {})

    rows = []
    for name, entry in programs.items():
        if "search" not in entry or "predicted" not in entry:
            continue
        found = entry["search"]
        for layout, seconds in (("pase_mtf", f"{found['find_seconds']:.1f} s"), ("same mesh", ""),
                                ("auto_mtf", _auto(found["auto_mtf"]))):
            if layout == "same mesh":
                if "same_mesh" not in found:
                    continue
                same = found["same_mesh"]
                rows.append([name, "pase_mtf, mesh `a:2;b:4`", f"{same['find_seconds']:.1f} s", "yes",
                             _time(same["seconds"]), _bytes(same["bytes"]), "", "", ""])
                continue
            full, small = row_of(entry, "predicted", layout), row_of(entry, "measured", layout)
            problem = full.get("problem") or ""
            cells = ["no: " + problem.split(";")[0] if problem else "yes",
                     *([_time(full["seconds"]), _bytes(full["bytes"])] if "seconds" in full else ["", ""])]
            if "measured_ms" in small:
                cells += ["yes", f"{small['measured_ms']:.1f} ms", _bytes(small["measured_bytes"])]
            elif small:
                cells += ["no: " + (small.get("problem") or small.get("fails") or "").split(";")[0][:80], "", ""]
            else:
                cells += ["", "", ""]
            rows.append([name, layout, seconds, *cells])
    return markdown.table(["program", "by", "time to answer", "lowers", "predicted step", "predicted memory",
                          "reduced: lowers", "measured step", "measured memory"], rows, range(2))


def _verdict(found: dict[str, dict[str, Any]]) -> str:
    """Where a layout that others wrote or found was faster than ours, and where ours did not run."""
    slower, failed = [], []
    for name, entry in found.items():
        rows = {row["layout"]: row for row in entry["rows"] if "measured_ms" in row and row["layout"] != "per layer"}
        ours = rows.pop("pase_mtf", None)
        best = min(rows.values(), key=lambda row: row["measured_ms"], default=None)
        if ours is None:
            failed.append(name)
        elif best is not None and ours["measured_ms"] > 1.05 * best["measured_ms"]:
            predicted = f", predicted {ours['seconds'] / best['seconds']:.2f}×" if "seconds" in best else ""
            slower.append(f"{name} ({best['layout']} is {ours['measured_ms'] / best['measured_ms']:.2f}× as fast"
                          f"{predicted})")
    told = f"Our layout did not run here: {', '.join(failed)}. " if failed else ""
    if slower:
        return (f"{told}Our layout was measured more than 5 % slower than the best other one here: "
                f"{', '.join(slower)}.")
    return f"{told}In no program was another layout more than 5 % faster than ours."


def _spread(found: dict[str, dict[str, Any]]) -> str:
    """How far predictions are off, and whether they order layouts as measured."""
    ratios, right, pairs = [], 0, 0
    for entry in found.values():
        rows = [(row["seconds"], row["measured_ms"] / 1e3) for row in entry["rows"]
                if "measured_ms" in row and "seconds" in row and row["layout"] != "per layer"]
        ratios += [predicted / measured for predicted, measured in rows]
        for (one, first), (other, second) in itertools.combinations(rows, 2):
            # Pairs that are measurably different.
            if max(first, second) > 1.05 * min(first, second):
                pairs += 1
                right += (one < other) == (first < second)
    if not ratios:
        return "No layout ran here that a prediction could be held against."
    ratios.sort()
    return (f"Of pairs of layouts of one program that differ by more than 5 % measured, {right} of {pairs} are "
            f"predicted in the right order. Predicted / measured: median {statistics.median(ratios):.2f}, from "
            f"{ratios[0]:.2f} to {ratios[-1]:.2f}.")


def _predicted_verdict(found: dict[str, dict[str, Any]]) -> str:
    """Where a layout that others wrote or found is predicted to be faster than ours."""
    slower = []
    for name, entry in found.items():
        rows = {row["layout"]: row["seconds"] for row in entry["rows"]
                if "seconds" in row and row["layout"] != "per layer"}
        ours = rows.pop("pase_mtf")
        best = min(rows, key=rows.__getitem__, default=None)
        if best is not None and ours > rows[best] * (1 + 1e-9):
            slower.append(f"{name} ({best}: {ours / rows[best]:.3f}×)")
    if slower:
        return "Another layout than ours is predicted to be faster here: " + ", ".join(slower) + "."
    return "In no program is a layout written by hand, or auto_mtf's, predicted to be faster than ours."


def document(data: dict[str, Any]) -> str:
    """All tables that there are results for, in Markdown."""
    def having(section: str) -> dict[str, dict[str, Any]]:
        return {name: entry[section] for name, entry in data["programs"].items() if section in entry}

    parts = ["# Layout rules for real programs\n\nPrograms of the mesh-tensorflow package as they are "
             "(`benchmarks/programs`), and those of `examples/`. `python -m benchmarks.layout` measures all this; "
             f"{survey_report.where(data['programs'], ('search', 'predicted', 'legal', 'measured'), data)}."]
    if having("survey"):
        parts.append(survey_report.document(data))
    if having("search"):
        parts.append(
            "## Time to answer\n\nFull size, 8 devices. “Export + search” is one graph, with the check that the "
            "layout lowers; “in all” also builds the program, and searches it again where its graph depends on "
            "the layout. auto_mtf: `mesh_tensorflow.auto_mtf.layout` with mesh `a:2;b:4`, which it is given.\n\n"
            + _searches(having("search")))
    if having("predicted"):
        machines = ", ".join(sorted({entry["machine"] for entry in having("predicted").values()}))
        parts.append(
            f"## Predicted, full size\n\n8 devices, machine {machines}. Every layout on the graph that the program "
            "builds for it. “Per layer”: the best strategy for `pase_mtf.lower`. What holds of commits above holds "
            "here.\n\n"
            + _predictions(having("predicted")) + "\n\n" + _predicted_verdict(having("predicted")))
    if having("search") and having("predicted"):
        parts.append(
            "## Beside auto_mtf\n\n`mesh_tensorflow.auto_mtf.layout` minimises memory on the mesh `a:2;b:4`. Time to "
            f"answer, “lowers” and predictions (machine {machines}) at full size; measured at reduced size, each "
            "with the "
            "layout found for it.\n\n" + _peers(data["programs"]))
    if having("legal"):
        parts.append(
            "## Legal at every number of devices\n\nThe layouts found at full size. `find_layout` lowers a layout "
            "before it returns it: every operation's own `lower`, for shapes only, on the graph that the program "
            "builds for this layout; so all of these have been lowered in that sense. Besides, the layout found for "
            "the reduced program on this machine (where more is split) was lowered by `mtf.Lowering` itself, with all "
            "nodes.\n\n" + _legality(having("legal")))
    if having("measured"):
        parts.append(
            "## Measured, reduced size\n\n8 virtual devices; layouts lowered by `mtf.Lowering`, “per layer” by "
            "`pase_mtf.lower`. Median ± half the distance of the quartiles, arms interleaved. Predictions are for "
            "this machine as calibrated, a layout's for Mesh-TF's own collectives. At these sizes a step is ten "
            "thousand nodes of a microsecond or two: what tells layouts apart is how many blocks Mesh-TF's rings send "
            "from device to device, and work done twice.\n\n" + _verdict(having("measured")) + "\n\n"
            + _measurements(having("measured")) + "\n\n" + _spread(having("measured"))
            + "\n\n![step time, times ours](layout.svg)")
    return "\n\n".join(parts) + "\n"


def plot(data: dict[str, Any], path: str) -> None:
    """Draws the measured step times as multiples of our layout's, a group of bars per program."""
    found = {name: entry["measured"] for name, entry in data["programs"].items() if "measured" in entry}
    if not found:
        return
    labels = list(dict.fromkeys(row["layout"] for entry in found.values() for row in entry["rows"]))
    colors = ["#2a6f97", "#c5c9c7", "#7fa8c9", "#a9c3d9", "#d98c5f", "#5b8c5a"]
    figure = Figure(figsize=(1.5 * len(found) + 4, 3.6), layout="constrained")
    axes = figure.subplots()
    width = 0.85 / len(labels)
    for number, label in enumerate(labels):
        heights = []
        for entry in found.values():
            rows = {row["layout"]: row.get("measured_ms") for row in entry["rows"]}
            heights.append((rows.get(label) or float("nan")) / (rows["pase_mtf"] or float("nan")))
        places = [place + width * (number - (len(labels) - 1) / 2) for place in range(len(found))]
        axes.bar(places, heights, 0.95 * width, color=colors[number % len(colors)], label=label)
    axes.axhline(1, color="#888", linewidth=0.8)
    axes.set_xticks(range(len(found)), list(found))
    axes.set_ylabel("step time, times ours")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path)
