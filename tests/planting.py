"""Wrong lowerings: somewhere one all-reduce is left out, or two blocks of a tensor are swapped while it moves."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterator

import pytest

from pase_mtf.launch.arms import recipe
from pase_mtf.lowering import lowering, mesh

KINDS = ("all-reduce", "swap")


@dataclasses.dataclass
class Plant:
    """What is planted.

    Attributes:
      kind: of KINDS.
      number: the communication, among those of its kind in one lowering, that goes wrong; None: none, they are counted.
      seen: kind -> how many there were in the last lowering.
    """

    kind: str
    number: int | None = None
    seen: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def due(self, kind: str) -> bool:
        """Whether it is this communication's turn."""
        self.seen[kind] += 1
        return kind == self.kind and self.seen[kind] - 1 == self.number


@contextlib.contextmanager
def planted(plant: Plant, configurations: object = None) -> Iterator[None]:
    """Within the block, arms of these configurations (None: of any) are lowered wrongly, in every type of number."""
    lower, all_reduce, move = lowering.lower, mesh.all_reduce, lowering.move

    def wrong_all_reduce(tensors, members, devices, emitter, kind="SUM"):
        right = all_reduce(tensors, members, devices, emitter, kind)
        if kind != "SUM" or max(map(len, members)) == 1:
            return right
        return list(tensors) if plant.due("all-reduce") else right

    def wrong_move(tensors, source, target, shape, emitter):
        result = list(move(tensors, source, target, shape, emitter))
        parts = {positions[0]: part for part, positions in target.holders.items()}
        if source != target and len(parts) > 1 and plant.due("swap"):
            one, other = list(parts)[:2]
            result[one], result[other] = result[other], result[one]
        return result

    def lowered(graph, strategy, *rest, **more):
        if configurations is not None and strategy.configurations != configurations:
            return lower(graph, strategy, *rest, **more)
        plant.seen.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mesh, "all_reduce", wrong_all_reduce)
            patch.setattr(lowering, "move", wrong_move)
            return lower(graph, strategy, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "lower", lowered)
        yield
