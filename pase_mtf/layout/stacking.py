"""Which variables mtf.Lowering stacks, and which of these a program cannot do without.

Before it lowers a graph, mtf.Lowering puts small variables of one shape into one (`Graph.rewrite_stack_variables`), and
rewrites the operations that read and assign them; but not those that read a variable anew, nor those in loops: these
look for a variable that is no more. How many are stacked depends on the layout, which says how small slices are.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Hashable, Iterable, Iterator
from typing import NamedTuple

from pase_mtf.compat import mtf
from pase_mtf.operations.protocols import dims_of
from pase_mtf.operations.registry import rule_of

__all__ = ["Stacking", "is_not_stacked"]

# Of mtf.Graph.rewrite_stack_variables and mtf.Lowering.autostack.
_MOST_ELEMENTS = 2 ** 29
_MANY_SLICES, _MOST_OF_MANY, _MOST_OF_FEW = 2 ** 16, 2 ** 27, 2 ** 16

_NOT_STACKED: weakref.WeakSet[mtf.Graph] = weakref.WeakSet()


def is_not_stacked(graph: mtf.Graph) -> None:
    """Says of a graph that its program lowers it without stacking anything."""
    _NOT_STACKED.add(graph)


class _Named(NamedTuple):
    """An operation that names a variable, where that is not rewritten."""

    operation: str
    variable: mtf.Operation


class Stacking:
    """The variables of a graph that are named where they are not rewritten, and those that they would be stacked with.
    """

    def __init__(self, graph: mtf.Graph) -> None:
        self._variables = len(graph.all_variables)
        self._named: dict[mtf.Operation, _Named] = {}
        assigned: dict[mtf.Operation, list[mtf.Operation]] = {}
        for operation in graph.operations:
            rule = rule_of(operation)
            for variable, _ in rule.assigns(operation):
                assigned.setdefault(variable, []).append(operation)
            for named in (*_read_anew([operation]), *_of_loops(rule.body(operation))):
                self._named.setdefault(named.variable, named)
        groups: dict[Hashable, list[mtf.Operation]] = {}
        for variable in () if graph in _NOT_STACKED else graph.all_variables:
            dtype = variable.dtype
            groups.setdefault((variable.mesh, dims_of(variable.shape), dtype.master_dtype, dtype.slice_dtype,
                               dtype.activation_dtype, variable.trainable,
                               tuple(assigned.get(variable, ()))), []).append(variable)
        self._groups = [group for group in groups.values() if len(group) > 1 and any(
            variable in self._named for variable in group)]

    def problem(self, impl: mtf.MeshImpl) -> tuple[str, str] | None:
        """What is named of those that are stacked under a layout, and would not be if nothing were split: (the
        operation that does, why that goes wrong). Where they are stacked in any case, the program knows how to lower:
        there is no choice."""
        if impl.size == 1:
            return None
        most = _MOST_OF_MANY if self._variables * impl.size >= _MANY_SLICES else _MOST_OF_FEW
        for group in self._groups:
            size = group[0].shape.size
            whole, count = (max(1, min(_MOST_ELEMENTS // size, most // slices)) for slices in (
                size, impl.slice_size(group[0].shape)))
            if any(variable in self._named for variable in _stacked(group, whole)):
                continue
            for variable in _stacked(group, count):
                if variable in self._named:
                    return self._named[variable].operation, (
                        f"mtf.Lowering stacks {variable.name} with others of its shape, and then it is not found; "
                        "mtf.Lowering(…, autostack=False) lifts that")
        return None


def _stacked(group: list[mtf.Operation], count: int) -> Iterator[mtf.Operation]:
    """Those of variables of one shape that are put into one with others, where so many go into one at most."""
    for begin in range(0, len(group) if count > 1 else 0, count):
        stacked = group[begin:begin + count]
        yield from stacked if len(stacked) > 1 else ()


def _read_anew(operations: Iterable[mtf.Operation]) -> Iterator[_Named]:
    for operation in operations:
        leader = rule_of(operation).leader(operation)
        if leader is not operation and rule_of(leader).is_variable:
            yield _Named(operation.name, leader)


def _of_loops(operations: Iterable[mtf.Operation]) -> Iterator[_Named]:
    for operation in operations:
        rule = rule_of(operation)
        yield from itertools.chain(
            (_Named(operation.name, variable) for variable, _ in rule.assigns(operation)), _read_anew([operation]),
            _of_loops(rule.body(operation)))
