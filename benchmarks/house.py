"""The shape of the code, beside that of an earlier commit: modules, lengths, circles, types, and pinned numbers.

    python -m benchmarks.house            # docs/benchmarks/house.json and house.md
    python -m benchmarks.house --gate     # times `make test` of this commit in a clone as well: nothing else may run

Every commit is read from git, not from the working tree.
"""

from __future__ import annotations

import argparse
import ast
import collections
import io
import itertools
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import markdown
from benchmarks.commands import told_in_one_line
from benchmarks.facts import facts, facts_text
from benchmarks.search import FOLDER
from benchmarks.search_networks import ROOT
from pase_mtf.errors import UsageError
from pase_mtf.files import write_atomically

__all__ = ["BEFORE", "document", "main", "moved", "shape"]

# The last commit of flat modules, and what its gate took then (two cores, measured by hand on several days).
BEFORE = "f7adc6b"
_BEFORE_GATE = "15 to 20"

# Prices: the last commit with a roofline of hand-made corrections, the one that took them out, and where they were.
_PRICES = ("1b9361b", "85a13ff")
_PRICED = ("machine", "calibration", "cost")

# Where code lies in the repository, and the packages that setup.py makes of it.
_FOLDERS = {"pase_mtf": "pase_mtf", "models": "pase_mtf/models", "launch": "pase_mtf/launch",
            "configs": "pase_mtf/configs"}
_PINNED = "tests/data/pinned.json"
_FIRST_PINNED = "544ce94"

# Run in a process of its own, whose path begins with the commit's own packages.
_CIRCLES = """
import json, grimp, numpy, scipy.sparse.csgraph
graph = grimp.build_graph("pase_mtf", exclude_type_checking_imports=True, cache_dir=None)
names = sorted(graph.modules)
pairs = [(names.index(a), names.index(b)) for a in names for b in graph.find_modules_directly_imported_by(a)]
matrix = scipy.sparse.coo_matrix((numpy.ones(len(pairs)), tuple(zip(*pairs))), (len(names), len(names)))
count, part = scipy.sparse.csgraph.connected_components(matrix, connection="strong")
print(json.dumps([[names[i] for i in numpy.flatnonzero(part == k)] for k in range(count) if sum(part == k) > 1]))
"""

# FLOPs of a transposed convolution and its gradient, and the bytes of a float32 variable that is read as bfloat16: what
# two defects got wrong, in words that both commits understand.
_DEFECTS = """
import json, sys
sys.path.insert(0, sys.argv[1])
import pase_mtf
from pase_mtf.compat import mtf, tf
def dims(**sizes):
    return [mtf.Dimension(name, size) for name, size in sizes.items()]
found = {}
with tf.Graph().as_default():
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    x = mtf.import_tf_tensor(mesh, tf.zeros([8, 16, 16, 4]), dims(batch=8, rows=16, columns=16, inputs=4))
    w = mtf.get_variable(mesh, "w", dims(kh=4, kw=4, outputs=6, inputs=4))
    y = mtf.Conv2dTransposeOperation(x, w, (1, 2, 2, 1), "SAME").outputs[0]
    mtf.gradients([mtf.reduce_sum(y)], [w])
    found["flops"] = max(sum(operation.flops for operation in layer.operations)
                         for layer in pase_mtf.export_graph(graph).layers)
with tf.Graph().as_default():
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    batch, inner, outer = dims(batch=8, inner=64, outer=32)
    x = mtf.import_tf_tensor(mesh, tf.zeros([8, 64], tf.bfloat16), [batch, inner])
    w = mtf.get_variable(mesh, "w", [inner, outer], dtype=mtf.VariableDType(tf.float32, tf.float32, tf.bfloat16))
    mtf.gradients([mtf.reduce_sum(mtf.einsum([x, w], [batch, outer]))], [w])
    strategy = pase_mtf.find_strategy(pase_mtf.export_graph(graph), devices=1, machine="1080ti")
    found["bytes"] = strategy.memory["weights"]
print(json.dumps(found))
"""

