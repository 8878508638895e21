"""When tensors are there in one order of the operations, and the moments of a step that are told apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pase_mtf.compat import mtf

__all__ = ["Found", "Interval", "moments"]

# Moments that follow each other are taken for one at which all is there that is there at any of them, if that adds no
# more than this to the largest.
_JOINED = 0.01


class Interval(NamedTuple):
    """What is held from one place in the order of the step to another, both included.

    Attributes:
      tensor: of its layout.
      begin, end: the places.
      times: as much as so many of the tensor.
      waits_until: where devices have to sum it, the place until which it may be held; of what an update makes of a
        gradient, where devices have to sum that, the place at which it is there instead.
      shared_until: where one device makes it for several, the place until which it is there besides.
      own_until: the place until which its own layer needs it, where other layers, too, read it as it lies or as copies.
    """

    tensor: mtf.Tensor
    begin: int
    end: int
    times: float = 1.0
    waits_until: int = -1
    shared_until: int = -1
    own_until: int = -1


class Found(NamedTuple):
    """When tensors are there, in one order of the operations.

    Attributes:
      intervals: of all tensors.
      reads: (tensor, layer) -> the places from which and until which a copy of it for the layer is there; until which
        it is where one device makes it for several, one of which writes in its place; and the place at which what it
        lies in is made.
      updated: variable -> the place at which it is assigned.
      places: how many there are. The last is no operation's: all gradients that had to wait have been used.
      layers: tensor -> the number of the layer that makes it, of those that are read.
      last_gradient: the place at which the backward pass is over.
    """

    intervals: Sequence[Interval]
    reads: dict[tuple[mtf.Tensor, int], tuple[int, int, int, int]]
    updated: dict[mtf.Operation, int]
    places: int
    layers: dict[mtf.Tensor, int]
    last_gradient: int


def moments(order: Found, nbytes: Mapping[mtf.Tensor, float]) -> list[int]:
    """The number of the moment that each place belongs to; at a moment all is there that is there at any of its places.
    What may be moved counts as if it were, and all that is made as if it had to be summed.

    Args:
      order: of the operations.
      nbytes: tensor -> its bytes, of all that `order` names.

    Returns:
      A number per place, which never falls. The last place, which is no operation's, has one of its own.
    """
    places = order.places
    settled = places - 1
    born, gone = [0.0] * (places + 1), [0.0] * (places + 1)

    def there(held: float, begin: int, end: int) -> None:
        born[begin] += held
        gone[end + 1 if end >= begin else begin] += held

    for interval in order.intervals:
        held = interval.times * nbytes[interval.tensor]
        there(held, interval.begin, interval.end)
        there(held, interval.begin, interval.begin)
    for (tensor, layer), (begin, end, *_) in order.reads.items():
        if layer != order.layers[tensor]:
            there(nbytes[tensor], begin, end)
    found: list[int] = []
    live = together = largest = 0.0
    for place in range(places):
        live += born[place] - gone[place]
        union, most = together + born[place], max(largest, live)
        if found and place != settled and union <= (1 + _JOINED) * most:
            together, largest = union, most
            found.append(found[-1])
        else:
            together = largest = live
            found.append(found[-1] + 1 if found else 0)
    return found
