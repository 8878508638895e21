"""The default search beside other exact solvers, in seconds of the processor, and held to its time and memory.

    python -m benchmarks.search_solvers                 # half an hour, and hours for the models; writes solvers.md
    python -m benchmarks.search_solvers --networks=instances --again    # rows that are there, too
    python -m benchmarks.search_solvers --networks=models --models=alexnet,gnmt --devices=12,1000 --budget=600

Every solver has one thread and a process of its own; all of them run one after another. What is measured is written
row by row, numbers to solvers.json: a run that was ended goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm

from benchmarks import markdown
from benchmarks.commands import told_in_one_line
from benchmarks.facts import facts, facts_text, of_rows
from benchmarks.search import FOLDER
from benchmarks.search_budget import NETWORKS
from benchmarks.search_devices import DEVICES
from benchmarks.search_document import seconds_text
from benchmarks.search_networks import INSTANCES, ROOT, Workshop, shuffled
from benchmarks.search_random import random_network
from pase_mtf import models
from pase_mtf.errors import UsageError
from pase_mtf.files import write_atomically
from pase_mtf.search.network import CostNetwork

__all__ = ["RANDOM", "SOLVERS", "document", "main"]

MODELS = "models"
"""The kind of networks that are those of all models on all of `search_devices.DEVICES`."""
_KINDS = ("instances", "random", "budgets", MODELS)
_PRESET, _MACHINE = "big", "h100"
SOLVERS = ("exact", "toulbar2", "cpsat", "milp")
RANDOM = (
    ("ladder", "structured", 200, 20), ("ladder", "noise", 200, 12), ("ladder", "integer", 60, 30),
    ("grid", "structured", 64, 15), ("grid", "noise", 49, 8), ("grid", "integer", 64, 8),
    ("sparse", "structured", 60, 12), ("sparse", "noise", 40, 8), ("sparse", "close", 40, 8),
    ("dense", "structured", 20, 12), ("dense", "noise", 14, 6), ("dense", "integer", 12, 8), ("dense", "close", 12, 8))
"""(shape, costs, layers, configurations) of random networks; seed 7, which nothing else uses."""
_SEED = 7

Rows = dict[str, dict[str, Any]]


def _run(arguments: Sequence[str], timeout: float) -> dict[str, Any]:
    """What a module of ours prints, run in a process of its own."""
    try:
        done = subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, check=False, cwd=ROOT,
                              timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {timeout:.0f} s"}
    lines = done.stdout.strip().splitlines()
    return json.loads(lines[-1]) if lines else {"error": (done.stderr.strip().splitlines() or ["no output"])[-1]}


def networks(folder: pathlib.Path, kinds: Sequence[str]) -> dict[str, pathlib.Path]:
    """The files of all networks of some kinds (instances, random); those that are made lie in the folder."""
    found = {}
    if "instances" in kinds:
        found |= {path.stem: path for path in sorted(INSTANCES.glob("*.npz"))}
        found["inception3_8 shuffled"] = folder / "shuffled.npz"
        shuffled(CostNetwork.load(INSTANCES / "inception3_8.npz")).save(found["inception3_8 shuffled"])
    if "random" in kinds:
        for shape, costs, layers, configurations in RANDOM:
            name = f"{shape}, {costs}, {layers} x {configurations}"
            found[name] = folder / f"{name.replace(', ', '-')}.npz"
            random_network(shape, costs, layers, configurations, _SEED).save(found[name])
    return found


def _solved(path: str | pathlib.Path, limit: float, here: Any) -> dict[str, Any]:
    """What all solvers make of a network."""
    return {"facts": here} | {solver: _run(
        ["benchmarks.solvers", solver, str(path), f"--limit={limit}", *(["--check"] if solver == "exact" else [])],
        6 * limit + 120) for solver in SOLVERS}


def _seconds(outcome: dict[str, Any]) -> float:
    """CPU seconds: of ours all of the search with compiled code loaded, of the others the solver alone."""
    return outcome.get("warm_cpu_seconds", outcome.get("solver_cpu_seconds", outcome.get("cpu_seconds", 0.0)))


def _whole_seconds(outcome: dict[str, Any]) -> float:
    """CPU seconds from the network in memory to the proof, the building of the solver's model included."""
    return outcome.get("warm_cpu_seconds", outcome.get("cpu_seconds", 0.0))


def _missing(outcomes: dict[str, dict[str, Any]]) -> list[str]:
    """The solvers that were not there."""
    return [solver for solver in SOLVERS if "not installed" in outcomes.get(solver, {}).get("error", "")]


