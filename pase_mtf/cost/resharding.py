"""What it costs to move a tensor from one sharding to another, counted device by device.

A device that needs a block of the target sharding holds a part of it already; it fetches the rest from the nearest
devices that hold it. That is counted for one of all pairs of shardings that are alike (`DistinctPairs`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pase_mtf.cost.critical_path import CriticalPaths
from pase_mtf.cost.dim_relations import Sharded, distinct_rows, gcd
from pase_mtf.cost.distinct_pairs import DistinctPairs
from pase_mtf.cost.slicing import copying
from pase_mtf.cost.tables import DistinctShardings
from pase_mtf.machine.machine import Machine
from pase_mtf.search.compiled import compiled

__all__ = ["Reshardings"]

# Shardings that are looked at in one call.
_AT_ONCE = 32


class Reshardings:
    """Prices the moving of tensors on one machine. Pairs of shardings that are alike are looked at once, whichever
    tensor they are of: price all edges of a graph with one object."""

    def __init__(self, machine: Machine, *, stock: bool = False, waiting: float = 0.0) -> None:
        """Knows no pair.

        Args:
          machine: whose numbers count.
          stock: Mesh-TF moves them, not our lowering, which matters where devices share cores.
          waiting: bytes of the gradients that wait for each other (`signature.waiting_bytes`).
        """
        self.machine, self.stock, self.waiting = machine, stock, waiting
        domains = np.array([1, *(link.devices for link in machine.links[:-1])], np.int64)
        self._seconds = CriticalPaths(domains, np.array([1.0 / link.bandwidth for link in machine.links]),
                                      np.array([link.latency for link in machine.links]))
        self._elements = CriticalPaths(np.ones(1, np.int64), np.ones(1), np.zeros(1))
        self._copies = _Copies()

    @property
    def sums_on_edges(self) -> bool:
        """Whether partial sums that another layer needs are summed on the way there. Where devices share their memory
        whole blocks are summed where they are made, as Mesh-TF itself does everywhere."""
        return not (self.machine.shared_cores or self.stock)

    @property
    def adds_on_edges(self) -> bool:
        """Whether partial sums that another layer adds to its own are summed with these, where they are the same parts:
        edges tell that. Where our lowering shares memory each is charged where it is made."""
        return self.stock or not self.machine.shared_cores

    def seconds(self, source: DistinctShardings, target: DistinctShardings, shape: Sequence[int],
                itemsize: int, *, elsewhere: bool = False) -> np.ndarray:
        """Seconds to move a tensor between two shardings, for every pair of them.

        On real devices: the critical-path device; what it fetches at each link level takes bytes/bandwidth, each
        message a latency; and what is sliced for others and concatenated (`cost.slicing`). On shared cores: what is
        sliced or concatenated is copied (read and written) once for all devices that need it; every slice and
        concatenation costs an operation, every block sent (by reference) a latency. Where Mesh-TF itself does it there
        (`stock`), every device concatenates for itself, out of blocks that went round a ring, and slices for itself; on
        real devices it is these rings, axis by axis, that take the place of what is fetched.

        Args:
          source: R shardings of the tensor where it is made.
          target: C shardings of it where it is used.
          shape: unsplit size of its T dims.
          itemsize: bytes per element.
          elsewhere: the target is on other devices, which share cores: none of them has its block already.

        Returns:
          float64 [R, C]; 0 where the shardings are equal, unless elsewhere.
        """
        nbytes = float(math.prod(shape) * itemsize)
        if self.machine.shared_cores and self.stock:
            return _stock_seconds(source, target, nbytes, self.machine)
        if self.machine.shared_cores:
            copies = self._copies.of(_sharded(source), _sharded(target), elsewhere=elsewhere)
            return _shared_memory_seconds(*copies, nbytes, itemsize, self.machine)
        if not self.stock:
            return self.seconds_apart(_sharded(source), _sharded(target), nbytes)
        copied = self._copied_seconds(_sharded(source), _sharded(target), nbytes)
        total: np.ndarray = copied + _handed_round_seconds(source, target, nbytes, self.machine)
        return total

    def critical_path_seconds(self, source: Sharded, target: Sharded, nbytes: float) -> np.ndarray:
        """Seconds in which the critical-path device is sent what it needs, on devices of their own.

        Args:
          source, target: R and C shardings.
          nbytes: of the unsplit tensor.

        Returns:
          float64 [R, C].
        """
        return self._seconds.costs(source, target, nbytes)

    def seconds_apart(self, source: Sharded, target: Sharded, nbytes: float, parts: int = 0) -> np.ndarray:
        """`critical_path_seconds`, and those in which it slices, adds up and concatenates.

        Args:
          source, target, nbytes: as there.
          parts: of so many dims, the last ones, the elements are added up.
        """
        copied = self._copied_seconds(source, target, nbytes, parts)
        total: np.ndarray = self.critical_path_seconds(source, target, nbytes) + copied
        return total

    def _copied_seconds(self, source: Sharded, target: Sharded, nbytes: float, parts: int = 0) -> np.ndarray:
        """Those of `seconds_apart` in which a device slices, adds up and concatenates."""
        # Which device has which shard makes no difference to what it copies.
        (source_alike, row), (target_alike, column) = _alike(source), _alike(target)
        before, after = copying(source_alike, target_alike, parts).seconds(nbytes, self.machine)
        copied: np.ndarray = (before + after)[np.ix_(row, column)]
        return copied

    def paired_seconds(self, source: Sharded, target: Sharded, nbytes: float) -> np.ndarray:
        """`seconds_apart` of the first source and the first target, of the second ones, and so on: [R]."""
        seconds = np.zeros(len(source.devices))
        for begin in range(0, len(seconds), _AT_ONCE):  # each beside some others, of which nobody asks
            some = slice(begin, begin + _AT_ONCE)
            here, there = (Sharded(end.devices[some], end.shards[some], end.strides[some]) for end in (source, target))
            seconds[some] = self.seconds_apart(here, there, nbytes).diagonal()
        return seconds

    def elements(self, source: DistinctShardings, target: DistinctShardings, shape: Sequence[int]) -> np.ndarray:
        """The most elements that a device needs of the target sharding and does not hold, for every pair: the paper's
        t_x.

        Returns:
          float64 [R, C].
        """
        return self._elements.costs(_sharded(source), _sharded(target), float(math.prod(shape)))


def _sharded(shardings: DistinctShardings) -> Sharded:
    return Sharded(shardings.devices, shardings.shards, shardings.strides)


def _alike(shardings: Sharded) -> tuple[Sharded, np.ndarray]:
    """Those of which none differ in strides alone, and the number of that of each: int64 [R]."""
    first, number = distinct_rows(shardings.devices, shardings.shards)
    return Sharded(*(array[first] for array in shardings)), number


def _shared_memory_seconds(copied: np.ndarray, nodes: np.ndarray, sent: np.ndarray, nbytes: float, itemsize: int,
                           machine: Machine) -> np.ndarray:
    """What our lowering takes where devices share memory, by what `_Copies.of` counts: [R, C]."""
    # The copies are spread over the nodes that make them.
    each = nbytes * copied / np.maximum(nodes, 1.0)
    seconds = 2.0 * each / machine.memory_bandwidth
    if "copy" in machine.rates:
        seconds = np.maximum(seconds, each / (itemsize * machine.rates["copy"]))
    total: np.ndarray = nodes * machine.with_overhead(seconds) + sent * machine.links[-1].latency
    return total


def _moved_by_axes(source: DistinctShardings, target: DistinctShardings, nbytes: float,
                   ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """What Mesh-TF does with the axis that each dim is split over, where its split differs: its alltoall, allconcat and
    allsplit, int64 [R, C, T] each, over so many devices, 1 where it is not that; and the bytes of a device once all is
    split, float64 [R, C]."""
    shards, wanted = source.shards[:, None, :], target.shards[None, :, :]
    strides, others = source.strides[:, None, :], target.strides[None, :, :]
    same = (shards == wanted) & ((strides == others) | (shards == 1))
    joined, split = np.where(same, 1, shards), np.where(same, 1, wanted)
    # An axis that splits another dim afterwards: pieces are exchanged, and no device has all of the tensor.
    pairs = ((joined[..., :, None] == split[..., None, :]) & (strides[..., :, None] == others[..., None, :])
             & (joined[..., :, None] > 1))
    members = np.where(pairs.any(axis=3), joined, 1)
    joined, split = np.where(members > 1, 1, joined), np.where(pairs.any(axis=2), 1, split)
    return members, joined, split, nbytes / (shards.prod(axis=2) * split.prod(axis=2))


def _outer_first(joined: np.ndarray, strides: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The axes that are joined and their strides in Mesh-TF's order, in which blocks are small while outer ones are."""
    order = np.argsort(np.where(joined > 1, -strides, 1), axis=2)
    return (np.take_along_axis(joined, order, axis=2),
            np.take_along_axis(np.broadcast_to(strides, joined.shape), order, axis=2))


