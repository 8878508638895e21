"""One search on one cost network, in a process of its own, so that its time and peak memory are its own.

    python -m benchmarks.solvers exact FILE.npz --limit=60 --check
    python -m benchmarks.solvers mcmc FILE.npz --limit=10 --start=2

Prints one JSON object. Besides the searches of the library: `milp` (HiGHS through scipy.optimize.milp) and `toulbar2`
(pytoulbar2, where it is installed).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import math
import resource
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import benchmarks.breadth_first  # noqa: F401  (registers itself)
from benchmarks.search_networks import starts_file
from benchmarks.search_process import peak_bytes
from pase_mtf.errors import PaseError
from pase_mtf.search import check_certificate, solve
from pase_mtf.search.network import CostNetwork, NetworkEdge

__all__ = ["SOLVERS", "main", "starts"]

_MOST_BYTES = 12 << 30
# HiGHS takes some 2.4 kB for every variable, toulbar2 some 20 bytes for every table entry: more would not fit in that.
_MOST_VARIABLES = 10_000_000
_MOST_ENTRIES = 500_000_000


def milp(network: CostNetwork, limit: float) -> dict[str, Any]:
    """Alpa's formulation: a one-hot variable per layer and per edge, tied by linear equations. The edges' are over
    classes, which is kinder than over configurations; they are continuous, as the layers' make them integral."""
    # Here, so that the memory of the other solvers' processes is their own.
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array
    normal = network.normalized()
    wanted = sum(normal.sizes) + sum(edge.matrix.size for edge in normal.edges)
    if wanted > _MOST_VARIABLES:
        raise MemoryError(f"refused: {wanted / 1e6:.0f} million variables")
    start = np.concatenate([[0], np.cumsum(normal.sizes)])
    costs, binary = [*normal.vectors], [np.ones(start[-1])]
    rows, columns, values, right = [], [], [], []
    equations, variables = 0, int(start[-1])

    def equation(row: np.ndarray, column: np.ndarray, value: np.ndarray | float) -> None:
        rows.append(row + equations)
        columns.append(column)
        values.append(np.broadcast_to(np.asarray(value, float), row.shape))
    for layer, size in enumerate(normal.sizes):
        equation(np.zeros(size, int), start[layer] + np.arange(size), 1.0)
        right.append(np.ones(1))
        equations += 1
    for edge in normal.edges:
        height, width = edge.matrix.shape
        place = variables + np.arange(height * width).reshape(height, width)
        for axis, (end, classes) in enumerate(((edge.source, edge.rows), (edge.target, edge.columns))):
            count = edge.matrix.shape[axis]
            equation(np.repeat(np.arange(count), edge.matrix.size // count),
                     (place if axis == 0 else place.T).ravel(), 1.0)
            equation(classes.astype(int), start[end] + np.arange(len(classes)), -1.0)
            right.append(np.zeros(count))
            equations += count
        costs.append(edge.matrix.ravel())
        binary.append(np.zeros(edge.matrix.size))
        variables += edge.matrix.size
    cost = np.concatenate(costs)
    allowed = np.isfinite(cost)
    scale = np.abs(cost[allowed]).max(initial=0.0) or 1.0  # its tolerances are absolute
    matrix = coo_array((np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))),
                       shape=(equations, variables)).tocsr()
    equal = np.concatenate(right)
    cpu = time.process_time()
    result = milp(np.where(allowed, cost, 0.0) / scale, integrality=np.concatenate(binary),
                  bounds=Bounds(0, np.where(allowed, 1.0, 0.0)), constraints=LinearConstraint(matrix, equal, equal),
                  options={"time_limit": limit, "mip_rel_gap": 0.0})
    alone = time.process_time() - cpu
    bound = result.mip_dual_bound * scale if result.mip_dual_bound is not None else -math.inf
    if result.x is None:
        return {"cost": math.inf, "lower_bound": bound, "optimal": False, "variables": variables}
    chosen = [int(np.argmax(result.x[begin:end])) for begin, end in itertools.pairwise(start)]
    return {"cost": network.cost(chosen), "lower_bound": bound, "optimal": result.status == 0, "variables": variables,
            "solver_cpu_seconds": alone}


