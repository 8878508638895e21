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
    # What the gradients of convolutions unfold (`cost.unfolded`) is far more than what they make: those of two layers,
    # one after the other, are of two moments.
    unfolds = np.array([fact is not None and fact.kind == "convolution" and fact.role != "convolution"
                        for fact in steps.tensors.maker], bool)
    layer_at, kernels = np.full(places + 1, -1), unfolds[intervals.tensor]
    layer_at[intervals.begin[kernels]] = np.array(steps.tensors.layer, np.int64)[intervals.tensor[kernels]]
    found: list[int] = []
    together = largest = 0.0
    unfolding = -1  # the layer whose kernels run at this moment
    for place, (live, new) in enumerate(zip(np.cumsum(born - gone).tolist(), born.tolist(), strict=True)):
        union, most, layer = together + new, max(largest, live), int(layer_at[place])
        is_other = min(layer, unfolding) >= 0 and layer != unfolding
        if (found and place != places - 1 and place - 1 not in order.ended and not is_other
                and union <= (1 + _JOINED) * most):
            together, largest, unfolding = union, most, max(unfolding, layer)
            found.append(found[-1])
        else:
            together, largest, unfolding = live, live, layer
            found.append(found[-1] + 1 if found else 0)
    return np.array(found[:places])