# What tests/pinned.py pins, by the modules of flat commits.
_NUMBERS = """
import json, sys
sys.path.insert(0, sys.argv[1])
from pase_mtf import Machine, export_graph, find_strategy, models
from pase_mtf.compat import tf
from pase_mtf.launch.program import build_program
found = {}
for model in models.names():
    with tf.Graph().as_default():
        program = build_program(
            models.get(model), models.load_config(model, "tiny"),
            16 if model in ("transformer", "gnmt", "rnnlm", "biglstm") else 64,
            "adam" if model in ("transformer", "gnmt") else "sgd", 0.01, seed=3)
        graph = export_graph(program.graph, name=model)
    found[model] = {"hash": graph.hash, "layers": len(graph.layers), "edges": len(graph.edges), "FLOP": graph.flops,
                    "parameters": graph.parameters}
    for machine in map(Machine.load, ("1080ti", "h100")):
        for devices in (4, 8):
            for method in ("exact", "data_parallel", "expert"):
                found[model][f"{method} on {devices} of {machine.name}, seconds"] = find_strategy(
                    graph, devices=devices, machine=machine, method=method).seconds
print(json.dumps(found))
"""


def shape(commit: str) -> dict[str, Any]:
    """What the packages look like at a commit.

    Args:
      commit: any name of git's for it.

    Returns:
      "modules" and "packages" of pase_mtf/, "files" and "lines" of all folders; "longest file" and "longest function"
      as [lines, where]; "longest code" and "over 60", the longest function without its docstring and how many have more
      lines of code; "any", lines with the type `Any`; "circles", the modules of every circle of imports.

    Raises:
      UsageError: git knows no such commit.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        _unpack(commit, folder)
        files = {str(file.relative_to(folder)): file.read_text(encoding="utf-8")
                 for file in sorted(folder.rglob("*.py"))}
        of_package = [file for file in files if not file.startswith(tuple(list(_FOLDERS.values())[1:]))]
        functions = [(node, f"{file}: {node.name}") for file, text in files.items() for node in _functions(text)]
        return {
            "modules": len([file for file in of_package if file.count("/") == 1]),
            "packages": len([file for file in of_package if file.count("/") == 2 and file.endswith("__init__.py")]),
            "files": len(files),
            "lines": sum(len(text.splitlines()) for text in files.values()),
            "longest file": list(max((len(text.splitlines()), file) for file, text in files.items())),
            "longest function": list(max((_lines(node), where) for node, where in functions)),
            "longest code": list(max((_lines_of_code(node), where) for node, where in functions)),
            "over 60": sum(_lines_of_code(node) > 60 for node, _ in functions),
            "any": sum(len(_any_lines(text)) for text in files.values()),
            "circles": _circles(folder),
        }


def prices(commit: str) -> list[tuple[int, int]]:
    """Lines of Python of machine, calibration and cost model at a commit, each with those of its tests."""
    def lines(folder: str) -> int:
        with tarfile.open(fileobj=io.BytesIO(_git("archive", commit, folder))) as archive:
            return sum(len(file.read().splitlines()) for entry in archive if entry.name.endswith(".py")
                       and (file := archive.extractfile(entry)))
    return [(lines(f"pase_mtf/{name}"), lines(f"tests/{name}")) for name in _PRICED]


def _git(*words: str) -> bytes:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, check=False)
    if done.returncode:
        raise UsageError(f"git {' '.join(words)}: {done.stderr.decode().strip().splitlines()[-1]}")
    return done.stdout


def _unpack(commit: str, folder: pathlib.Path) -> None:
    """The packages of a commit, as setup.py installs them."""
    for source, target in _FOLDERS.items():
        with tarfile.open(fileobj=io.BytesIO(_git("archive", f"{commit}:{source}"))) as archive:
            archive.extractall(folder / target, filter="data")


def computed(commit: str, program: str) -> dict[str, Any]:
    """What a program prints in JSON that is run with the packages of a commit, which compile their kernels anew.

    Raises:
      UsageError: git knows no such commit, or the program ends otherwise than well.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        _unpack(commit, folder)
        done = subprocess.run([sys.executable, "-c", program, name], cwd=folder, capture_output=True, text=True,
                              check=False, env={**os.environ, "NUMBA_CACHE_DIR": str(folder / "kernels"),
                                                "TF_CPP_MIN_LOG_LEVEL": "3"})
        if done.returncode:
            raise UsageError(f"{commit}: {done.stderr.strip().splitlines()[-1]}; take a commit of flat modules")
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found


