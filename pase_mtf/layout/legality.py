"""Which layouts an unchanged program really lowers under, by stock `mtf.Lowering`, to the values of one device.

What stock Mesh-TF 0.1.21 does to a split differs from what an operation declares, and from what our own lowering can
do: it cannot move a dim between mesh axes in a reshape, differentiate a pending sum, or sum what a generic gradient
leaves in parts. The rule of every operation (`operations.registry`) says which dims stay whole, which may not share an
axis, and which tensors may not be pending sums when it reads them; here that is collected, and asked.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

from pase_mtf.compat import mtf
from pase_mtf.layout.space import expressible
from pase_mtf.operations.alike import Alike
from pase_mtf.operations.facts import trains
from pase_mtf.operations.flow import Ways
from pase_mtf.operations.protocols import Dims, dims_of
from pase_mtf.operations.registry import is_known, read_by, rule_of
from pase_mtf.operations.stock_reshape import order_of_axes_tells, reshape_problem
from pase_mtf.operations.stock_sums import PendingSum, ReducedSum

__all__ = ["Problem", "StockLegality"]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Why a layout does not lower, or not to right values.

    Attributes:
      operation: the name of the Mesh-TF operation; empty where none is the cause.
      dims: the dims whose splits cause it.
      reason: for people.
      known: whether it is certain; else nobody knows what an operation does to a split.
      depends: whether other splits may lift it.
    """

    operation: str
    dims: tuple[str, ...]
    reason: str
    known: bool = True
    depends: bool = False

    def __str__(self) -> str:
        return f"{f'operation {self.operation}, ' * bool(self.operation)}dim {' and '.join(self.dims)}: {self.reason}"


