"""The blocks that a model consists of, each of which may be computed once more in the backward pass.

A model says where its blocks are (`block`), whoever builds its program which of them to compute again (`recomputing`):
of these nothing is kept from the forward pass but what goes into them. Losses and gradients are the same: dropout draws
the same masks again, and batch normalisation finds the same statistics.

That is `mtf.recompute_grad`, but for how the second time waits for the gradients of the block's outputs: by a control
dependency, and not by a sum with gradients times 1e-30, which every device would have to reduce, and add to copies of
what goes in.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from pase_mtf.compat import mtf
from pase_mtf.errors import UsageError, nearest

__all__ = ["ALL", "block", "blocks_of", "check_blocks", "choices_of", "recomputing", "sets_of"]

ALL = "all"
"""In place of names: all blocks."""

_FEW = 6
"""Of so many blocks every set is a choice."""

_RECOMPUTED, _OFFERED = "_pase_mtf_recomputed", "_pase_mtf_blocks"

_Outputs = TypeVar("_Outputs")


def recomputing(graph: mtf.Graph, names: Collection[str]) -> None:
    """Blocks of these names (or `ALL`) that are added to the graph from now on are computed again."""
    setattr(graph, _RECOMPUTED, frozenset(names))


def blocks_of(graph: mtf.Graph) -> tuple[str, ...]:
    """The names of the blocks in a graph, in the order in which they were added."""
    return tuple(getattr(graph, _OFFERED, {}))


def choices_of(names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Which sets of blocks are offered to a search: of every tuple the first few, from none to all.

    Args:
      names: of all blocks.

    Returns:
      A tuple per block where they are few, else one per kind of block: names that differ in their last number only.
    """
    if len(names) <= _FEW:
        return tuple((name,) for name in names)
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(name.rstrip("0123456789"), []).append(name)
    return tuple(map(tuple, kinds.values()))


def sets_of(choices: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """All sets of blocks that `choices_of` offers, none first and all last."""
    return [tuple(itertools.chain.from_iterable(parts)) for parts in itertools.product(
        *([choice[:count] for count in range(len(choice) + 1)] for choice in choices))]


def block(name: str, function: Callable[..., _Outputs], inputs: Sequence[mtf.Tensor]) -> _Outputs:
    """A block of a model.

    Args:
      name: of its own in the model; names of blocks that are alike differ in their last number only.
      function: takes the inputs, returns a tensor or a tuple of them. Of what else it reads, floating tensors have to
        have a gradient; what it reads and does not take as an input is computed again without waiting for gradients.
      inputs: Mesh-TF tensors.

    Returns:
      What the function returns.
    """
    graph = inputs[0].graph
    offered = getattr(graph, _OFFERED, {})
    setattr(graph, _OFFERED, {**offered, name: None})
    if {name, ALL} & getattr(graph, _RECOMPUTED, frozenset()):
        return mtf.custom_gradient(function, _gradients, list(inputs))
    return function(*inputs)


def _gradients(explicit_inputs: list[mtf.Tensor], all_inputs: list[mtf.Tensor],
               forward_operations: list[mtf.Operation], outputs: list[mtf.Tensor], output_grads: list[mtf.Tensor],
               ) -> list[mtf.Tensor]:
    """The gradients of a block by all that it reads (see `mtf.custom_gradient`), after it is computed once more."""
    seen = {tensor: mtf.depend(tensor, output_grads[:1]) if tensor in explicit_inputs else tensor
            for tensor in all_inputs}
    again, made = outputs[0].graph.clone_operations(forward_operations, seen)
    found: list[mtf.Tensor] = mtf.gradients([made[tensor] for tensor in outputs], list(seen.values()), output_grads,
                                            again)
    return found


def check_blocks(graph: mtf.Graph, model: str) -> None:
    """Refuses names that were asked for and that no block of the graph has.

    Args:
      graph: of the whole model.
      model: its name.

    Raises:
      UsageError: names the first of them.
    """
    known = blocks_of(graph)
    for name in sorted(getattr(graph, _RECOMPUTED, frozenset()) - {ALL, *known}):
        raise UsageError(f"recompute={name}: {model} has no such block; {nearest(name, known)}")