def _stock_seconds(source: DistinctShardings, target: DistinctShardings, nbytes: float,
                   machine: Machine) -> np.ndarray:
    """What Mesh-TF's allsplit, alltoall and allconcat of the dims that are split differently cost on shared cores, in
    its order, in which slices are small while they move: [R, C]."""
    members, joined, split, block = _moved_by_axes(source, target, nbytes)
    splits = (split > 1).sum(axis=2)
    # One slice each: the places of shards are constants once the graph is optimized, and computed once for all that
    # are split alike before. Slices of the first dim lie in memory as they are.
    sliced = (split[..., 1:] > 1).any(axis=2)
    seconds = machine.with_overhead(sliced * 2.0 * block / machine.memory_bandwidth, 1.0 * splits)
    exchanged = _exchange_seconds(block[..., None] * members, members, machine)
    seconds = seconds + np.where(members > 1, exchanged, 0.0).sum(axis=2)
    joined, _ = _outer_first(joined, source.strides[:, None, :])  # what is joined is larger every time
    made = block[..., None] * np.cumprod(joined, axis=2)
    joins = np.where(joined > 1, machine.with_overhead(2.0 * made / machine.memory_bandwidth), 0.0)
    message = machine.overhead + machine.links[-1].latency
    seconds = seconds + ((joined - 1) * message + joins).sum(axis=2)
    total: np.ndarray = np.maximum(source.devices[:, None], target.devices[None, :]) * seconds
    return total


