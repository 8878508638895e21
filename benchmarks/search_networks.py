"""What the searches are measured on: graphs, the networks made from them, and random variations of both.

Graphs are exported once by the same sources, each by a process of its own (it needs TensorFlow), and kept in a folder.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterable

import numpy as np

from benchmarks.search_densenet import densenet, paper_configurations, paper_machine
from pase_mtf import models
from pase_mtf.cost.build import PricedNetwork, build_network
from pase_mtf.errors import PaseError
from pase_mtf.files import write_atomically
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.graph.configurations import Configuration
from pase_mtf.machine.machine import Machine
from pase_mtf.search.network import CostNetwork, NetworkEdge
from pase_mtf.strategy.experts import data_parallel, expert

__all__ = ["DEEP", "INSTANCES", "LAUNCHER", "MACHINE", "ROOT", "Variation", "Workshop", "instances", "price",
           "price_densenet", "scaled", "shuffled", "starts_file"]

ROOT = pathlib.Path(__file__).absolute().parents[1]
INSTANCES = ROOT / "tests" / "data" / "instances"
LAUNCHER = {"alexnet": ("big", 128), "transformer": ("big", 64)}
"""The launcher's own graphs in the paper's sizes: model -> (preset, batch)."""
MACHINE = "1080ti"
"""The machine they are priced for: the paper's."""
DEEP = 96
"""Layers of the deep transformer's encoder, and of its decoder."""

_SOURCES = ("benchmarks/search_densenet.py", "benchmarks/search_export.py", "benchmarks/search_networks.py", "configs",
            "launch/arms", "models", "pase_mtf")
"""Files and folders that decide what graphs and networks are."""
_BATCHES = (16, 32, 48, 64, 96, 128, 192, 256, 512)
_DEVICES = (2, 4, 6, 8, 12, 16, 24, 32, 64)
_MACHINES = ("1080ti", "2080ti", "a100", "h100")


def instances() -> list[tuple[str, str]]:
    """(name, file) of every network of the paper's graphs that is held in the project."""
    return [(path.stem, str(path)) for path in sorted(INSTANCES.glob("*.npz"))]


def shuffled(network: CostNetwork, seed: int = 0) -> CostNetwork:
    """The same graph with every vector and matrix shuffled: nothing is left of what makes real networks easy."""
    rng = np.random.default_rng(seed)
    return CostNetwork(
        [rng.permutation(vector) for vector in network.vectors],
        [NetworkEdge(edge.source, edge.target, rng.permutation(edge.matrix.ravel()).reshape(edge.matrix.shape),
                     edge.rows, edge.columns) for edge in network.edges])


def scaled(network: CostNetwork, bandwidth: float, batch: float, rng: np.random.Generator) -> CostNetwork:
    """A variation of a network whose graph is not at hand: edges divided by `bandwidth`, vectors times `batch`, the
    kinds of layers out of balance by up to two either way. Layers and edges that were alike stay alike."""
    factor = {kind: 2.0 ** rng.uniform(-1, 1) for kind in sorted(set(network.kinds))}
    arrays = network.arrays
    matrices = [matrix / bandwidth for matrix in arrays.matrices()]
    return CostNetwork(
        [vector * (batch * factor[kind]) for vector, kind in zip(network.vectors, network.kinds, strict=True)],
        [NetworkEdge(edge.source, edge.target, matrices[number], edge.rows, edge.columns)
         for edge, number in zip(network.edges, arrays.edge_matrix.tolist(), strict=True)], network.kinds)


class Workshop:
    """Makes graphs and networks as files in a folder, and finds them there the next time.

    Attributes:
      folder: the folder; in it is one for every version of the sources.
    """

    def __init__(self, folder: str | os.PathLike) -> None:
        """Makes the folders that there are not."""
        self.folder = pathlib.Path(folder)
        self._made = self.folder / _digest([ROOT / name for name in _SOURCES])
        self._made.mkdir(parents=True, exist_ok=True)

    def graph(self, model: str, preset: str, batch: int, layers: int | None = None) -> str:
        """The file of a graph of the launcher.

        Raises:
          RuntimeError: it could not be exported; holds what was said.
        """
        depth = "" if layers is None else f"-{layers}"
        path = self._made / f"{model}-{preset}-{batch}{depth}.json"
        if not path.exists():
            command = [sys.executable, "-m", "benchmarks.search_export", model, preset, str(batch), str(path)]
            run = subprocess.run([*command, *([] if layers is None else [f"--layers={layers}"])], capture_output=True,
                                 text=True, check=False, cwd=ROOT)
            if run.returncode:
                raise RuntimeError(f"export of {model} ({preset}): {run.stderr.strip().splitlines()[-1:]}")
        return str(path)

    def launcher_network(self, model: str, devices: int) -> str:
        """The file of the network of one of `LAUNCHER`, on p devices of `MACHINE`."""
        preset, batch = LAUNCHER[model]
        return self._network(f"{model}-{preset}_{devices}",
                             lambda: self._priced(model, preset, batch, MACHINE, devices))

    def model_network(self, model: str, preset: str, machine: str, devices: int) -> str:
        """The file of the network of a model with the batch of its preset, on p devices of a machine."""
        batch = models.load_config(model, preset).batch
        return self._network(f"{model}-{preset}-{machine}_{devices}",
                             lambda: self._priced(model, preset, batch, machine, devices))

    def _priced(self, model: str, preset: str, batch: int, machine: str, devices: int) -> PricedNetwork:
        return build_network(ComputationGraph.load(self.graph(model, preset, batch)), Machine.load(machine), devices)

    def densenet_network(self, normalization: str, devices: int) -> str:
        """The file of densenet-direct's network on p devices, with the paper's costs and configurations."""
        return self._network(f"densenet-{normalization}_{devices}",
                             lambda: price_densenet(densenet(normalization=normalization), devices))

    def shuffled_network(self, name: str) -> str:
        """The file of an instance with its costs shuffled."""
        path = self._made / f"{name}-shuffled.npz"
        if not path.exists():
            shuffled(CostNetwork.load(INSTANCES / f"{name}.npz")).save(path)
        return str(path)

    def _network(self, name: str, make: Callable[[], PricedNetwork]) -> str:
        """Saves the network, and beside it the strategies that people write by hand, from which mcmc starts."""
        path = self._made / f"{name}.npz"
        starts = starts_file(path)
        if not path.exists() or not starts.exists():
            priced = make()
            found = {}
            for start, by_hand in (("data parallelism", data_parallel), ("expert", expert)):
                try:
                    found[start] = [_closest(priced, layer, configuration) for layer, configuration
                                    in enumerate(by_hand(priced.graph, priced.devices))]
                except PaseError:
                    continue  # the batch does not divide by so many devices
            priced.network.save(path)
            write_atomically(starts, json.dumps(found))
        return str(path)