def same_numbers(commit: str) -> list[int]:
    """How many of the numbers that were pinned first a commit of flat modules computes as they were pinned (to twelve
    digits), of how many."""
    mine = computed(commit, _NUMBERS)
    first = _pinned(_FIRST_PINNED)
    return [sum(math.isclose(mine[model][name], value, rel_tol=1e-12) if isinstance(value, float)
                else mine[model][name] == value for (model, name), value in first.items()), len(first)]


def _functions(text: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def _lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _lines_of_code(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return _lines(function) - (_lines(function.body[0]) if ast.get_docstring(function, clean=False) else 0)


def _any_lines(text: str) -> set[int]:
    return {node.lineno for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name) and node.id == "Any"}


def _circles(folder: pathlib.Path) -> list[list[str]]:
    done = subprocess.run([sys.executable, "-c", _CIRCLES], cwd=folder, capture_output=True, text=True, check=True,
                          env={**os.environ, "PYTHONPATH": str(folder)})
    found: list[list[str]] = json.loads(done.stdout)
    return found


def moved() -> list[dict[str, Any]]:
    """The commits after which pinned numbers are others, the latest first.

    Returns:
      Of each "commit" and "subject"; "changed", how many "of" all numbers; "least" and "most", new over old of those
      that are seconds or FLOPs (0 where none is).
    """
    found = []
    versions = _git("log", "--format=%h %s", "--", _PINNED).decode().splitlines()
    for line, earlier in itertools.pairwise(versions):
        commit, subject = line.split(" ", 1)
        new, old = (_pinned(each) for each in (commit, earlier.split()[0]))
        both = [key for key in new if key in old]
        changed = [key for key in both if new[key] != old[key]]
        ratios = [new[key] / old[key] for key in changed if isinstance(new[key], float)]
        found.append({"commit": commit, "subject": subject, "of": len(both), "changed": len(changed),
                      "least": min(ratios, default=0.0), "most": max(ratios, default=0.0)})
    return found


def _pinned(commit: str) -> dict[tuple[str, str], Any]:
    models = json.loads(_git("show", f"{commit}:{_PINNED}"))
    return {(model, name): value for model, values in models.items() for name, value in values.items()}


def _gate() -> dict[str, Any]:
    """Minutes that `make test` takes in a new clone, and what pytest says of it; its environment is not counted."""
    with tempfile.TemporaryDirectory() as name:
        clone = pathlib.Path(name, "clone")
        _git("clone", "--quiet", str(ROOT), str(clone))
        subprocess.run(["make", "environment"], cwd=clone, check=True, stdout=sys.stderr)
        start = time.monotonic()
        done = subprocess.run(["make", "test"], cwd=clone, capture_output=True, text=True, check=False)
        said = next((line for line in reversed(done.stdout.splitlines()) if re.search(r"\d passed", line)), "")
        if done.returncode:
            failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
            raise UsageError("; ".join([f"make test failed in a clone: {said}", *failed]))
        return {"minutes": (time.monotonic() - start) / 60, "said": said, "load": os.getloadavg()[2]}


def document(results: Mapping[str, Any]) -> str:
    """The page of the results."""
    before, after, here = results["before"], results["after"], results["facts"]
    gate, same, defects = results.get("gate"), results["same"], results["defects"]
    rows: list[tuple[str, object, object]] = [
        ("modules directly in pase_mtf/", before["modules"], after["modules"]),
        ("packages in pase_mtf/", before["packages"], after["packages"]),
        ("files, with models/ and launch/", before["files"], after["files"]),
        ("lines", f"{before['lines']:,}", f"{after['lines']:,}"),
        ("longest file", *(_longest(each["longest file"]) for each in (before, after))),
        ("longest function", *(_longest(each["longest function"]) for each in (before, after))),
        ("longest function without its docstring", *(_longest(each["longest code"]) for each in (before, after))),
        ("functions of more than 60 such lines", before["over 60"], after["over 60"]),
        ("circles of imports (modules in them)", *(_told(each["circles"]) for each in (before, after))),
        ("lines with the type `Any`", before["any"], after["any"]),
        ("the gate, minutes on two cores", _BEFORE_GATE,
         f"{gate['minutes']:.1f} ({gate['commit']})" if gate else "not timed")]
    pinned = [(row["commit"], row["subject"], f"{row['changed']} of {row['of']}",
               f"{row['least']:.3f} to {row['most']:.3f}") for row in results["moved"]]
    return "\n".join([
        "# The shape of the code", "",
        "Before it was put into packages that follow the data, and now.", "",
        markdown.table(["", results["names"][0], results["names"][1]], rows, left=(0,)), "",
        "Lengths are lines, with comments. A circle is a largest set of modules each of which imports all others, "
        "directly or not; imports for types alone do not count, imports within functions do. The gate is `make test` "
        "in a new clone whose environment is there" + (f" ({_told_of(gate)})" if gate else "") + ".", "",
        "## Prices", "",
        f"Lines of {', '.join(_PRICED)}, and of their tests: with a roofline that ten corrections of one processor's "
        "kernels were fitted to, without them once kernels are measured, and now.", "",
        markdown.table(["", *results["prices"]], [
            (name, *(f"{each[number][0]:,} + {each[number][1]:,}" for each in results["prices"].values()))
            for number, name in enumerate(_PRICED)] + [
                ("together", *(f"{sum(map(sum, each)):,}" for each in results["prices"].values()))]), "",
        "## Pinned numbers", "",
        f"`{_PINNED}` pins graph hashes, layers, edges, FLOPs, parameters and predicted seconds of eight models; "
        f"`tests/test_pinned.py` compares. Of the {same[1]} that were pinned first, once the packages were there, "
        f"{results['names'][0]}, which has none, computes {same[0]} alike. Commits that changed some since, on "
        "purpose, each with the old and the new value in its diff:", "",
        markdown.table(["commit", "what it does", "changed", "new / old"], pinned, left=(0, 1)), "",
        "Two defects were mended on the way that none of them shows:", "",
        markdown.table(["", *results["names"]], [
            ("FLOPs of a transposed convolution of stride 2 and its gradient", *(f"{each['flops']:,.0f}"
                                                                                 for each in defects)),
            ("bytes of 64 x 32 float32 weights that are read as bfloat16", *(f"{each['bytes']:,.0f}"
                                                                            for each in defects))]), "",
        f"{here['machine']}; {here['versions']}. Reproduce with `python -m benchmarks.house`, the gate's minutes with "
        "`--gate`.", ""])


def _told_of(gate: Mapping[str, Any]) -> str:
    """What pytest said, and where, as far as that was kept."""
    where = facts_text([gate["facts"]]) if "facts" in gate else ""
    return "; ".join(filter(None, (gate["said"].strip("= "), where)))


def _longest(found: Sequence[Any]) -> str:
    return f"{found[0]} ({str(found[1]).removeprefix('pase_mtf/')})"


def _told(circles: Sequence[Sequence[str]]) -> str:
    sizes = collections.Counter(map(len, circles))
    return f"{len(circles)} ({', '.join(str(size) for size in sorted(sizes.elements()))})" if circles else "0"


@told_in_one_line(OSError, ValueError)
def main(arguments: Sequence[str] | None = None) -> int:
    """Reads both commits and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", default=BEFORE, help="commit to compare with (default: %(default)s)")
    parser.add_argument("--gate", action="store_true", help="time `make test` in a clone, too")
    parser.add_argument("--output", default=str(FOLDER), help="folder of the results")
    flags = parser.parse_args(arguments)
    stem = pathlib.Path(flags.output) / "house"
    results: dict[str, Any] = {
        "facts": facts(), "names": [_git("rev-parse", "--short", commit).decode().strip()
                                    for commit in (flags.before, "HEAD")],
        "before": shape(flags.before), "after": shape("HEAD"), "moved": moved(),
        "same": same_numbers(flags.before),
        "prices": {_git("rev-parse", "--short", commit).decode().strip(): prices(commit)
                   for commit in (*_PRICES, "HEAD")},
        "defects": [computed(commit, _DEFECTS) for commit in (flags.before, "HEAD")]}
    if flags.gate:
        results["gate"] = {"commit": results["names"][1], "facts": results["facts"], **_gate()}
    elif stem.with_suffix(".json").exists():
        kept = json.loads(stem.with_suffix(".json").read_text(encoding="utf-8"))
        results["gate"] = kept.get("gate") and {"commit": kept["names"][1], **kept["gate"]}
    stem.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(stem.with_suffix(".json"), json.dumps(results, indent=1) + "\n")
    write_atomically(stem.with_suffix(".md"), document(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