def _handed_round_seconds(source: DistinctShardings, target: DistinctShardings, nbytes: float,
                          machine: Machine) -> np.ndarray:
    """Seconds in which devices of their own hand on what Mesh-TF's alltoall and allconcat send round rings, either way,
    axis by axis in its order (`_stock_seconds`): [R, C]. Of a device's own link, as of an all-reduce."""
    members, joined, _, block = _moved_by_axes(source, target, nbytes)
    bandwidth, latency = (np.array(values) for values in zip(
        *((link.bandwidth, link.latency) for link in machine.links), strict=True))

    def level(reach: np.ndarray) -> np.ndarray:
        found: np.ndarray = np.minimum(np.searchsorted([link.devices for link in machine.links], reach),
                                       len(machine.links) - 1)
        return found

    forward = (members - 1) // 2
    backward = members - 1 - forward
    sent = block[..., None] * (forward * (forward + 1) + backward * (backward + 1)) / (2.0 * members)
    across = level(source.strides[:, None, :] * members)
    seconds = np.where(members > 1, sent / bandwidth[across] + backward * latency[across], 0.0)
    # Half of a ring's blocks arrive from either side: at the border of a node those of one side come from another node.
    joined, strides = _outer_first(joined, source.strides[:, None, :])
    held = block[..., None] * np.cumprod(joined, axis=2) / joined
    across, within, far = level(strides * joined), level(2 * strides), joined // 2
    arriving = held * (far / bandwidth[across] + (joined - 1 - far) / bandwidth[within]) + far * latency[across]
    total: np.ndarray = (seconds + np.where(joined > 1, arriving, 0.0)).sum(axis=2)
    return total


