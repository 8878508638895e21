"""The searches measured: against their limits, and side by side with the paper's, FlexFlow's, HiGHS and toulbar2.

    python -m benchmarks.search                                       # about an hour and a half on two cores
    python -m benchmarks.search --sections=instances,scale,dense      # minutes
    python -m benchmarks.search --sections=rivals --budget=100 --resume     # piece by piece
    python -m benchmarks.search --sections=plot                       # draws and writes what has been measured

What is measured is kept in docs/benchmarks/search.json row by row, so that sections can be measured one at a time and
interrupted; search.md and its three plots are written from it at the end of every run.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from benchmarks.commands import told_in_one_line
from benchmarks.facts import facts
from benchmarks.search_document import document
from benchmarks.search_networks import ROOT, Workshop
from benchmarks.search_plot import plot_mcmc, plot_memory, plot_times
from benchmarks.search_sections import METHODS, SECTIONS, Options, warm_up
from pase_mtf.errors import FormatError, UsageError, nearest
from pase_mtf.files import read_json, write_atomically

__all__ = ["load", "main", "save"]

FOLDER = ROOT / "docs" / "benchmarks"
FORMAT = "pase_mtf.search_benchmark"
VERSION = 1
_AGAIN = "again"
"""Stands in a row that is to be measured again, and was not yet: `--resume` goes on there."""

Results = dict[str, dict[str, dict[str, Any]]]


def load(path: pathlib.Path) -> Results:
    """Section -> row -> what was measured; nothing where there is no file yet.

    Raises:
      FormatError: the file is something else.
    """
    if not path.exists():
        return {}
    data = read_json(path, FORMAT, VERSION)
    sections = data.get("sections")
    if not isinstance(sections, dict):
        raise FormatError(f"{path}: holds no sections; delete it and measure again")
    # Of earlier versions, which had one start for all rows, wherever they were measured.
    if start := sections.get("instances", {}).pop("start", None):
        for row in sections["instances"].values():
            row.setdefault("start_seconds", start["process_seconds"])
    return sections


def save(results: Results, path: pathlib.Path) -> None:
    """Writes what `load` reads, a line per row."""
    sections = []
    for name, rows in results.items():
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in rows.items())
        sections.append(f" {json.dumps(name)}: {{\n{lines}\n }}")
    write_atomically(path, f'{{"format": "{FORMAT}", "version": {VERSION}, "sections": {{\n'
                     + ",\n".join(sections) + "\n}}\n")


def _measure(names: Sequence[str], options: Options, results: Results, path: pathlib.Path, *, resume: bool,
             budget: float) -> bool:
    """Measures sections row by row and keeps every row at once, in the place of the one that was measured before, which
    stands until then. Returns whether all of it was measured."""
    if not names:
        return True
    here, end = facts(), time.monotonic() + budget
    wanted = {name: SECTIONS[name](options) for name in names}
    for name, rows in wanted.items():
        for key, _ in rows if not resume else ():
            if key in results.get(name, {}):
                results[name][key][_AGAIN] = True
    save(results, path)
    warm_up()
    for name, rows in wanted.items():
        kept = results.setdefault(name, {})
        todo = [row for row in rows if row[0] not in kept or _AGAIN in kept[row[0]]]
        with tqdm(todo, desc=name, unit="row", file=sys.stderr) as bar:
            for done, (key, run) in enumerate(bar, 1):
                if time.monotonic() > end:
                    return False
                bar.set_postfix_str(key)
                kept[key] = {**run(), "facts": here}
                if name != "variations" or done % 20 == 0:
                    save(results, path)
        # In the order of the section, whatever order they were measured in.
        order = {key: place for place, (key, _) in enumerate(rows)}
        results[name] = dict(sorted(kept.items(), key=lambda row: order.get(row[0], len(order))))
        save(results, path)
    return True


@told_in_one_line(RuntimeError, OSError)
def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes; returns 1 where a result contradicts another, 2 where a flag makes no sense."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", default=",".join(SECTIONS), help="of these, and plot (default: %(default)s)")
    parser.add_argument("--methods", default=",".join(METHODS), help="of the comparison (default: %(default)s)")
    parser.add_argument("--networks", default="", help="only those whose names hold one of these words")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each solver (default: %(default)s)")
    parser.add_argument("--mcmc-limit", type=float, default=10.0, help="of mcmc (default: %(default)s)")
    parser.add_argument("--sweep-limit", type=float, default=10.0,
                        help="for each memory limit (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="of what is timed whole (default: %(default)s)")
    parser.add_argument("--variations", type=int, default=500, help="how many (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=float("inf"), help="begin nothing after so many seconds")
    parser.add_argument("--resume", action="store_true", help="leave rows as they are that have been measured, but for "
                        "those that a run without it was to measure again, and did not come to")
    parser.add_argument("--output", default=str(FOLDER), help="folder of the results")
    parser.add_argument("--work", default=str(ROOT / "build" / "search"), help="folder of the graphs and networks")
    parser.add_argument("--note", default="", help="to be said on the page, such as what else ran on the machine")
    flags = parser.parse_args(arguments)
    output = pathlib.Path(flags.output)
    sections = [name for name in flags.sections.split(",") if name and name != "plot"]
    for name in sections:
        if name not in SECTIONS:
            raise UsageError(f"--sections={flags.sections}: unknown section {name!r}; "
                             f"{nearest(name, [*SECTIONS, 'plot'])}")
    methods = [method for method in flags.methods.split(",") if method]
    for method in methods:
        if method not in METHODS:
            raise UsageError(f"--methods={flags.methods}: unknown method {method!r}; {nearest(method, METHODS)}")
    options = Options(Workshop(flags.work), flags.limit, flags.mcmc_limit, flags.sweep_limit,
                      max(1, flags.repeats), flags.variations, methods,
                      [word for word in flags.networks.split(",") if word])
    output.mkdir(parents=True, exist_ok=True)
    results = load(output / "search.json")
    complete = _measure(sections, options, results, output / "search.json", resume=flags.resume,
                        budget=flags.budget)
    if not complete:
        save(results, output / "search.json")
        print("not everything was measured within the budget; go on with --resume", file=sys.stderr)
    if flags.note:
        results.setdefault("facts", {}).setdefault("all", {})["note"] = flags.note
        save(results, output / "search.json")
    text = document(results)
    write_atomically(output / "search.md", text)
    plot_times(results, output / "search.svg")
    plot_mcmc(results, output / "search-mcmc.svg")
    plot_memory(results, output / "search-memory.svg")
    return int("WRONG" in text)


if __name__ == "__main__":
    sys.exit(main())
