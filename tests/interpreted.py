"""A plugin of pytest under which kernels run as the Python that they are written in (NUMBA_DISABLE_JIT=1).

NumPy checks every index then, which compiled code does not. Two things are in place of what only compiled code has: the
C library's clock, and arrays at an address.
"""

import ctypes
import time

import numpy as np

from pase_mtf.search import compiled, matrices


def _clock(_, at):
    """clock_gettime(2)."""
    (ctypes.c_int64 * 2).from_address(at.data)[:] = divmod(time.monotonic_ns(), 10 ** 9)


def _pointer(address):
    return ctypes.cast(int(address), ctypes.POINTER(ctypes.c_double))


compiled._clock_gettime, matrices._pointer = _clock, _pointer
np.seterr(over="ignore", divide="ignore")  # hashes wrap around; a logarithm of none is -inf
