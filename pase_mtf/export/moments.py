"""The moments of a step that are told apart, in one order of its operations."""

from __future__ import annotations

import numpy as np

from pase_mtf.export.lives import Found
from pase_mtf.export.steps import Steps

__all__ = ["moments"]

# Moments that follow each other are taken for one at which all is there that is there at any of them, if that adds no
# more than this to the largest.
_JOINED = 0.01


def moments(order: Found, steps: Steps) -> np.ndarray:
    """The number of the moment that each place belongs to; at a moment all is there that is there at any of its places.
    What may be moved counts as if it were, and all that is made as if it had to be summed; what a loop adds up is, when
    it has ended, and what an iteration adds has gone by then.

    Args:
      order: of the operations.
      steps: of the graph.

    Returns:
      A number per place, which never falls. The last place, which is no operation's, has one of its own.
    """
    places, nbytes = order.places, np.array(steps.tensors.nbytes)
    born, gone = np.zeros(places + 1), np.zeros(places + 1)

    def there(held: np.ndarray, begin: np.ndarray, end: np.ndarray) -> None:
        np.add.at(born, begin, held)
        np.add.at(gone, np.where(end >= begin, end + 1, begin), held)

    intervals, copies = order.intervals, order.copies
    held = intervals.times * nbytes[intervals.tensor]
    there(held, intervals.begin, intervals.end)
    there(held, intervals.begin, intervals.begin)
    moved = steps.copies.layer != np.array(steps.tensors.layer, np.int64)[steps.copies.name]
    there(nbytes[steps.copies.name[moved]], copies.begin[moved], copies.end[moved])
    found: list[int] = []
    together = largest = 0.0
    for place, (live, new) in enumerate(zip(np.cumsum(born - gone).tolist(), born.tolist(), strict=True)):
        union, most = together + new, max(largest, live)
        if found and place != places - 1 and place - 1 not in order.ended and union <= (1 + _JOINED) * most:
            together, largest = union, most
            found.append(found[-1])
        else:
            together = largest = live
            found.append(found[-1] + 1 if found else 0)
    return np.array(found[:places])
