"""What a caller of `find_layout` asks for, checked."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence

from pase_mtf.amounts import bytes_text, needed_text, parse_bytes
from pase_mtf.errors import UsageError, shortened
from pase_mtf.layout.layout import LayoutCost
from pase_mtf.layout.search import Candidate
from pase_mtf.layout.space import (
    MAX_AXES,
    GivenLayout,
    MeshShape,
    order_matters,
    parse_layout,
    parse_mesh_shape,
    parse_rules,
)
from pase_mtf.layout.verify import Memo
from pase_mtf.machine.machine import Machine

__all__ = ["Request", "bytes_limit", "compared_layouts"]


@dataclasses.dataclass(frozen=True)
class Request:
    """The arguments of `find_layout` but for the graph.

    Attributes:
      devices: p.
      machine: whose numbers count.
      mesh: the only mesh shape; None: all compete.
      memory_limit: bytes per device; infinite: no limit.
      fixed: dim name -> axis name, None for a dim that stays whole.
      together: pairs of dims that are to be on one axis, or both on none.
      own: the layout that the program itself names, of as many devices; None: it names none.
      compare: layouts to cost too, as (mesh shape, dim name -> axis name).
      alternatives: how many of the next best layouts to return.
      name: of the program, for people.
      deadline: the time.perf_counter() at which the search ends with what it has; infinite: when it is done.
      say: tells people what is being done.
      memo: what was lowered before, of any graph that the program built.
    """

    devices: int
    machine: Machine
    mesh: MeshShape | None = None
    memory_limit: float = math.inf
    fixed: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    together: tuple[tuple[str, str], ...] = ()
    own: tuple[MeshShape, dict[str, str]] | None = None
    compare: tuple[tuple[MeshShape, dict[str, str]], ...] = ()
    alternatives: int = 3
    name: str = "program"
    deadline: float = math.inf
    say: Callable[[str], None] = dataclasses.field(default=lambda text: None, compare=False, repr=False)
    memo: Memo = dataclasses.field(default_factory=Memo, compare=False, repr=False)

    def allows(self, cost: LayoutCost) -> bool:
        """Whether a layout lowers and is what the caller asked for."""
        if cost.problem or cost.memory_bytes > self.memory_limit:  # rules that do not lower may not even be legible
            return False
        mesh = parse_mesh_shape(cost.mesh_shape)
        rules = parse_rules(cost.layout_rules, mesh)
        return ((self.mesh is None or mesh == self.mesh)
                and all(rules.get(dim) == axis for dim, axis in self.fixed.items())
                and all(rules.get(one) == rules.get(other) for one, other in self.together))

    def searched(self, cost: LayoutCost) -> bool:
        """Whether all layouts of its kind compete with a legible one: of more axes than the search considers there are
        those alone that somebody names, and so it is with dims that nobody knows to be right."""
        mesh = parse_mesh_shape(cost.mesh_shape)
        rules = parse_rules(cost.layout_rules, mesh)
        effect = Candidate(0.0, mesh, {dim: mesh.names.index(axis) for dim, axis in rules.items()}).effect
        used = sum(bool(dims) for dims, _ in effect)
        # Where no link tells devices apart, the axes over which nothing is split are as good as one.
        axes = len(effect) if order_matters(self.machine, self.devices) else used + (used < len(effect))
        return not cost.doubt and (self.mesh is not None or axes <= MAX_AXES)

    def expired(self) -> bool:
        """Whether there is no time left."""
        return time.perf_counter() >= self.deadline

    def unconstrained(self) -> Request:
        """The same of any layout: no mesh shape, no dim and no memory is prescribed."""
        return dataclasses.replace(self, mesh=None, memory_limit=math.inf, fixed={}, together=())

    def too_large(self, memory_bytes: float) -> str:
        """What a layout needs beyond the memory limit, or without one beyond a device; empty where it needs no more."""
        limit = self.machine.memory_bytes if math.isinf(self.memory_limit) else self.memory_limit
        if memory_bytes <= limit:
            return ""
        holder = f"a device of {self.machine.name} holds" if limit == self.machine.memory_bytes else "the limit is"
        return f"needs {needed_text(memory_bytes, limit)} per device, {holder} {bytes_text(limit)}"


def compared_layouts(compare: Sequence[GivenLayout], devices: int) -> list[tuple[MeshShape, dict[str, str]]]:
    """The layouts to compare with.

    Raises:
      UsageError: one does not parse, or is of another number of devices.
    """
    found = [parse_layout(entry) for entry in compare]
    for shape, _ in found:
        if shape.devices != devices:
            raise UsageError(f"layout to compare with has mesh {shape} of {shape.devices} devices, not {devices}; "
                             "compare meshes of one size")
    return found


def bytes_limit(given: float | str | None, machine: Machine) -> float:
    """The memory limit that a caller gave, in bytes; infinite for None.

    Raises:
      UsageError: it does not parse, or is not above zero.
    """
    if given is None:
        return math.inf
    if isinstance(given, str):
        limit = parse_bytes(given)
        return machine.memory_bytes if limit is None else limit
    if not given > 0:
        raise UsageError(f"memory_limit={shortened(given)}: give a positive number of bytes")
    return float(given)
