"""The tables of `benchmarks.layout --sections=survey`, largest program first, and what they come down to."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from benchmarks import markdown

__all__ = ["document", "where"]

_DEVICES = (8, 16)
_LIMIT = 15.0
_EQUAL = 1e-4
_Entries = list[tuple[str, dict[str, Any]]]


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _operations(entry: Mapping[str, Any]) -> int:
    return max((entry.get(f"full_{devices}", {}).get("operations", 0) for devices in _DEVICES), default=0)


def _pieces(entries: _Entries) -> Iterable[tuple[str, int, dict[str, Any]]]:
    """(program, devices, answer) of every search at full size."""
    for name, entry in entries:
        for devices in _DEVICES:
            if f"full_{devices}" in entry:
                yield name, devices, entry[f"full_{devices}"]


def _first_clause(text: str) -> str:
    return text.split(";")[0][:160]


def _times(entries: _Entries) -> str:
    rows = []
    for name, devices, found in _pieces(entries):
        parts = found.get("parts", {})
        other = found["cpu_seconds"] - sum(parts.values()) if "cpu_seconds" in found else None
        seconds = [parts.get("building"), parts.get("export"), other, parts.get("verification"),
                   found.get("cpu_seconds")]
        verdict = (_first_clause(found["problem"]) if "problem" in found else
                   "proven" if found["optimal"] else f"gap {100 * found['gap']:.2g} %")
        rows.append([name, f"{found.get('operations', 0):,}", devices, found.get("builds", ""),
                     *("" if second is None else f"{second:.1f}" for second in seconds), verdict,
                     found.get("commit") or "-"])
    return markdown.table(["program", "operations", "p", "graphs built", "building, s", "export, s", "search, s",
                          "verification, s", "in all, s", "optimum", "commit"], rows, (0, 9, 10))


def _cost(cost: Mapping[str, Any] | None, absent: str = "") -> str:
    if cost is None:
        return absent
    if cost.get("problem"):
        return "no: " + _first_clause(cost["problem"])
    return f"{_time(cost['seconds'])}, {_gigabytes(cost['bytes'])}"


def _predictions(entries: _Entries) -> str:
    rows = []
    for name, entry in entries:
        for devices in _DEVICES:
            found = entry.get(f"full_{devices}")
            if found is None:
                continue
            ours = found.get("ours")
            rules = f"`{ours['mesh_shape']}` `{ours['rules'] or '(none)'}`" if ours else ""
            answer = _cost(ours) if ours else "refused: " + _first_clause(found.get("problem", ""))
            rows.append([name, devices, _cost(found.get("own"), "names none"), _cost(found.get("data_parallel")),
                         _cost(entry.get(f"auto_{devices}"), "not run"), answer, rules])
    return markdown.table(["program", "p", "own layout", "data parallel", "auto_mtf", "ours", "our rules"], rows,
                          (0, 2, 3, 4, 5, 6))


def _difference(arm: Mapping[str, Any]) -> str:
    if "problem" in arm:
        return "fails: " + _first_clause(arm["problem"])
    return f"{arm['difference']:.0e}" if arm["difference"] else "0"


def _losses(entries: _Entries) -> str:
    rows = []
    for name, entry in entries:
        found = entry.get("tiny")
        if found is None:
            continue
        if "stock" not in found:
            rows.append([name, "", "", _first_clause(found["problem"]), "", "", "", found.get("commit") or "-"])
            continue
        noise = f"{found['other_noise']:.0e}" if "other_noise" in found else ""
        losses = ", ".join(f"{loss:.6g}" for loss in found["one_device"])
        beside = "" if found["beside"] == ";" else f" (`{found['beside']}`)"
        rows.append([name, f"`{found['mesh_shape']}` `{found['rules'] or '(none)'}`", found["devices"],
                     losses + beside, _difference(found["stock"]), _difference(found["per_layer"]), noise,
                     found.get("commit") or "-"])
    return markdown.table(["program", "layout", "p", "losses, one device", "stock lowering, difference",
                          "per-layer lowering, difference", "one device, other noise", "commit"], rows, (0, 1, 3, 7))


def _own_seconds(found: Mapping[str, Any]) -> float:
    """Processor seconds of an answer without what the program itself takes to build its graphs."""
    return float(found.get("cpu_seconds", 0.0) - found.get("parts", {}).get("building", 0.0))


def _named(names: Iterable[str]) -> str:
    names = list(dict.fromkeys(names))
    return f"{len(names)} ({', '.join(names)})" if names else "none"


def _verdicts(entries: _Entries, known: int) -> str:
    pieces = list(_pieces(entries))
    answered = [(name, devices, found) for name, devices, found in pieces if "ours" in found]
    refused = [f"{name} at p = {devices}" for name, devices, found in pieces
               if "ours" not in found and "cpu_seconds" in found]
    silent = [f"{name} at p = {devices}" for name, devices, found in pieces if "cpu_seconds" not in found]
    slow = [f"{name} at p = {devices}: {_own_seconds(found):.0f} s" for name, devices, found in pieces
            if _own_seconds(found) > _LIMIT]
    beyond = [f"{name} at p = {devices}: {_gigabytes(found['ours']['bytes'])}" for name, devices, found in answered
              if found["limit"] is not None and found["ours"]["bytes"] > found["limit"]]
    costlier = [f"{name} at p = {devices}: {found['ours']['seconds'] / found['own']['seconds']:.2f}×"
              for name, devices, found in answered if found["own"] and not found["own"]["problem"]
              and (found["limit"] is None or found["own"]["bytes"] <= found["limit"])
              and found["ours"]["seconds"] > found["own"]["seconds"] * (1 + 1e-9)]
    trained = [(name, entry["tiny"]) for name, entry in entries if "tiny" in entry]
    failing = [f"{name} ({arm.replace('_', ' ')})" for name, found in trained for arm in ("stock", "per_layer")
               if "problem" in found.get(arm, {"problem": ""})]
    apart = [name for name, found in trained if any(
        found.get(arm, {}).get("difference", 0.0) > _EQUAL for arm in ("stock", "per_layer"))]
    noise = [name for name, found in trained if name in apart and found["other_noise"] > _EQUAL]
    lines = [
        f"{len({name for name, _, _ in pieces})} of {known} programs, {len(pieces)} searches: "
        f"{len(answered)} answered, {len(refused)} refused in words" + (f" ({', '.join(refused)})" if refused else "")
        + f"; no answer at all: {_named(silent)}.",
        f"Over {_LIMIT:.0f} s of export, search and verification: {_named(slow)}.",
        f"Beyond the device's memory: {_named(beyond)}.",
        f"Costlier than an own layout that lowers and fits: {_named(costlier)}.",
        f"{len(trained)} programs trained at tiny size; did not lower or run: {_named(failing)}; losses that differ by "
        f"more than {_EQUAL:g} of one device's: {_named(apart)}, of them with as little agreement between one device "
        f"and itself with other noise: {_named(noise)}."]
    return "\n".join(f"- {line}" for line in lines)


def where(programs: Mapping[str, Mapping[str, Any]], sections: Collection[str], earlier: Mapping[str, Any]) -> str:
    """The machines and versions that sections were measured on.

    Args:
      programs: what is known of every one; `where` by section, in those that say it, and in every piece of a survey.
      sections: whose.
      earlier: host and versions of those that do not, which were kept for all.
    """
    told = f"{earlier.get('host', '')}; {earlier.get('versions', '')}"
    found = [(piece, entry.get("where", {}).get(section, told)) for entry in programs.values()
             for section in sections if section in entry
             for piece in (entry[section].values() if section == "survey" else (entry[section],))]
    return " / ".join(dict.fromkeys(piece.get("where", otherwise) for piece, otherwise in found)) or told


def document(data: Mapping[str, Any]) -> str:
    """The section, in Markdown; "" where nothing was surveyed."""
    found = [(name, entry["survey"]) for name, entry in data["programs"].items() if "survey" in entry]
    if not found:
        return ""
    entries = sorted(found, key=lambda item: -_operations(item[1]))
    about = data["survey"]
    pieces = [piece for _, entry in found for piece in entry.values()]  # those of earlier versions say less
    load = max(piece.get("load", about.get("load", 0.0)) for piece in pieces)
    machines = sorted({piece.get("machine", about.get("machine", "")) for piece in pieces})
    return (
        "## Every program\n\nPrograms of `benchmarks/programs`: the package's examples, the models of its transformer "
        "library through its gin files, and small ones of our own; largest first. `python -m benchmarks.layout "
        f"--sections=survey`; {where(data['programs'], ('survey',), about)}.\n\n" + _verdicts(entries, about["known"])
        + "\n\n### Seconds\n\nProcessor seconds of `find_layout`, full size, from a function that builds the program, "
        "without the import of TensorFlow. “Building” is the program's own code. The machine had up to "
        f"{load:.0f} processes that wanted to run: an idle one takes fewer seconds. A row was measured at the "
        "commit that stands there (“+”: with changes that came later).\n\n"
        + _times(entries)
        + f"\n\n### Predicted\n\nFull size, machine {' / '.join(machines)}: a step and the memory of the fullest "
        "device. auto_mtf is given the meshes `a:2;b:4` and `a:4;b:4`. Our layouts and own ones have been lowered by "
        "every operation's own `lower`, for shapes. Up to commit 73153e21 sums that Mesh-TF does not cut into pieces, "
        "and moves over several axes, were priced as if our own lowering made them.\n\n" + _predictions(entries)
        + "\n\n### Losses\n\nThe reduced program on virtual devices, with the layout and the strategy that are found "
        "for a machine so slow that everything is worth splitting: `mtf.Lowering` itself under the layout, "
        "`pase_mtf.lower` under the strategy per layer. Largest relative difference of the losses of two steps from "
        "those of one device (in brackets: of the own layout of a program that one device does not run), from the same "
        "initial values. Where one is more than "
        f"{_EQUAL:g}: the same between one device and one device with another seed of its noise.\n\n"
        + _losses(entries))