def toulbar2(network: CostNetwork, limit: float) -> dict[str, Any]:
    """The weighted constraint solver, with a dense table per edge (it has no other kind)."""
    import pytoulbar2  # not installed everywhere
    normal = network.normalized()
    wanted = sum(len(edge.rows) * len(edge.columns) for edge in normal.edges)
    if wanted > _MOST_ENTRIES:
        raise MemoryError(f"refused: dense tables of {wanted / 1e6:.0f} million entries")
    arrays = [*normal.vectors, *(edge.matrix for edge in normal.edges)]
    whole = all(np.array_equal(array[np.isfinite(array)], np.rint(array[np.isfinite(array)])) for array in arrays)
    # It counts in integers: what is not whole is counted in parts of 1e-9 of the largest cost.
    largest = max(float(np.abs(array[np.isfinite(array)]).max(initial=0)) for array in arrays) or 1.0
    unit = 1.0 if whole else largest * 1e-9
    total = sum(float(array[np.isfinite(array)].max()) for array in arrays) / unit + 1

    def count(array: np.ndarray) -> list[float]:
        return np.rint(np.where(np.isfinite(array), array / unit, total)).ravel().tolist()
    problem = pytoulbar2.CFN(ubinit=math.ceil(total), resolution=0)
    for layer, vector in enumerate(normal.vectors):
        problem.AddVariable(f"x{layer}", range(len(vector)))
        problem.AddFunction([layer], count(vector))
    for edge in normal.edges:
        problem.AddFunction([edge.source, edge.target], count(edge.matrix[np.ix_(edge.rows, edge.columns)]))
    start, cpu = time.perf_counter(), time.process_time()
    found = problem.Solve(timeLimit=max(1, int(limit)))
    alone = time.process_time() - cpu
    in_time = time.perf_counter() - start < limit
    bound = float(problem.GetDDualBound()) * unit
    if found is None:
        return {"cost": math.inf, "lower_bound": bound, "optimal": False}
    cost = network.cost([int(choice) for choice in found[0]])
    return {"cost": cost, "lower_bound": cost if in_time else bound, "optimal": in_time,
            "solver_cpu_seconds": alone}


def cpsat(network: CostNetwork, limit: float) -> dict[str, Any]:
    """CP-SAT (OR-tools), one thread: a one-hot literal per configuration and per pair of classes, tied as for HiGHS.
    It counts in integers: what is not whole is counted in parts of 1e-9 of the largest cost."""
    from ortools.sat.python import cp_model  # not installed everywhere
    normal = network.normalized()
    wanted = sum(normal.sizes) + sum(edge.matrix.size for edge in normal.edges)
    if wanted > _MOST_VARIABLES:
        raise MemoryError(f"refused: {wanted / 1e6:.0f} million variables")
    arrays = [*normal.vectors, *(edge.matrix for edge in normal.edges)]
    whole = all(np.array_equal(array[np.isfinite(array)], np.rint(array[np.isfinite(array)])) for array in arrays)
    largest = max(float(np.abs(array[np.isfinite(array)]).max(initial=0)) for array in arrays) or 1.0
    unit = 1.0 if whole and largest < 2 ** 50 else largest * 1e-9
    model = cp_model.CpModel()
    literals: list[list[Any]] = []
    terms, weights = [], []

    def add(literal: Any, cost: float) -> None:
        if math.isfinite(cost):
            terms.append(literal)
            weights.append(round(cost / unit))
        else:
            model.add(literal == 0)
    for vector in normal.vectors:
        own = [model.new_bool_var("") for _ in vector]
        model.add_exactly_one(own)
        literals.append(own)
        for literal, cost in zip(own, vector.tolist(), strict=True):
            add(literal, cost)
    for edge in normal.edges:
        pairs = [[model.new_bool_var("") for _ in line] for line in edge.matrix]
        for lines, classes, end in ((pairs, edge.rows, edge.source),
                                    (list(zip(*pairs, strict=True)), edge.columns, edge.target)):
            for number, line in enumerate(lines):
                chosen = [literals[end][k] for k in np.flatnonzero(classes == number)]
                model.add(sum(line) == sum(chosen))
        for line, costs in zip(pairs, edge.matrix.tolist(), strict=True):
            for literal, cost in zip(line, costs, strict=True):
                add(literal, cost)
    model.minimize(cp_model.LinearExpr.weighted_sum(terms, weights))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds, solver.parameters.num_workers = limit, 1
    cpu = time.process_time()
    status = solver.solve(model)
    alone = time.process_time() - cpu
    bound = solver.best_objective_bound * unit
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return {"cost": math.inf, "lower_bound": bound, "optimal": False, "variables": wanted}
    cost = network.cost([next(k for k, literal in enumerate(own) if solver.value(literal)) for own in literals])
    return {"cost": cost, "lower_bound": bound, "optimal": status == cp_model.OPTIMAL, "variables": wanted,
            "solver_cpu_seconds": alone}


def _ours(method: str) -> Callable[[CostNetwork, float], dict[str, Any]]:
    def run(network: CostNetwork, limit: float, **options: Any) -> dict[str, Any]:
        if method == "exact":
            options["certificate"] = False
        if method in ("pase", "breadth_first"):  # which cannot stop early
            options["memory"] = _MOST_BYTES - (2 << 30)  # what else the process needs
        else:
            options["time_limit"] = limit
        solution = solve(network, method, **options)
        return {"cost": solution.cost, "lower_bound": solution.lower_bound, "optimal": solution.optimal,
                "history": [list(point) for point in solution.statistics.get("history", ())],
                "statistics": {key: value for key, value in solution.statistics.items()
                               if isinstance(value, (int, float))}}
    return run