def _is_first(outcomes: dict[str, dict[str, Any]], seconds: Callable[[dict[str, Any]], float], limit: float) -> bool:
    """Whether ours is the first to prove the optimum, which nobody knows where a solver was not there."""
    if _missing(outcomes):
        return False
    others = [seconds(outcomes[solver]) for solver in SOLVERS[1:] if outcomes.get(solver, {}).get("optimal")]
    return bool(outcomes["exact"].get("optimal")) and seconds(outcomes["exact"]) <= min(others, default=limit)


def _cell(outcome: dict[str, Any], best: float) -> str:
    if "error" in outcome:
        return outcome["error"]
    if outcome["optimal"]:
        return seconds_text(_seconds(outcome))
    return f"not proven, {outcome['cost'] / best - 1:+.2%}" if outcome["cost"] < float("inf") else "nothing found"


def _table(rows: Rows, limit: float) -> tuple[str, str]:
    """A table of networks, and a sentence on how often ours is the first."""
    lines, ahead, ahead_whole, compared = [], 0, 0, 0
    for name, measured in rows.items():
        outcomes = {solver: outcome for solver, outcome in measured.items() if solver in SOLVERS}
        compared += not _missing(outcomes)
        best = min(outcome.get("cost", float("inf")) for outcome in outcomes.values())
        first, whole = (_is_first(outcomes, seconds, limit) for seconds in (_seconds, _whole_seconds))
        ahead, ahead_whole = ahead + first, ahead_whole + whole
        checked = [seconds_text(outcomes["exact"][which]) if which in outcomes["exact"] else ""
                   for which in ("certified_cpu_seconds", "check_cpu_seconds")]
        lines.append([name, *(_cell(outcomes[solver], best) for solver in SOLVERS),
                      *("-" if _missing(outcomes) else "yes" if won else "no" for won in (first, whole)), *checked])
    short = sum(not _missing(measured) and any("error" in measured.get(solver, {}) for solver in SOLVERS[1:])
                for measured in rows.values())
    told = "not all solvers were there on any" if not compared else (
        f"`exact` proves first on {ahead} of {compared}"
        + (f" (on {len(lines) - compared} others not all solvers were there)" if compared < len(lines) else "")
        + f"; where the others' models are counted too, from the network in memory to the proof, on {ahead_whole}"
        # A network that is too large for a solver is no race that it has lost.
        + f"; on {short} of these a solver was not given its network, or failed (its column says why)" * bool(short))
    return markdown.table(["network", *SOLVERS, "`exact` first", "models counted", "certified", "checked"], lines,
                          left=(0, 5, 6)), told


def document(results: dict[str, Any]) -> str:
    """The page."""
    limit, earlier, of_models = results["limit"], results.get("facts"), results.get(MODELS, {})
    everything = [*results["solvers"].values(), *of_models.values(), *results["budgets"]]
    parts = [f"# Solvers side by side\n\n{facts_text(of_rows(everything, earlier))}. Reproduce with "
             "`python -m benchmarks.search_solvers` (`pip install '.[cpu,launch,benchmark,toulbar2,auto_mtf]'` first)."]
    if results["solvers"]:
        table, told = _table(results["solvers"], limit)
        parts.append(
             f"Seconds of the processor, one thread each, at most {limit:g} s and 12 GB. Models of more than 10 "
             "million variables, or 500 million table entries, are not given to a solver. Of `exact` they are all of "
             "the search, normal form included, with its compiled code loaded; of the others the solver alone, once it "
             "holds its model. Random networks: layers x configurations, seed 7 of `benchmarks/search_random.py`. "
             f"So {told}. Up to commit 22a8fde8 their libraries were loaded within what is counted so, too: 8 ms of "
             "toulbar2, 100 to 150 of the others. The last columns: `exact` with a certificate, and "
             f"`check_certificate` of that.\n\n{table}")
    if of_models:
        table, told = _table(of_models, limit)
        wanted = len(models.names()) * len(DEVICES)
        parts.append(
            f"## All models\n\nThe launcher's models (preset {_PRESET}) on {', '.join(map(str, DEVICES))} devices of "
            f"`{_MACHINE}`, by the same rules: {len(of_models)} of {wanted} networks were measured; of these "
            f"{told}.\n\n{table}")
    budgets = [[row["name"], f"{row['limit']:g}", f"{row['cpu_seconds']:.2f}", f"{row['network_bytes'] / 1e6:.0f}",
                f"{row['search_bytes'] / 1e6:.0f}",
                "proven" if row["optimal"] else f"{row['gap']:.2%}" if row["gap"] < 1e9 else "no bound"]
               if "error" not in row else [row["name"], "", row["error"], "", "", ""]
               for row in results["budgets"]]
    if budgets:
        over = max((row["cpu_seconds"] - row["limit"] for row in results["budgets"] if "error" not in row), default=0)
        parts.append("## Time and memory\n\n`exact` on random networks, from none to far too large for it, by a clock "
                     "that counts the processor's seconds. Memory is by how much the most that the process ever held "
                     "grew in the search: 0 where making the network had taken as much before. The latest end: "
                     f"{max(over, 0):.2f} s after the limit.\n\n"
                     + markdown.table(["network", "limit, s", "took, s", "network, MB", "search, MB", "gap"], budgets,
                                      left=(0, 5)))
    return "\n\n".join(parts) + "\n"


