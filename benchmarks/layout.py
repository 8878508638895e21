"""Layout rules for real programs: found, predicted, legal, measured; beside those written by hand and auto_mtf's.

    python -m benchmarks.layout --sections=survey                            # every program, a process each; goes on
    python -m benchmarks.layout --sections=survey --again                    # anew
    python -m benchmarks.layout                                              # everything: most of an hour on two cores
    python -m benchmarks.layout --sections=measured --programs=bert,toy      # a piece; what was measured before is kept
    python -m benchmarks.layout --sections=                                  # only the tables, anew

Sections: `survey` (`benchmarks.layout_survey`: all programs, what was answered before stands), and of the package's own
examples `search` (how long it takes to export, to search, and auto_mtf takes), `predicted` (every layout and the
per-layer strategy, at full size), `legal` (at 4, 8, 16 and 32 devices), `measured` (reduced size, 8 virtual devices of
this machine). Writes docs/benchmarks/layout.json, layout.md and layout.svg.

auto_mtf wants ortools (`pip install '.[auto_mtf]'`); without it, its columns say so.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

from tqdm import tqdm

from benchmarks import auto_mtf, layout_cases, layout_survey, programs
from benchmarks.commands import kept_when_interrupted, told_in_one_line
from benchmarks.launching import commit
from benchmarks.layout_report import document, plot
from pase_mtf.calibration.load import load_machine
from pase_mtf.compat import tf
from pase_mtf.errors import PaseError, UsageError
from pase_mtf.export.exporter import export_graph
from pase_mtf.export.phases import phases_of
from pase_mtf.files import write_atomically
from pase_mtf.launch.arms.arm import Arm
from pase_mtf.lowering.lowering import lower
from pase_mtf.machine.machine import Machine
from pase_mtf.operations.facts import read_operations
from pase_mtf.runtime import choose_devices, describe_host
from pase_mtf.strategy.find import find_strategy

__all__ = ["main"]

FOLDER = pathlib.Path(__file__).absolute().parents[1] / "docs" / "benchmarks"
DEVICES = 8
AUTO_MESH = "a:2;b:4"


def search(name: str, known: dict[str, Any], flags: argparse.Namespace) -> dict[str, Any]:
    """Times at full size: export, search with its check that the layout lowers, and auto_mtf."""
    machine = Machine.load(flags.machine)
    with tf.Graph().as_default():
        start = time.perf_counter()
        program = programs.build(name, "full")
        built = time.perf_counter()
        exported = export_graph(program.graph, name=name)
        export_seconds = time.perf_counter() - built
        phases = phases_of(program.graph, read_operations(program.graph))
        result = {"operations": len(program.graph.operations), "forward": phases.count("forward"),
                  "layers": len(exported.layers), "parameters": exported.parameters,
                  "build_seconds": built - start, "export_seconds": export_seconds}
    start = time.perf_counter()
    layout = layout_cases.find(name, "full", DEVICES, machine)
    # A program that depends on its layout is built, exported and searched several times.
    result.update(find_seconds=time.perf_counter() - start, search_seconds=layout.search["seconds"],
                  once_seconds=layout.search["export_seconds"] + layout.search["seconds"],
                  optimal=layout.search["optimal"], gap=layout.search["gap"], builds=layout.search.get("builds", 1),
                  mesh_shape=layout.mesh_shape, rules=layout.layout_rules)
    start = time.perf_counter()
    same = layout_cases.find(name, "full", DEVICES, machine, mesh=AUTO_MESH)
    result["same_mesh"] = {"find_seconds": time.perf_counter() - start, "rules": same.layout_rules,
                           "seconds": same.seconds, "bytes": same.memory_bytes}
    before = known.get("search", {}).get("auto_mtf") if flags.keep_auto_mtf else None
    result["auto_mtf"] = before or auto_mtf.solve(name, "full", AUTO_MESH, flags.limit)
    return result


def _layouts(name: str, size: str, layout: Any, auto: dict[str, Any]) -> list[tuple[str, str, str]]:
    found = [("pase_mtf", layout.mesh_shape, layout.layout_rules), *layout_cases.by_hand(name, DEVICES)]
    if "layout" in auto:
        found.append(("auto_mtf", AUTO_MESH, auto["layout"]))
    return found


def predicted(name: str, known: dict[str, Any], flags: argparse.Namespace) -> dict[str, Any]:
    """What every layout is predicted to cost at full size, and the best strategy with a layout per layer."""
    machine = Machine.load(flags.machine)
    layout = layout_cases.find(name, "full", DEVICES, machine)
    auto = known.get("search", {}).get("auto_mtf") or auto_mtf.solve(name, "full", AUTO_MESH, flags.limit)
    rows = []
    for label, mesh_shape, rules in _layouts(name, "full", layout, auto):
        cost = ({"seconds": layout.seconds, "bytes": layout.memory_bytes} if label == "pase_mtf" else
                layout_cases.predicted_cost(name, "full", DEVICES, machine, mesh_shape, rules))
        rows.append({"layout": label, "mesh_shape": mesh_shape, "rules": rules, **cost})
    if "failure" in auto:
        rows.append({"layout": "auto_mtf", "mesh_shape": AUTO_MESH, "rules": "", "problem": auto["failure"]})
    with tf.Graph().as_default():
        exported = export_graph(programs.build(name, "full").graph, name=name)
        strategy = find_strategy(exported, DEVICES, machine, simulate=0)  # a layout's cost is a sum, too
    rows.append({"layout": "per layer", "mesh_shape": "", "rules": "", "seconds": strategy.seconds,
                 "bytes": strategy.memory_bytes, "search_seconds": strategy.search["seconds"],
                 "optimal": strategy.search["optimal"]})
    return {"machine": machine.name, "rows": rows}


def legal(name: str, known: dict[str, Any], flags: argparse.Namespace) -> dict[str, Any]:
    """Whether Mesh-TF itself lowers what was found, at other numbers of devices (the reduced program, all nodes)."""
    del known
    result: dict[str, Any] = {}
    machine, here = Machine.load(flags.machine), load_machine("local", DEVICES)
    # Its virtual devices are no different if there are more of them.
    here = dataclasses.replace(here, links=tuple(dataclasses.replace(link, devices=32) for link in here.links))
    for devices in (4, 8, 16, 32):
        start = time.perf_counter()
        try:
            full = layout_cases.find(name, "full", devices, machine)
            entry = {"mesh_shape": full.mesh_shape, "rules": full.layout_rules}
            # At the reduced size of this machine something is split; on a fast one replicating is often best.
            small = layout_cases.find(name, "reduced", devices, here)
            entry["reduced"] = f"{small.mesh_shape} / {small.layout_rules}"
            with tf.Graph().as_default():
                program = programs.build(name, "reduced", small.mesh_shape, small.layout_rules)
                layout_cases.lower_stock(program, small.mesh_shape, small.layout_rules)
            entry["lowers"] = True
            entry["seconds"] = time.perf_counter() - start
        except PaseError as error:
            entry = {"lowers": False, "problem": str(error)[:200]}
        result[str(devices)] = entry
    return result


def measured(name: str, known: dict[str, Any], flags: argparse.Namespace) -> dict[str, Any]:
    """Steps at reduced size on virtual devices: every layout by Mesh-TF itself, and the strategy per layer by ours."""
    del known
    devices = choose_devices("cpu", DEVICES)
    machine = load_machine("local", DEVICES)
    layout = layout_cases.find(name, "reduced", DEVICES, machine)
    auto = auto_mtf.solve(name, "reduced", AUTO_MESH, flags.limit)
    rows, arms = [], []
    for label, mesh_shape, rules in _layouts(name, "reduced", layout, auto):
        row = {"layout": label, "mesh_shape": mesh_shape, "rules": rules}
        rows.append(row)
        row.update({"seconds": layout.seconds, "bytes": layout.memory_bytes} if label == "pase_mtf" else
                   layout_cases.predicted_cost(name, "reduced", DEVICES, machine, mesh_shape, rules))
        try:
            arms.append(layout_cases.stock_arm(label, name, "reduced", mesh_shape, rules, devices))
        except Exception as error:  # whatever Mesh-TF raises for what it cannot lower
            row["fails"] = f"{type(error).__name__}: {error}".replace("\n", " ")[:200]
    if "failure" in auto:
        rows.append({"layout": "auto_mtf", "mesh_shape": AUTO_MESH, "rules": "", "problem": auto["failure"]})
    with tf.Graph().as_default():
        exported = export_graph(programs.build(name, "reduced").graph, name=name)
        strategy = find_strategy(exported, DEVICES, machine, simulate=0)  # a layout's cost is a sum, too
    rows.append({"layout": "per layer", "mesh_shape": "", "rules": "", "seconds": strategy.seconds,
                 "bytes": strategy.memory_bytes})
    arms.append(Arm("per layer", lambda: programs.build(name, "reduced"),
                    lambda program: lower(program.graph, strategy, devices.names), devices))
    with tqdm(desc=name, unit=" rounds", leave=False, disable=None) as bar:
        result = layout_cases.measure(name, "reduced", arms, flags.seconds, bar.update)
    for arm in arms:
        arm.close()
    losses: dict[tuple, float] = {}
    for row in rows:
        if row["layout"] in result:
            row.update({f"measured_{key}": value for key, value in result[row["layout"]].items()})
            built = (row["mesh_shape"] or None, row["rules"] or None) if name in programs.REBUILT else (None, None)
            if built not in losses:
                losses[built] = layout_cases.first_loss(name, "reduced", *built, devices)
            row["one_device_loss"] = losses[built]
    return {"machine": machine.name, "auto_mtf": auto, "rows": rows}


def survey(name: str, known: dict[str, Any], flags: argparse.Namespace) -> dict[str, Any]:
    """What `benchmarks.layout_survey` says of a program, of every piece with where and when it was answered; pieces
    that were answered before stand, unless they are asked for again."""
    before = dict(known.get("survey", {}))
    open_pieces = [piece for piece in flags.pieces.split(",") if flags.again or piece not in before]
    silent = before.get("auto_8", {}).get("problem", "").startswith(auto_mtf.NO_ANSWER)
    if silent and "auto_16" in open_pieces and "auto_8" not in open_pieces:  # asked anew, that may answer
        open_pieces.remove("auto_16")  # its problem is no smaller there
        before["auto_16"] = {**before["auto_8"], "problem": "not asked: no answer at p = 8"}
    if open_pieces:
        answers = layout_survey.run(name, open_pieces, flags.machine, flags.process_limit, flags.limit)
        made = {"commit": commit(), "where": _here(), "machine": flags.machine, "load": os.getloadavg()[1]}
        before |= {piece: found | made for piece, found in answers.items()}
    return before


SECTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "survey": survey, "search": search, "predicted": predicted, "legal": legal, "measured": measured}


def _here() -> str:
    """This computer, and the versions of what runs on it."""
    names = [("pase_mtf", "pase_mtf"), ("TensorFlow", "tensorflow-cpu"), ("Mesh-TensorFlow", "mesh-tensorflow"),
             ("ortools", "ortools")]
    found = []
    for label, package in names:
        try:
            found.append(f"{label} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return f"{describe_host()}; {', '.join([*found, f'Python {platform.python_version()}'])}"


def _known(section: str) -> list[str]:
    """The programs of a section: the layouts of the older sections are written by hand, for the package's examples."""
    if section != "survey":
        return [*programs.PROGRAMS]
    return [name for table in programs.tables().values() for name in table]


