"""Step times by prediction: the best strategy of M devices for a worker's batch, repeated by every worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pase_mtf.cost.build import build_network
from pase_mtf.epochs.step_times import StepTimes
from pase_mtf.errors import InfeasibleError, PaseError
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.graph.configurations import Configuration
from pase_mtf.machine.machine import Machine
from pase_mtf.strategy.experts import batch_dim
from pase_mtf.strategy.find import find_strategy

__all__ = ["predict_steps", "with_workers"]


def with_workers(graph: ComputationGraph, configurations: Iterable[Configuration],
                 workers: int) -> tuple[Configuration, ...]:
    """The strategy of one worker, repeated: the batch is split over workers before anything else is.

    Args:
      graph: at the global batch.
      configurations: of one worker, one per layer.
      workers: how many; a layer without a batch is replicated over them.
    """
    batch = batch_dim(graph)

    def repeated(configuration: Configuration, splittable: Sequence[str]) -> Configuration:
        if workers == 1:
            return configuration
        name = batch if batch in splittable else ""
        mine = configuration.shards(name) if name else 1
        return Configuration(((name, workers * mine),
                              *(axis for axis in configuration.axes if not (name and axis[0] == name))))
    return tuple(repeated(configuration, layer.splittable)
                 for configuration, layer in zip(configurations, graph.layers, strict=True))


def predict_steps(graph_of: Callable[[int], ComputationGraph], worker_batch: int, mixes: Iterable[tuple[int, int]],
                  machine: Machine, tell: Callable[[str], object] = lambda text: None) -> StepTimes:
    """Predicted step times of mixes.

    With one device to a worker that is data parallelism; with M the cheapest strategy on M devices at a worker's batch,
    priced with the all-reduces of all workers on the whole machine.

    Args:
      graph_of: batch -> the training step's graph.
      worker_batch: examples of a worker.
      mixes: (workers, ways).
      machine: whose numbers count.
      tell: told what is priced.

    Raises:
      InfeasibleError: nothing can be priced.
      UsageError: the machine has not so many devices.
    """
    seconds: dict[tuple[int, int], float] = {}
    found: dict[int, tuple[Configuration, ...]] = {}
    problem: PaseError | None = None
    for workers, ways in sorted(mixes):
        tell(f"{workers} x {ways}")
        machine.check_devices(workers * ways)
        try:
            if ways not in found:
                found[ways] = find_strategy(graph_of(worker_batch), ways, machine, simulate=0).configurations
            graph = graph_of(workers * worker_batch)
            # The configurations of this strategy alone are priced: others take most of the time that pricing takes.
            only = [(configuration,) for configuration in with_workers(graph, found[ways], workers)]
            priced = build_network(graph, machine, workers * ways, only)
        except InfeasibleError as error:
            problem = error
            continue
        seconds[workers, ways] = priced.breakdown([0] * len(only)).total
    if not seconds:
        raise problem or InfeasibleError("no mix of workers and devices to price; name numbers of devices")
    return StepTimes(worker_batch, seconds, f"predicted for {machine.name}")
