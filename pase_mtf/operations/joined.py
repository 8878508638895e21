"""Functions of slices that put blocks together, or take a tensor apart into blocks: two dims on one mesh axis.

A program that cuts space into blocks has tensors with a dim of blocks (`nx_block`) and tensors with a whole dim (`nx`),
and goes from one to the other by a function of slices: on a device that holds one block, `field[:, 0]` is that device's
part of the whole. Such a function does not fit its declared shapes where nothing is split. It does where the dim of
blocks and the whole dim are on one axis, of as many devices as there are blocks.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from pase_mtf.compat import mtf, tf

__all__ = ["Joined", "in_blocks", "joined_dims"]

# Ways to pair the dims of one function that are looked at.
_MOST_PAIRINGS = 50


class Joined(NamedTuple):
    """Two dims that have to be on one mesh axis.

    Attributes:
      given, made: one that the function takes and does not make, and one that it makes and does not take.
      parts: number of devices of the axis.
    """

    given: str
    made: str
    parts: int


_KNOWN: weakref.WeakKeyDictionary[mtf.Operation, tuple[Joined, ...]] = weakref.WeakKeyDictionary()


def joined_dims(operation: mtf.SlicewiseOperation) -> tuple[Joined, ...]:
    """The dims that a function of slices has to have on one axis; none where it fits its declared shapes by itself, or
    where no pairing of declared splittable dims makes it fit."""
    if operation not in _KNOWN:
        _KNOWN[operation] = _find(operation)
    return _KNOWN[operation]


def _find(operation: mtf.SlicewiseOperation) -> tuple[Joined, ...]:
    given = dict(_splittable(operation, operation.inputs))
    made = dict(_splittable(operation, operation.outputs))
    gone = [name for name in given if name not in made]
    new = [name for name in made if name not in given]
    if not gone or not new or _fits(operation, {}):
        return ()
    for pairing in itertools.islice(_pairings(gone, new), _MOST_PAIRINGS):
        joined = tuple(Joined(one, other, min(given[one], made[other])) for one, other in pairing)
        parts = {name: pair.parts for pair in joined for name in (pair.given, pair.made)}
        if all(size % parts.get(name, 1) == 0 for name, size in (*given.items(), *made.items())) and _fits(
                operation, parts):
            return joined
    return ()


def in_blocks(operation: mtf.SlicewiseOperation, joined: Sequence[Joined],
              slices: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """What the function makes of whole dims: it is called for every block, as on the device that would hold it.

    Args:
      operation: the function of slices.
      joined: its `joined_dims`; the slices hold all of these dims.
      slices: of the inputs.

    Returns:
      Slices of the outputs, which hold all of these dims.
    """
    def block(tensor: mtf.Tensor, of: tf.Tensor, place: Sequence[int]) -> tf.Tensor:
        for pair, number in zip(joined, place, strict=True):
            if pair.given in tensor.shape.dimension_names:
                axis = tensor.shape.dimension_names.index(pair.given)
                of = tf.split(of, pair.parts, axis)[number]
        return of

    places = list(itertools.product(*(range(pair.parts) for pair in joined)))
    results = []
    for place in places:
        made = operation._tf_fn(*(block(tensor, of, place) for tensor, of in zip(
            operation.inputs, slices, strict=True)))
        results.append(list(made) if isinstance(made, (tuple, list)) else [made])
    outputs = []
    for tensor, cells in zip(operation.outputs, zip(*results, strict=True), strict=True):
        rest = list(cells)
        for pair in reversed(joined):  # the last varies fastest
            rows = [rest[start:start + pair.parts] for start in range(0, len(rest), pair.parts)]
            names = tensor.shape.dimension_names
            rest = [tf.concat(row, names.index(pair.made)) if pair.made in names else row[0] for row in rows]
        outputs += rest
    return outputs


def _splittable(operation: mtf.SlicewiseOperation, tensors: Sequence[mtf.Tensor]) -> Iterator[tuple[str, int]]:
    """Name and size of the dims of these tensors that the program declares splittable."""
    for tensor in tensors:
        for dim in tensor.shape.dims:
            if dim.name in operation.splittable_dims:
                yield dim.name, dim.size


def _pairings(gone: Sequence[str], new: Sequence[str]) -> Iterator[tuple[tuple[str, str], ...]]:
    """Ways to pair some of these with some of those: as many as there are first, and in their order first."""
    for count in range(min(len(gone), len(new)), 0, -1):
        for some in itertools.combinations(gone, count):
            for others in itertools.permutations(new, count):
                yield tuple(zip(some, others, strict=True))


def _fits(operation: mtf.SlicewiseOperation, parts: Mapping[str, int]) -> bool:
    """Whether slices come out in the declared shape where dims are split into so many shards."""
    def slices(tensors: Sequence[mtf.Tensor]) -> list[list[int]]:
        return [[dim.size // parts.get(dim.name, 1) for dim in tensor.shape.dims] for tensor in tensors]
    with tf.Graph().as_default():
        try:
            outputs = operation._tf_fn(*(tf.placeholder(tensor.dtype, shape) for tensor, shape in zip(
                operation.inputs, slices(operation.inputs), strict=True)))
        except Exception:  # whatever a function says to shapes that it is not made for
            return False
        outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
        return [output.shape.as_list() for output in outputs] == slices(operation.outputs)