def _digest(sources: Iterable[pathlib.Path]) -> str:
    """Tells sources from any others: programs and sizes, by their names and contents."""
    digest = hashlib.sha256()
    for source in sources:
        for path in sorted(source.rglob("*")) if source.is_dir() else [source]:
            if path.suffix in (".py", ".json"):
                content = path.read_bytes()
                digest.update(f"{path.relative_to(source.parent)} {len(content)} ".encode() + content)
    return digest.hexdigest()[:12]


def starts_file(path: str | os.PathLike) -> pathlib.Path:
    """Where the strategies by hand of a network stand."""
    return pathlib.Path(path).with_suffix(".starts.json")


def _closest(priced: PricedNetwork, layer: int, configuration: Configuration) -> int:
    """The index of a configuration; where it is not offered, of the cheapest with the most of its splits."""
    offered = priced.configurations[layer]
    if configuration in set(offered):
        return priced.index(layer, configuration)
    wanted = set(configuration.splits.items())
    vector = priced.network.vectors[layer]
    return min(range(len(offered)), key=lambda k: (-len(wanted & set(offered[k].splits.items())), vector[k]))


def price_densenet(graph: ComputationGraph, devices: int, machine: Machine | None = None) -> PricedNetwork:
    """DenseNet's network by the paper's formulas on p devices, over the paper's configurations."""
    offered = [paper_configurations(layer, devices) for layer in graph.layers]
    return build_network(graph, machine or paper_machine(), devices, offered, "pase")


@dataclasses.dataclass(frozen=True)
class Variation:
    """One draw of graph x devices x bandwidth x batch.

    Attributes:
      seed: decides all of it.
      graph: name of it.
      devices: p.
      machine: whose numbers, before the bandwidth of its links is changed.
      bandwidth: factor on that.
      batch: examples per step (for the graphs of the instances, a factor on the work of the layers instead).
    """

    seed: int
    graph: str
    devices: int
    machine: str
    bandwidth: float
    batch: float

    @classmethod
    def draw(cls, seed: int) -> Variation:
        """The variation with that number."""
        rng = np.random.default_rng(seed)
        graph = str(rng.choice(["alexnet-big", "transformer-big", "transformer-small", "densenet-direct",
                                "densenet-direct, layer norm", "inception3", "rnnlm"]))
        bandwidth = float(2.0 ** rng.uniform(-4, 4))
        if graph in ("inception3", "rnnlm"):
            devices = rng.choice([8, 16] if graph == "inception3" else [8, 32])
            return cls(seed, graph, int(devices), "paper", bandwidth, float(2.0 ** rng.uniform(-4, 4)))
        machine = "paper" if graph.startswith("densenet") else str(rng.choice(_MACHINES))
        return cls(seed, graph, int(rng.choice(_DEVICES)), machine, bandwidth, int(rng.choice(_BATCHES)))

    def __str__(self) -> str:
        batch = f"batch {self.batch}" if isinstance(self.batch, int) else f"work x {self.batch:.2g}"
        return f"{self.graph}, p = {self.devices}, {self.machine}, bandwidth x {self.bandwidth:.2g}, {batch}"


def price(variation: Variation, workshop: Workshop) -> tuple[CostNetwork, float]:
    """The network of a variation, and the seconds it took to build from its graph."""
    if variation.graph in ("inception3", "rnnlm"):
        network = _instance(f"{variation.graph}_{variation.devices}")
        start = time.perf_counter()
        made = scaled(network, variation.bandwidth, variation.batch, np.random.default_rng(variation.seed))
        return made, time.perf_counter() - start
    machine = paper_machine() if variation.machine == "paper" else Machine.load(variation.machine)
    machine = dataclasses.replace(machine, links=tuple(
        dataclasses.replace(link, bandwidth=link.bandwidth * variation.bandwidth) for link in machine.links))
    if variation.graph.startswith("densenet"):
        graph = densenet(int(variation.batch), normalization="layer" if "layer" in variation.graph else "batch")
        start = time.perf_counter()
        return price_densenet(graph, variation.devices, machine).network, time.perf_counter() - start
    model, preset = variation.graph.split("-")
    graph = _graph(workshop.graph(model, preset, int(variation.batch)))
    start = time.perf_counter()
    return build_network(graph, machine, variation.devices).network, time.perf_counter() - start


@functools.lru_cache(maxsize=4)
def _instance(name: str) -> CostNetwork:
    return CostNetwork.load(INSTANCES / f"{name}.npz")


@functools.lru_cache(maxsize=32)
def _graph(path: str) -> ComputationGraph:
    return ComputationGraph.load(path)