class StockLegality:
    """What the operations of a graph, those in loops too, demand of a layout.

    Attributes:
      sizes: dim name -> size -> the first operation that has it with that size.
      whole: dim name -> the problem that any split of it causes.
      apart: pairs of dims that may not share a mesh axis -> the problem.
      shards: dim name -> (number of shards it must have, operation, why).
      strides: dim name -> (devices from one part to the next that its axis must have, the problem where it has not).
      together: pairs of dims that have to share a mesh axis, or both be whole -> the problem where they do not.
      reshapes: (dims before, dims after) -> operation.
      once: dims of a tensor of which no two devices may hold the same block -> the problem where they do.
      unknown: operations of classes without a rule, which are tried.
      twice: operations whose gradients count something twice, under no split, too -> what that comes through.
    """

    def __init__(self, graph: mtf.Graph, outputs: Iterable[mtf.Tensor] = (), devices: int = 0, *,
                 rebuilt: bool = False, alike: Alike | None = None) -> None:
        """Looks at every operation.

        Args:
          graph: any Mesh-TF graph.
          outputs: tensors that are fetched besides those that operations read; where there are none and nothing that is
            trained is assigned, nobody has told them, and it may be any.
          devices: p, to which slices that were laid out beforehand must fit (0: not checked).
          rebuilt: the graph will be built anew for the layout: such slices will be what the layout makes of them.
          alike: numbers of operations that are alike, if they are at hand: their tensors are looked at once.
        """
        self.sizes: dict[str, dict[int, str]] = {}
        self.whole: dict[str, Problem] = {}
        self.apart: dict[frozenset[str], Problem] = {}
        self.shards: dict[str, tuple[int, str, str]] = {}
        self.strides: dict[str, tuple[int, Problem]] = {}
        self.together: dict[frozenset[str], Problem] = {}
        self.reshapes: dict[tuple[Dims, Dims], str] = {}
        self.once: dict[Dims, Problem] = {}
        self.hopeless: list[Problem] = []
        self.unknown: list[mtf.Operation] = []
        self.twice: dict[str, str] = {}
        self.devices, self.rebuilt = devices, rebuilt
        self._reduced: dict[tuple[PendingSum, str], Problem] = {}  # sums that may not be pending
        self._sums: dict[mtf.Tensor, PendingSum] = {}
        self._used: set[mtf.Tensor] = set(outputs)
        self._spaces: set[Dims] = set()
        self._alike, self._looked_at = alike, set[int]()  # numbers of operations
        self._reshape_cache: dict[tuple[Hashable, ...], tuple[str, bool]] = {}
        self._using: dict[str, list[tuple[frozenset[str], Dims, Dims, str]]] = {}  # dim name -> reshapes
        position = {operation: number for number, operation in enumerate(_with_bodies(graph.operations))}
        self._ways = Ways(position)
        if not self._used and not trains(list(position)):
            self._used.update(tensor for operation in graph.operations for tensor in operation.outputs)
        # Tensor -> the stages of loops in which it is read; of what is, or may be, fetched that of no loop, too.
        self._read_in: dict[mtf.Tensor, set[Hashable]] = {tensor: {()} for tensor in self._used}
        for operation, stages in _in_stages(graph.operations):
            for tensor in read_by(operation):
                self._read_in.setdefault(tensor, set()).add(stages)
        for operation in position:
            self._used.update(read_by(operation))
            loop = rule_of(operation).loop(operation)
            if loop is not None:
                self._used.update(tensor for stage in loop.stages for tensor in stage.outputs)
        self._read: set[mtf.Tensor] = set()  # by an operation that reduces pending sums
        for operation in graph.operations:
            self.scan(operation)
        for name in self.sizes:
            if name == "stacked":
                self._mark_whole(next(iter(self.sizes[name].values())), [name],
                                 "mtf.Lowering stacks variables under this name")
            elif not expressible(name):
                self._mark_whole(next(iter(self.sizes[name].values())), [name],
                                 "layout rules cannot mention this name")

    # -- what single operations demand: `operations.protocols.StockDemands` ------------------------------------------
    def _mark_whole(self, operation: str, names: Iterable[str], reason: str, *, known: bool = True) -> None:
        for name in names:
            if known and name in self.whole and not self.whole[name].known:
                del self.whole[name]
            self.whole.setdefault(name, Problem(operation, (name,), reason, known))

    def keep_whole(self, operation: mtf.Operation, names: Iterable[str], reason: str, *, known: bool = True) -> None:
        """These dims may not be split, or (not `known`) nobody knows whether they may."""
        self._mark_whole(operation.name, names, reason, known=known)

    def keep_apart(self, operation: mtf.Operation, dims: Dims, what: str) -> None:
        """Dims that one tensor (or iteration space) has: none twice, no two of them on one axis."""
        if dims in self._spaces:
            return
        self._spaces.add(dims)
        names = [name for name, _ in dims]
        for name, size in dims:
            self.sizes.setdefault(name, {}).setdefault(size, operation.name)
            if names.count(name) > 1:
                self.keep_whole(operation, [name], f"it stands twice in {what}")
        for one, other in itertools.combinations(sorted(set(names)), 2):
            pair = frozenset((one, other))
            if pair not in self.apart:
                self.apart[pair] = Problem(operation.name, (one, other), f"both are in {what}, on one mesh axis")

    def need_reduced(self, operation: mtf.Operation, tensor: mtf.Tensor, reason: str) -> None:
        """This tensor may not be a pending sum."""
        pending = self._sums.get(tensor)
        if pending is not None:
            self._reduced.setdefault((pending, reason), Problem(
                operation.name, tuple(sorted(pending.names())), reason, depends=not isinstance(pending, ReducedSum)))

    def refuse(self, operation: mtf.Operation, names: Iterable[str], reason: str) -> None:
        """No layout at all lowers."""
        self.hopeless.append(Problem(operation.name, tuple(names), reason))

    def need_shards(self, operation: mtf.Operation, name: str, shards: int, stride: int | None = None) -> None:
        """This dim has to be split into so many shards, so many devices from one to the next (None: on any axis)."""
        reason = f"its slices were laid out beforehand in {shards} shards"
        if stride is not None:
            reason += f", {stride} device{'s' * (stride > 1)} from one to the next"
            known = self.strides.setdefault(name, (stride, Problem(operation.name, (name,), reason)))
            if known[0] != stride:
                self.refuse(operation, [name], f"{reason}; those of {known[1].operation}, {known[0]}")
        self.shards.setdefault(name, (shards, operation.name, reason))

    def need_together(self, operation: mtf.Operation, names: tuple[str, str], shards: int) -> None:
        """These two dims have to be on one axis, of so many devices."""
        reason = f"its function of slices lowers only with {names[0]} and {names[1]} together on an axis of {shards}"
        for name in names:
            self.shards.setdefault(name, (shards, operation.name, reason))
        self.keep_together(names, Problem(operation.name, names, reason))

    def keep_together(self, names: tuple[str, str], problem: Problem) -> None:
        """These two dims have to be on one axis, or both on none; the problem where they are not."""
        self.together.setdefault(frozenset(names), problem)

    def reshape(self, operation: mtf.Operation, old: Dims, new: Dims) -> None:
        """A tensor of these dims is reshaped to those."""
        if (old, new) in self.reshapes:
            return
        self.reshapes[old, new] = operation.name
        names = frozenset(dim for dim, _ in (*old, *new))
        for dim in names:
            self._using.setdefault(dim, []).append((names, old, new, operation.name))

    def is_used(self, tensor: mtf.Tensor) -> bool:
        """Whether anybody reads the tensor."""
        return tensor in self._used

    def ways(self, source: mtf.Tensor, targets: Iterable[mtf.Tensor]) -> list[tuple[mtf.Operation, mtf.Tensor]]:
        """The ways by which tensors are made of another one, as far as not told yet (`operations.flow.Ways`)."""
        return self._ways.between(source, targets)

    def need_no_copies(self, operation: mtf.Operation, dims: Dims, reason: str) -> None:
        """No two devices may hold the same block of a tensor of these dims."""
        self.once.setdefault(dims, Problem(operation.name, tuple(name for name, _ in dims), reason, depends=True))

    def counts_twice(self, operation: mtf.Operation, through: mtf.Operation | None) -> None:
        """The gradient of an operation counts twice what comes through another one; None: it has one input twice."""
        self.twice.setdefault(operation.name, "" if through is None else through.name)

    def scan(self, operation: mtf.Operation, inside: frozenset[mtf.Tensor] | None = None) -> None:
        """Looks at an operation; within a loop, given all tensors that are made in it."""
        rule = rule_of(operation)
        if not self._is_like_another(operation):
            for tensor in (*operation.inputs, *operation.outputs):
                self.keep_apart(operation, dims_of(tensor.shape), "one tensor")
        if not is_known(operation):
            self.unknown.append(operation)
        if inside is not None:
            self._check_captured(operation, inside)
        loop = rule.loop(operation)
        if loop is not None:  # what it begins with is summed before anything in it reads
            self._read.update(variable.start for variable in loop.variables)
        rule.stock_demands(operation, self)
        sums = {tensor: pending for tensor, pending in rule.stock_sums(operation, self._sums).items()
                if pending.names()}
        # An addition of sums over the same dims finishes neither, whatever is split; of others lowering tells.
        passed = rule.forwards_sums and not set(sums.values()).isdisjoint(map(self._sums.get, operation.inputs))
        if not rule.is_view and not passed:
            self._read.update(read_by(operation))
        self._sums.update(sums)

    def _is_like_another(self, operation: mtf.Operation) -> bool:
        """Whether an operation with the same tensors has been looked at before."""
        number = None if self._alike is None else self._alike.number(operation)
        if number is None or number not in self._looked_at:
            self._looked_at.update(() if number is None else (number,))
            return False
        return True

    def _check_captured(self, operation: mtf.Operation, inside: frozenset[mtf.Tensor]) -> None:
        """A sum that is reduced in a loop exists nowhere else: it has to be reduced by somebody before."""
        rule = rule_of(operation)
        # What works on the parts makes sums of its own, which are not priced as often as the loop turns.
        passes = rule.forwards_sums and bool(rule.stock_sums(operation, self._sums))
        for tensor in read_by(operation):
            alone = len(self._read_in.get(tensor, ())) == 1  # then nobody outside of this stage needs it
            if tensor not in inside and tensor not in self._read and (passes or not alone):
                self.need_reduced(operation, tensor, "a sum that a loop finishes cannot be used after it")

    # -- questions ---------------------------------------------------------------------------------------------------
    def dims(self) -> tuple[str, ...]:
        """The dims that may be split at all, in the order of the graph."""
        return tuple(name for name in self.sizes if name not in self.whole)

    @property
    def order_tells(self) -> bool:
        """Whether a layout may be legal in one order of the mesh axes and not in another."""
        return bool(self.strides) or any(order_of_axes_tells(old, new, self.whole) for old, new in self.reshapes)

    def divisor(self, name: str) -> int:
        """What every size of the dim divides by."""
        return math.gcd(*self.sizes[name])

    def problem_of(self, name: str, axis: int, sizes: Sequence[int]) -> Problem | None:
        """Why a dim alone cannot be split by an axis."""
        if name not in self.sizes:
            return Problem("", (name,), "no tensor has this dim")
        if name in self.whole:
            return self.whole[name]
        for size, operation in self.sizes[name].items():
            if size % sizes[axis]:
                return Problem(operation, (name,), f"size {size} does not divide by {sizes[axis]}")
        if name in self.shards and self.shards[name][0] != sizes[axis]:
            _, operation, reason = self.shards[name]
            return Problem(operation, (name,), reason)
        if name in self.strides and self.strides[name][0] != math.prod(sizes[axis + 1:]):
            return self.strides[name][1]
        return self._sums_and_reshapes({name: axis}, sizes, alone=True)

    def problem_of_pair(self, one: str, axis: int, other: str, other_axis: int,
                        sizes: Sequence[int]) -> Problem | None:
        """Why two dims, each of which can be split so alone, cannot be both."""
        pair = frozenset((one, other))
        if axis == other_axis and pair in self.apart:
            return self.apart[pair]
        if axis != other_axis and pair in self.together:
            return self.together[pair]
        return self._reshape_problems({one: axis, other: other_axis}, sizes, alone=True)

    def problem(self, axis_of: Mapping[str, int], sizes: Sequence[int]) -> Problem | None:
        """Why a layout does not lower or gives wrong values: the first problem found, None if it is legal.

        Args:
          axis_of: dim name -> index of its mesh axis, for the dims that have a rule.
          sizes: of the mesh axes.
        """
        if self.hopeless:
            return self.hopeless[0]
        axis_of = {name: axis for name, axis in axis_of.items() if name in self.sizes}
        for name, (_, operation, reason) in self.shards.items():
            if name not in axis_of:
                return Problem(operation, (name,), reason)
        for pair, apart in self.together.items():
            if len({axis_of.get(name) for name in pair}) > 1:
                return apart
        for name, axis in axis_of.items():
            problem = self.problem_of(name, axis, sizes)
            if problem is not None:
                return problem
        for one, other in itertools.combinations(axis_of, 2):
            problem = self.problem_of_pair(one, axis_of[one], other, axis_of[other], sizes)
            if problem is not None:
                return problem
        # No two of its dims are on one axis: that was asked above.
        copied = (found for dims, found in self.once.items() if math.prod(
            sizes[axis_of[name]] for name, _ in dims if name in axis_of) < math.prod(sizes))
        return self._sums_and_reshapes(axis_of, sizes) or next(copied, None)

    def _sums_and_reshapes(self, axis_of: Mapping[str, int], sizes: Sequence[int], *,
                           alone: bool = False) -> Problem | None:
        """Of a whole layout; or (`alone`) of a part of one, whatever splits are added to it."""
        for (pending, _), problem in self._reduced.items():
            if not (alone and problem.depends) and pending.axes(axis_of, sizes):
                split = tuple(name for name in problem.dims if name in axis_of)
                return dataclasses.replace(problem, dims=split)
        return self._reshape_problems(axis_of, sizes)

    def _may_be_mended(self, old: Dims, new: Dims, axis_of: Mapping[str, int], sizes: Sequence[int]) -> bool:
        """Whether a reshape that fails where some dims are split is right where others are, too, on the same axes: one
        makes room for the next."""
        if len(axis_of) < 2:
            return False
        others = sorted({name for name, _ in (*old, *new)} - axis_of.keys() - self.whole.keys())
        axes = sorted(set(axis_of.values()))
        for count in range(1, 2 * len(axes) - len(axis_of) + 1):  # an axis splits one dim before, and one after
            for names in itertools.combinations(others, count):
                for places in itertools.product(axes, repeat=count):
                    more = {**axis_of, **dict(zip(names, places, strict=True))}
                    taken = [[more[name] for name, _ in dims if name in more] for dims in (old, new)]
                    if all(len(set(found)) == len(found) for found in taken) and not reshape_problem(
                            old, new, more, sizes)[0]:
                        return True
        return False

    def _reshape_problems(self, axis_of: Mapping[str, int], sizes: Sequence[int], *,
                          alone: bool = False) -> Problem | None:
        """Of the reshapes that have all these dims (any of them, where there are more than two); `alone`: but for what
        other splits may mend."""
        for names, old, new, operation in self._reshapes_with(axis_of):
            mine = {name: axis_of[name] for name in axis_of if name in names}
            # What is whole mends nothing, and is another where dims of unknown classes are looked at as if known.
            key = old, new, tuple(mine.items()), tuple(sizes), names.intersection(self.whole)
            if key not in self._reshape_cache:
                reason, _ = reshape_problem(old, new, mine, sizes)
                self._reshape_cache[key] = reason, bool(reason) and self._may_be_mended(old, new, mine, sizes)
            reason, mended = self._reshape_cache[key]
            if reason and not (alone and mended):
                before = ", ".join(f"{name}={size}" for name, size in old)
                after = ", ".join(f"{name}={size}" for name, size in new)
                return Problem(operation, tuple(mine), f"reshape [{before}] to [{after}]: {reason}", depends=mended)
        return None

    def _reshapes_with(self, wanted: Iterable[str]) -> Iterable[tuple[frozenset[str], Dims, Dims, str]]:
        wanted = list(wanted)
        if len(wanted) <= 2:
            for entry in self._using.get(wanted[0], ()) if wanted else ():
                if wanted[-1] in entry[0]:
                    yield entry
            return
        seen = set()
        for name in wanted:
            for entry in self._using.get(name, ()):
                if entry[1:3] not in seen:
                    seen.add(entry[1:3])
                    yield entry


def _in_stages(operations: Iterable[mtf.Operation], around: tuple[Hashable, ...] = (),
               ) -> Iterator[tuple[mtf.Operation, tuple[Hashable, ...]]]:
    """Every operation, those in loops too, with the stages of loops that it stands in, outermost first."""
    for operation in operations:
        yield operation, around
        loop = rule_of(operation).loop(operation)
        for number, stage in enumerate(loop.stages if loop is not None else ()):
            yield from _in_stages(stage.operations, (*around, (operation, number)))


def _with_bodies(operations: Iterable[mtf.Operation]) -> Iterator[mtf.Operation]:
    for operation in operations:
        yield operation
        yield from _with_bodies(rule_of(operation).body(operation))