SOLVERS: dict[str, Callable[..., dict[str, Any]]] = {
    "exact": _ours("exact"), "pase": _ours("pase"), "breadth_first": _ours("breadth_first"), "mcmc": _ours("mcmc"),
    "milp": milp, "toulbar2": toulbar2, "cpsat": cpsat}
# What these import when they are called, so that the memory of the others' processes is their own.
_LIBRARIES = {"milp": "scipy.optimize", "toulbar2": "pytoulbar2", "cpsat": "ortools.sat.python.cp_model"}
# Those whose first call loads compiled code: called again, the search alone is timed.
_COMPILED = ("exact", "pase", "breadth_first")
_REPEATS = 3


def _checked(network: CostNetwork, limit: float) -> dict[str, Any]:
    """CPU seconds of a search with its certificate, and of checking that; nothing where there is none in time."""
    for _ in range(2):  # the first loads compiled code
        cpu = time.process_time()
        solution = solve(network, time_limit=limit)
        searched = time.process_time()
        if solution.certificate is None:
            return {}
        check_certificate(network, solution)
    return {"certified_cpu_seconds": searched - cpu, "check_cpu_seconds": time.process_time() - searched}


def starts(network: CostNetwork, path: str) -> list[tuple[str, list[int]]]:
    """Two assignments for mcmc to start from: as FlexFlow, data parallelism and an expert's strategy, where they are
    known (a file beside the network); else every layer's own cheapest configuration and a random one."""
    file = starts_file(path)
    known = json.loads(file.read_text()) if file.exists() else {}
    rng = np.random.default_rng(0)
    known.setdefault("each layer's cheapest", [int(np.argmin(vector)) for vector in network.vectors])
    known.setdefault("random", [int(rng.choice(np.flatnonzero(np.isfinite(vector)))) for vector in network.vectors])
    return list(known.items())[:2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one solver and prints what came out of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("solver", choices=sorted(SOLVERS))
    parser.add_argument("file")
    parser.add_argument("--limit", type=float, default=60.0)
    parser.add_argument("--check", action="store_true", help="of exact: time its certificate as well")
    parser.add_argument("--start", type=int, choices=(1, 2), help="of mcmc: from the first or the second start")
    flags = parser.parse_args(arguments)
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    began = time.perf_counter()
    network = CostNetwork.load(flags.file)
    loaded = time.perf_counter()
    options, outcome = {}, {}
    if flags.start:
        outcome["start"], options["initial"] = starts(network, flags.file)[flags.start - 1]
    network.normalized()  # every solver's input; its compiled code is nobody's cost
    if flags.solver in _LIBRARIES:  # nor is the loading of a library: ours has its code loaded, too
        with contextlib.suppress(ImportError):  # it is told when the solver is called
            importlib.import_module(_LIBRARIES[flags.solver])
    if flags.solver == "mcmc":  # its history is told by the clock: load its compiled code before that starts
        solve(network, "mcmc", proposals=1, **options)
    if flags.solver == "exact":  # compiling counts for no time limit
        rng, every = np.random.default_rng(0), np.arange(6)
        solve(CostNetwork([rng.random(6) for _ in range(8)], [
            NetworkEdge(i, j, rng.random((6, 6)), every, every) for i, j in itertools.combinations(range(8), 2)]))
    start, cpu = time.perf_counter(), time.process_time()
    try:
        outcome |= SOLVERS[flags.solver](network, flags.limit, **options)
    except ImportError:
        outcome = {"error": "not installed"}
    except (PaseError, MemoryError) as error:
        outcome = {"error": str(error) or "out of memory"}
    finished = time.perf_counter()
    outcome |= {"load_seconds": loaded - began, "seconds": finished - start,
                "cpu_seconds": time.process_time() - cpu, "peak_bytes": peak_bytes()}
    if flags.solver in _COMPILED and "error" not in outcome and outcome["seconds"] < 10:
        times, cpu_times = [], []
        for _ in range(_REPEATS):
            start, cpu = time.perf_counter(), time.process_time()
            SOLVERS[flags.solver](network, flags.limit, **options)
            times.append(time.perf_counter() - start)
            cpu_times.append(time.process_time() - cpu)
        outcome |= {"warm_seconds": sorted(times)[_REPEATS // 2], "warm_cpu_seconds": sorted(cpu_times)[_REPEATS // 2]}
    if flags.check and outcome.get("optimal"):
        outcome |= _checked(network, flags.limit)
    print(json.dumps(outcome))
    return 0


if __name__ == "__main__":
    sys.exit(main())
