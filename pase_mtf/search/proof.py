"""What proves an optimum: certificates and the potentials that they consist of; certificate.py says how."""

from __future__ import annotations

import dataclasses

import numpy as np

__all__ = ["Certificate", "Potential"]


@dataclasses.dataclass(frozen=True, eq=False)
class Potential:
    """What is moved from the edges between two layers to the layers themselves.

    Attributes:
      source, target: the layers, source < target. Several potentials of one pair add up.
      row_classes, column_classes: int32 [configurations] of source and target.
      rows, columns: float64 per class, the amounts.
    """

    source: int
    target: int
    row_classes: np.ndarray
    rows: np.ndarray
    column_classes: np.ndarray
    columns: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Certificate:
    """A proof that no assignment is cheaper: either potentials, or a layer whose domain is split, and a proof per part.

    Attributes:
      potentials: of every pair of layers that edges join.
      alone: whether their bound is said to be proof enough. The checker then looks at neighbours only if it is not:
        that costs twice as much. What is said decides on nothing else.
      searched: whether what they leave open is said to be searched sooner than eliminated, as `alone` is said.
      layer: the layer whose domain is split; -1 where potentials prove the bound.
      part: the configurations of that layer in the first part.
      proofs: for the assignments with that layer inside and outside of `part`.
    """

    potentials: tuple[Potential, ...] = ()
    layer: int = -1
    part: tuple[int, ...] = ()
    proofs: tuple[Certificate, ...] = ()
    alone: bool = True
    searched: bool = False
