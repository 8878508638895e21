"""Measures the links between processes: tensors that all devices send at once, through TensorFlow's own transport.

Every device sends a tensor to the next one of another process, which sends it on, and so round and round: as much
leaves each device as comes to it, as in an all-reduce. Of tensors of two sizes, the smaller tells what a message costs,
and the difference what a byte does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from pase_mtf.calibration.kernels import plain_config
from pase_mtf.calibration.nodes import Nodes
from pase_mtf.compat import graph_of_nodes, tf
from pase_mtf.machine.kernels import Block
from pase_mtf.machine.link import Link
from pase_mtf.runtime import Devices

__all__ = ["between_processes", "measure_links", "neighbours"]

_LEAST = 1e-9
"""Seconds: of a message that cannot be told from none."""
_SMALL, _LARGE = 16, 1 << 18
"""Elements, of four bytes."""
_HOPS = {_SMALL: 32, _LARGE: 6}
_RUNS = 5


def between_processes(devices: Devices) -> tuple[tuple[int, int], ...]:
    """The levels of links that cross processes, innermost first: (how many consecutive devices are together below it,
    and how many it joins)."""
    below, found = devices.count // max(1, len(devices.tasks)), []
    for size in devices.link_groups:
        if size > below:
            found.append((below, size))
            below = size
    return tuple(found)


def neighbours(devices: int, below: int, joined: int) -> list[int]:
    """For each device the one that it sends to over a level of links.

    Args:
      devices: how many.
      below: how many consecutive ones are nearer to each other than that.
      joined: how many the level joins.
    """
    return [number - number % joined + (number % joined + below) % joined for number in range(devices)]


def measure_links(devices: Devices, progress: Callable[[int], object] = lambda count: None) -> tuple[Link, ...]:
    """The links between processes whose servers answer, innermost level first.

    Args:
      devices: of two processes or more.
      progress: called with 1 after each of the levels.
    """
    found = []
    for below, joined in between_processes(devices):
        to = neighbours(devices.count, below, joined)
        small, large = (_hop_seconds(devices, to, elements) for elements in (_SMALL, _LARGE))
        found.append(_link(joined, small, large))
        progress(1)
    return tuple(found)


def _link(joined: int, small: float, large: float) -> Link:
    """The link on which a small and a large tensor take so long."""
    nbytes = 4.0 * (_LARGE - _SMALL)
    # Where a byte cannot be told from none, no more than half of the time is taken for the message.
    return Link(joined, nbytes / max(large - small, 0.5 * large), max(small, _LEAST))


def _hop_seconds(devices: Devices, to: list[int], elements: int) -> float:
    """What it takes that every device sends a tensor to another one."""
    nodes, hops, ends = Nodes(devices), _HOPS[elements], []
    for number in range(devices.count):
        at, name = number, nodes.read(devices.names[number], Block("float32", (elements,)), 0)
        for _ in range(hops):
            at = to[at]
            name = nodes.sent(name, devices.names[at])
        ends.append(name)
    once, idle, fill = nodes.group(ends), nodes.idle(), nodes.group(nodes.fills)
    graph, targets = graph_of_nodes(nodes.definition, [once, idle, fill])
    with tf.Session(devices.target, graph=graph, config=plain_config(devices)) as session:
        session.run(targets[fill])
        # In turn, so that whoever else uses the hosts or the network disturbs both alike; the best counts.
        both = list(zip(_times(session, targets[once]), _times(session, targets[idle]), strict=True))
    seconds = min(taken for taken, _ in both) - min(taken for _, taken in both)
    return max(seconds / hops, _LEAST)


def _times(session: tf.Session, target: tf.Operation) -> Iterator[float]:
    """What runs take, one by one; the first, which is not counted, sets up the connections."""
    session.run(target)
    for _ in range(_RUNS):
        began = time.perf_counter()
        session.run(target)
        yield time.perf_counter() - began