def _exchange_seconds(block: np.ndarray, members: np.ndarray, machine: Machine) -> np.ndarray:
    """Seconds of a device in Mesh-TF's alltoall (mesh_tensorflow/placement_mesh_impl.py): float64, of the shape of
    `members`. It splits what it has, puts one of two messages together, which go round either way, splits what arrives
    of them, and concatenates.

    Args:
      block: bytes of what the members have together, float64 of that shape.
      members: how many exchange pieces, int64; 1 where nobody does.
      machine: whose memory it is.
    """
    forward = (members - 1) // 2
    backward = members - 1 - forward
    pieces = (2.0 * members + (backward ** 2 + (members - backward) * forward) / members
              + (forward * (forward + 1) + backward * (backward + 1)) / 2.0)
    copied = 2.0 * block / members ** 2 * pieces
    seconds: np.ndarray = (machine.with_overhead(copied / machine.memory_bandwidth, members + 2.0)
                           + (members - 1) * machine.links[-1].latency)
    return seconds


@compiled
def _count_own(rows: np.ndarray, columns: np.ndarray, source_devices: np.ndarray, source_shards: np.ndarray,
               source_strides: np.ndarray, target_devices: np.ndarray, target_shards: np.ndarray,
               target_strides: np.ndarray) -> np.ndarray:  # pragma: no cover (compiled)
    """How many devices hold some of what they need, for some pairs of shardings: float64 [N]."""
    counts = np.zeros(len(rows))
    for pair in range(len(rows)):
        shards, strides = source_shards[rows[pair]], source_strides[rows[pair]]
        wanted, wanted_strides = target_shards[columns[pair]], target_strides[columns[pair]]
        for device in range(min(source_devices[rows[pair]], target_devices[columns[pair]])):
            own = True
            for dim in range(len(shards)):
                if shards[dim] > 1 and wanted[dim] > 1:
                    shard = device // wanted_strides[dim] % wanted[dim]
                    mine = device // strides[dim] % shards[dim]
                    own = (own and shard * shards[dim] < (mine + 1) * wanted[dim]
                           and mine * wanted[dim] < (shard + 1) * shards[dim])
            counts[pair] += own
    return counts


@compiled
def _slices_and_concatenations(shards: np.ndarray, wanted: np.ndarray, among: bool, alone: bool,
                               ) -> tuple[float, float, float]:  # pragma: no cover (compiled)
    """How one pair of shardings is lowered: (how many times the tensor is copied, nodes, blocks that are concatenated
    beyond the first of each).

    A block whose pieces are alike is sliced one dim after the other; of others each piece is a slice of its own, and
    where several devices hold a block they share in that: then pieces are copied once, however many dims cut them.
    Blocks are concatenated one dim after the other. What is cut or put together is copied, but for slices of the first
    dim, which lie in memory as they are. `among`: every device of the target holds some of what it needs; `alone`: all
    pieces of a block are sliced by one device.
    """
    blocks, made, pieces, finer = 1.0, 1.0, 1.0, among
    for dim in range(len(shards)):
        blocks *= shards[dim]
        made *= wanted[dim]
        finer = finer and wanted[dim] % shards[dim] == 0
    copied, nodes, joining = 0.0, 0.0, made
    if finer and made > blocks:  # whoever makes a block has what it is cut out of, and slices it by one node
        return (0.0 if made / blocks == wanted[0] / shards[0] else 1.0), made, 0.0
    # Blocks whose pieces are alike, these pieces, how often they are copied and by how many nodes; the pieces of all
    # blocks; of the first dim the shards, and those with other pieces; of the dims behind it, what none of them cuts.
    even, parts, passes, splits, grid, first, odd, behind = 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0
    for dim in range(len(shards)):
        common = gcd(shards[dim], wanted[dim])
        cells = shards[dim] + wanted[dim] - common
        cut, alike, each = 0.0, 0.0, 1.0
        if cells > shards[dim]:
            cut = float(min(shards[dim], wanted[dim] - common))  # of thirds that become halves the middle one alone
            if common == shards[dim]:
                alike, each = cut, cells / shards[dim]
            elif alone and wanted[dim] // common % 2 == 0 and wanted[dim] < 2 * shards[dim]:
                alike, each = float(common), 2.0  # that is cut into halves, which its one device makes by one node
        left = shards[dim] - cut
        kept = left + alike
        passes = passes * kept + (even * alike if dim else 0.0)
        splits = splits * kept + parts * alike
        even *= kept
        parts *= left + alike * each
        grid *= cells
        if dim:
            behind *= left
        else:
            odd, first = shards[dim] - kept, float(shards[dim])
        if cells > wanted[dim]:
            joined = min(wanted[dim], shards[dim] - common) / wanted[dim]  # of halves that become thirds the middle one
            copied += joined
            nodes += joining * joined
            joining *= cells / wanted[dim]
            pieces *= cells / wanted[dim]
    if alone:
        copied += (passes + blocks - even - odd * behind) / blocks
    else:
        copied += 1.0 - behind * first / blocks
    return copied, nodes + splits + grid - parts, made * (pieces - 1.0)