def _read(path: pathlib.Path) -> dict[str, Any]:
    """What has been measured, every row with where that was."""
    if not path.exists():
        return {"limit": None, "solvers": {}, MODELS: {}, "budgets": []}
    results = {MODELS: {}, **json.loads(path.read_text(encoding="utf-8"))}
    earlier = results.pop("facts", None)
    for row in [*results["solvers"].values(), *results["budgets"]]:
        row.setdefault("facts", earlier)
    return results


@told_in_one_line(OSError)
def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes; returns 2 where a flag makes no sense."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=float, default=20.0, help="seconds for each solver (default: %(default)s)")
    parser.add_argument("--networks", default=",".join(_KINDS), help="of these (default: %(default)s)")
    parser.add_argument("--models", default=",".join(models.names()), help="of the models (default: %(default)s)")
    parser.add_argument("--devices", default=",".join(map(str, DEVICES)), help="of the models (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=float("inf"), help="begin nothing after so many seconds")
    parser.add_argument("--again", action="store_true", help="rows that are there, too")
    parser.add_argument("--output", default=str(FOLDER), help="folder of the results")
    flags = parser.parse_args(arguments)
    output = pathlib.Path(flags.output)
    here, path = facts("ortools"), output / "solvers.json"
    results = _read(path)
    if results["limit"] not in (None, flags.limit):
        raise UsageError(f"--limit={flags.limit:g}: the rows of {path} are of {results['limit']:g} s; name another "
                         "--output")
    results["limit"] = flags.limit
    kinds, chosen, end = flags.networks.split(","), flags.models.split(","), time.monotonic() + flags.budget
    for flag, words, known in (("networks", kinds, _KINDS), ("models", chosen, models.names()),
                               ("devices", flags.devices.split(","), [*map(str, DEVICES)])):
        for word in words:
            if word not in known:
                raise UsageError(f"--{flag}={getattr(flags, flag)}: {word!r} is not among {', '.join(known)}")
    wanted = [int(word) for word in flags.devices.split(",")]
    output.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        write_atomically(output / "solvers.json", json.dumps(results, indent=1) + "\n")
        write_atomically(output / "solvers.md", document(results))
    with tempfile.TemporaryDirectory(prefix="pase_mtf-solvers-") as folder:
        for name, path in tqdm(networks(pathlib.Path(folder), kinds).items(), file=sys.stderr):
            if time.monotonic() > end or (name in results["solvers"] and not flags.again):
                continue
            results["solvers"][name] = _solved(path, flags.limit, here)
            save()
    for shape, costs, layers, configurations, distinct, limit in tqdm(NETWORKS if "budgets" in kinds else (),
                                                                      file=sys.stderr):
        shared = "" if distinct is None else f", {distinct} matrices"
        name = f"{shape}, {costs}, {layers} x {configurations}{shared}"
        known = next((row for row in results["budgets"] if row["name"] == name), None)
        if time.monotonic() > end or (known is not None and not flags.again):
            continue
        extra = [] if distinct is None else [f"--distinct={distinct}"]
        row = _run(["benchmarks.search_budget", shape, costs, str(layers), str(configurations), f"--limit={limit}",
                    *extra], 20 * limit + 120)
        row = {"name": name, "facts": here, **row}
        if known is None:
            results["budgets"].append(row)
        else:
            results["budgets"][results["budgets"].index(known)] = row
        save()
    workshop = Workshop(ROOT / "build" / "search")
    asked = [(name, devices) for devices in wanted for name in chosen] if MODELS in kinds else []
    for name, devices in tqdm(asked, file=sys.stderr):
        key = f"{name}, p = {devices}"
        if time.monotonic() > end or (key in results[MODELS] and not flags.again):
            continue
        results[MODELS][key] = _solved(workshop.model_network(name, _PRESET, _MACHINE, devices), flags.limit, here)
        order = [f"{one}, p = {number}" for one in models.names() for number in DEVICES]
        results[MODELS] = dict(sorted(results[MODELS].items(), key=lambda row: order.index(row[0])))
        save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