def _names(section: str, flags: argparse.Namespace) -> list[str]:
    """The programs of a section that are asked for."""
    known = _known(section)
    wanted = flags.programs.split(",") if flags.programs else known
    for name in wanted:
        if name not in known:
            raise UsageError(f"--programs={name}: section {section} has {', '.join(known)}")
    return wanted


@told_in_one_line()
@kept_when_interrupted
def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes; returns 1 where a piece failed (the others are written all the same)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--programs", help="default: all that a section has")
    parser.add_argument("--pieces", default=",".join(layout_survey.PIECES), help="of the survey")
    parser.add_argument("--again", action="store_true", help="survey pieces that were answered before, too")
    parser.add_argument("--process_limit", type=float, default=600, help="seconds for a program of the survey")
    parser.add_argument("--machine", default="h100", help="whose numbers predict the full sizes")
    parser.add_argument("--limit", type=float, default=120, help="seconds of processor time for auto_mtf")
    parser.add_argument("--keep_auto_mtf", action="store_true", help="its earlier answers at full size stand")
    parser.add_argument("--seconds", type=float, default=30, help="of measuring, per program")
    parser.add_argument("--output", default=str(FOLDER))
    flags = parser.parse_args(arguments)
    folder = pathlib.Path(flags.output)
    path = folder / "layout.json"
    data = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"programs": {}}
    pieces = [(name, section) for section in flags.sections.split(",") if section for name in _names(section, flags)]
    failed = False
    for name, section in tqdm(pieces, unit=" pieces"):
        known = data["programs"].setdefault(name, {})
        try:
            known[section] = SECTIONS[section](name, known, flags)
        except PaseError as error:
            print(f"error: {name}, {section}: {error}", file=sys.stderr)
            failed = True
            continue
        if section == "survey":  # its pieces say where they were answered
            data["survey"] = {**data.get("survey", {}), "known": len(_known(section))}
        else:
            known.setdefault("where", {})[section] = _here()
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(data, indent=1) + "\n")
    if data["programs"]:
        write_atomically(folder / "layout.md", document(data))
        plot(data, str(folder / "layout.svg"))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
