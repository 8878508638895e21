"""Matrices that lie in several arrays, for compiled code, which takes no list of arrays without looking at each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from pase_mtf.search.compiled import compiled

if TYPE_CHECKING:
    from llvmlite.ir import IRBuilder, Value
    from numba.core.base import BaseContext
    from numba.core.typing.templates import Signature

__all__ = ["Matrices", "matrix"]


class Matrices(NamedTuple):
    """Where matrices of float64 are in memory. Whoever has them keeps the arrays that they lie in.

    Attributes:
      at: int64 [matrices], the address of the first entry.
      shapes: int64 [matrices, 2]; entries are row-major.
    """

    at: np.ndarray
    shapes: np.ndarray

    @classmethod
    def of(cls, values: Sequence[np.ndarray], number: np.ndarray, begin: np.ndarray, shapes: np.ndarray) -> Matrices:
        """Matrices of these shapes, of which each begins somewhere in one of these contiguous arrays of float64.

        Raises:
          ValueError: one of them does not lie within its array.
        """
        lengths = np.array([len(array) for array in values], np.int64)
        if ((begin < 0) | (shapes < 0).any(axis=1) | (begin + shapes[:, 0] * shapes[:, 1] > lengths[number])).any():
            raise ValueError("a matrix that does not lie within its array")
        starts = np.array([_address(array) for array in values], np.int64)
        return cls(starts[number] + 8 * begin, shapes)

    def with_another(self, added: np.ndarray) -> Matrices:
        """These, and a contiguous array of two dimensions."""
        return Matrices(np.append(self.at, _address(added)), np.concatenate([self.shapes, [added.shape]]))


def _address(array: np.ndarray) -> int:
    if array.dtype != np.float64 or not array.flags.c_contiguous:
        raise ValueError(f"an array of {array.dtype}, contiguous: {array.flags.c_contiguous}")
    address: int = array.__array_interface__["data"][0]  # a tenth of the time of array.ctypes
    return address


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(_: BaseContext, address: types.Type,
             ) -> tuple[Signature, Callable[..., Value]]:  # pragma: no cover (compiled)
    """The pointer to a float64 at an address."""
    def generate(context: BaseContext, builder: IRBuilder, signature: Signature, values: Sequence[Value]) -> Value:
        return builder.inttoptr(values[0], context.get_value_type(signature.return_type))
    return types.CPointer(types.float64)(types.int64), generate


@compiled
def matrix(matrices: Matrices, number: int) -> np.ndarray:  # pragma: no cover (compiled)
    """float64 [rows, columns], a view."""
    found: np.ndarray = carray(_pointer(matrices.at[number]), (matrices.shapes[number, 0], matrices.shapes[number, 1]))
    return found