@compiled
def _slices_and_concatenations_of_all(source_shards: np.ndarray, target_shards: np.ndarray, among: np.ndarray,
                                      alone: np.ndarray,
                                      ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # pragma: no cover (compiled)
    """`_slices_and_concatenations` of all pairs, each float64 [R, C]."""
    rows, columns = len(source_shards), len(target_shards)
    copied, nodes, joined = np.empty((rows, columns)), np.empty((rows, columns)), np.empty((rows, columns))
    for row in range(rows):
        for column in range(columns):
            copied[row, column], nodes[row, column], joined[row, column] = _slices_and_concatenations(
                source_shards[row], target_shards[column], among[row, column], alone[row, column])
    return copied, nodes, joined


@compiled
def _by_one(devices: np.ndarray, shards: np.ndarray, strides: np.ndarray, wanted_devices: np.ndarray,
            wanted: np.ndarray, wanted_strides: np.ndarray,
            elsewhere: bool) -> np.ndarray:  # pragma: no cover (compiled)
    """Whether all pieces of a block are sliced by one device, for all pairs of shardings: bool [R, C].

    The first device that needs a block of the target makes it, and is given pieces by the nearest holders. Of a block
    several are asked only where those that make something of it differ in what its holders differ in; of powers of two
    that is told by bits of the devices' numbers. Of others nearness tells nothing: then only who holds it alone is.
    """
    rows, columns = len(shards), len(wanted)
    alone = np.empty((rows, columns), np.bool_)
    for row in range(rows):
        blocks, split = 1, 0
        for dim in range(shards.shape[1]):
            blocks *= shards[row, dim]
            split += strides[row, dim] * (shards[row, dim] - 1)
        binary = not elsewhere and devices[row] & (devices[row] - 1) == 0
        replicas = (devices[row] - 1) & ~split
        for column in range(columns):
            asking = 0  # what those differ in that need parts of one block
            for dim in range(shards.shape[1]):
                within = wanted[column, dim] // gcd(shards[row, dim], wanted[column, dim])
                asking += wanted_strides[column, dim] * (within - 1)
            alone[row, column] = blocks == devices[row] or (
                binary and wanted_devices[column] & (wanted_devices[column] - 1) == 0 and asking & replicas == 0)
    return alone


class _Copies:
    """Counts what is copied where memory is shared, as the lowering moves a tensor: every block of the target once."""

    def __init__(self) -> None:
        self._pairs = DistinctPairs(np.ones(1, np.int64), far_alike=False)
        self._own = np.empty(0)  # of every distinct pair, how many devices hold some of what they need

    def of(self, source: Sharded, target: Sharded, *,
           elsewhere: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What moving a tensor copies, for every pair of shardings.

        Args:
          source: R shardings where the tensor is made.
          target: C shardings where it is used.
          elsewhere: on other devices.

        Returns:
          (copied, nodes, sent), each float64 [R, C]: how many times the tensor is copied, the nodes that slice and
          concatenate, and how often a block is sent to another device.
        """
        pairs = self._pairs.number(source, target)
        if len(pairs.new):
            self._own = np.concatenate((self._own, _count_own(pairs.new[:, 0], pairs.new[:, 1], *source, *target)))
        own = np.zeros(pairs.number.shape) if elsewhere else self._own[pairs.number]
        copied, nodes, joined = _slices_and_concatenations_of_all(
            source.shards, target.shards, own == target.devices, _by_one(*source, *target, elsewhere))
        return copied, nodes, target.devices - own + joined
