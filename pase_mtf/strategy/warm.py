"""Calls all compiled code that a search needs, so that it is there before any clock is read.

The kernels of `cost`, `search` and `simulator` are compiled by numba when they are first called, for the types they are
called with. So this calls them as a first `find_strategy` does, on a graph that is too small to take any time, and as
searches of networks from elsewhere do (with forbidden pairs, or so large that first passes count costs in steps).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable

import numpy as np

from pase_mtf.cost.build import build_network
from pase_mtf.graph.computation_graph import ComputationGraph, Edge, Layer, LayerOperation, Operand
from pase_mtf.machine.machine import Machine
from pase_mtf.search import Certificate, check_certificate, solve
from pase_mtf.search.budget import Budget
from pase_mtf.search.certify import potentials_of
from pase_mtf.search.checked_search import remainder_of, search
from pase_mtf.search.compiled import seconds_now
from pase_mtf.search.left_over import left_over
from pase_mtf.search.network import CostNetwork, NetworkEdge
from pase_mtf.search.packed import Potentials, pack
from pase_mtf.simulator.mcmc import search_simulated
from pase_mtf.strategy.simulated import shortest_simulated
from pase_mtf.strategy.within import solve_within

__all__ = ["compile_costs", "compile_kernels", "compile_searches", "ready", "small_graph"]


_done = list[bool]()
"""Whether all of it was called in this process."""


def small_graph() -> ComputationGraph:
    """Three matrix products in a row, of which others need the sums, and an edge past the middle one."""
    sizes = (8, 4, 6, 8)
    layers = []
    for number, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        dims = {"batch": 12, f"width{number}": inputs, f"width{number + 1}": outputs}
        names = tuple(dims)
        x, w, y = (Operand(held, tuple(dims[name] for name in held))
                   for held in ((names[0], names[1]), (names[1], names[2]), (names[0], names[2])))
        product = LayerOperation(number, f"product{number}", "", "forward", "matmul", 24.0 * inputs * outputs, names,
                                 (x, w), (y,), (names[1],))
        layers.append(Layer(f"product{number}", "matmul", dims, names, (product,), ()))
    edges = []
    for source, target in ((0, 1), (1, 2), (0, 2)):
        held, wanted = ("batch", f"width{source + 1}"), ("batch", f"width{target}")
        edges += [Edge(source, target, f"x{source}", "forward", (12, sizes[target]), 4, held, wanted,
                       pending=(f"width{source}",)),
                  Edge(target, source, f"dx{source}", "backward", (12, sizes[target]), 4, wanted, held)]
    return ComputationGraph("compiled", tuple(layers), tuple(edges), len(layers))


def _forbidding() -> CostNetwork:
    """A network in which the last configurations of all layers, and their classes, are forbidden."""
    ends = np.arange(3)
    unequal = np.array([[0.0, 1.0, 1.0], [1.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
    equal = np.array([[1.0, 0.0, 2.0], [0.0, 1.0, 2.0], [2.0, 2.0, 2.0]])
    return CostNetwork([np.array([0.0, 0.0, math.inf])] * 3, [
        NetworkEdge(0, 1, unequal, ends, ends), NetworkEdge(1, 2, unequal, ends, ends),
        NetworkEdge(2, 1, equal, ends, ends), NetworkEdge(0, 2, equal, ends, ends),
        NetworkEdge(1, 1, equal, ends, ends)])


def _dense(layers: int, configurations: int) -> CostNetwork:
    """Layers that all exchange tensors, of random costs."""
    rng, every = np.random.default_rng(0), np.arange(configurations)
    return CostNetwork([rng.random(configurations) for _ in range(layers)], [
        NetworkEdge(i, j, rng.random((configurations, configurations)), every, every)
        for i, j in itertools.combinations(range(layers), 2)])


def _hard() -> CostNetwork:
    """A small network that takes a search depth first."""
    return _dense(10, 6)


def _large() -> CostNetwork:
    """A row of equal layers, so many and of so many configurations that first passes count costs in steps and look
    which layers repeat."""
    every, costs = np.arange(700), np.random.default_rng(0).random((700, 700))
    return CostNetwork([costs[0]] * 70, [NetworkEdge(i, i + 1, costs, every, every) for i in range(69)])


def _wide() -> CostNetwork:
    """Of so many configurations that passes are made over a few of them too."""
    return _dense(4, 600)


def _compile_checker() -> None:
    """Calls what checks certificates, with some that leave everything to it and so take no search."""
    network = _dense(5, 6)
    packed = pack(network.normalized())
    potentials, found = potentials_of(packed, Potentials.none(packed)), solve(network, "pase")
    for searched in (False, True):
        check_certificate(network, dataclasses.replace(found, certificate=Certificate(
            potentials, alone=False, searched=searched)))


def compile_costs() -> None:
    """Calls what networks of costs need, and of searches and checks what sends no messages."""
    graph, machine = small_graph(), Machine.load("1080ti")
    for linked, devices in itertools.product((machine, dataclasses.replace(machine, shared_cores=True)), (4, 6)):
        network = build_network(graph, linked, devices)
    _compile_checker()
    search_simulated(network, [0] * len(graph.layers), proposals=9)
    for method in ("mcmc", "pase", "k_best"):
        solve(_forbidding(), method)
    packed = pack(_hard().normalized())  # of what only large networks leave too much
    left_over(packed, Potentials.none(packed), math.inf, 1)
    remainder = remainder_of([((0,), np.ones(2)), ((0, 1), np.ones((2, 2)))])
    assert remainder is not None
    search(remainder, 1.0, 9)


def compile_searches() -> None:
    """Calls what exact searches need; a third of all compiling is for their messages."""
    assert solve(_hard()).statistics["descents"]
    solve(_large())
    network = _forbidding()
    for checked in (_hard(), _wide(), network):
        check_certificate(checked, solve(checked))
    solve(network, memory=[np.array([1.0, 2.0, 3.0])] * 3, memory_limit=4.0)


def compile_kernels() -> None:
    """Calls every compiled kernel with the types that a first search calls it with. Where all are compiled already, it
    loads them, in a third of a second."""
    compile_costs()
    compile_searches()
    graph, machine = small_graph(), Machine.load("1080ti")
    for linked in (machine, dataclasses.replace(machine, shared_cores=True)):
        priced = build_network(graph, linked, 4)
        found = solve_within(priced, None, {"certificate": True})
        limit, _ = priced.peak_memory(found.assignment)
        solve_within(priced, limit, {"certificate": False})
        shortest_simulated(priced, found, 2, None, Budget.of(None))
    solve(priced.network, "mcmc", proposals=9)
    for method in ("pase", "k_best"):
        solve(priced.network, method)


def ready(tell: Callable[[str], object]) -> None:
    """Has all compiled code there, once in a process: before a clock is read by which a search has to end, as compiling
    takes longer than many may.

    Args:
      tell: is told if it takes long, as it does where nobody compiled anything yet.
    """
    if not _done:
        seconds_now()
        stats = getattr(seconds_now, "stats", None)  # none where numba is told not to compile
        if stats is not None:
            if stats.cache_misses:
                tell("searches are compiled, once for all runs: a minute")
            compile_kernels()
        _done.append(True)
