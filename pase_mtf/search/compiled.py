"""Compiles the inner loops with numba, and keeps the compiled code on disk."""

from __future__ import annotations

import functools
import glob
import os
import re
import time
import uuid
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar, cast, overload

import numpy as np
from numba import njit, types
from numba.core.caching import IndexDataCacheFile

from pase_mtf.files import locked

__all__ = ["compiled", "seconds_now"]

_Function = TypeVar("_Function", bound=Callable[..., object])


@functools.cache
def _newest(folder: Path) -> int:
    """When a module with compiled functions, of a folder or of one in it, was last changed: nanoseconds."""
    return max((os.stat(path).st_mtime_ns for path in folder.rglob("*.py") if b"@compiled" in path.read_bytes()),
               default=0)


class _SafeCacheFile(IndexDataCacheFile):  # type: ignore[misc]
    """Numba's index of compiled code, which never names the code of something else.

    Numba writes the index before the code, and numbers the files of code from 1 again when the module has changed: a
    process that is killed in between leaves an index that names old code, and two that compile one function for
    different types at once take the same number. And it looks at the function's own module only, while the code of what
    it calls in others is part of what is kept. And what it kept of a function before that changed, or moved to another
    line, stays for good.
    """

    def save(self, key: object, data: object) -> None:
        """Saves the code under a name of its own, then the index; removes what no index names any more."""
        with locked(f"{self._index_path}.lock"):
            name = self._data_name_pattern.format(number=uuid.uuid4().int >> 96)
            overloads = {**self._load_index(), key: name}
            self._save_data(name, data)
            self._save_index(overloads)
            kept = {self._index_name, f"{self._index_name}.lock", *overloads.values()}
            at_any_line = re.sub(r"-\d+(?=\.py\d+\w*\.nbi$)", "-[0-9]*", glob.escape(self._index_name))
            for path in Path(self._cache_path).glob(at_any_line.removesuffix("nbi") + "*"):
                if path.name not in kept:
                    path.unlink(missing_ok=True)


def _once_for_all_numbers(dispatcher: Any) -> Any:
    """Makes a compiled function the same one for a number that is written where it is called as for any other, which
    numba compiles one more each for: a fifth of all compiling."""
    if hasattr(dispatcher, "get_call_template"):  # none where numba is told not to compile
        template = dispatcher.get_call_template
        dispatcher.get_call_template = lambda args, kws: template(
            [types.unliteral(given) for given in args], {name: types.unliteral(given) for name, given in kws.items()})
    return dispatcher


def _keep_safely(dispatcher: Any) -> Any:
    """Makes a compiled function keep its code in `_SafeCacheFile`s; one that keeps none stays as it is."""
    file: Any = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    if type(file) is IndexDataCacheFile:
        file.__class__ = _SafeCacheFile
        file._source_stamp = (file._source_stamp, _newest(Path(__file__).resolve().parents[1]))
    return dispatcher


@overload
def compiled(function: _Function) -> _Function: ...


@overload
def compiled(*, fastmath: bool | Collection[str] = False, inline: bool = False, allocates: bool = True,
             ) -> Callable[[_Function], _Function]: ...


def compiled(function: Callable[..., object] | None = None, *, fastmath: bool | Collection[str] = False,
             inline: bool = False, allocates: bool = True) -> Callable[..., object]:
    """Decorator: compiles a function on its first call.

    The compiled code is kept beside the module, or in the user's cache directory where that cannot be written
    (NUMBA_CACHE_DIR names another). Where neither can, it is compiled anew in every process instead of failing. A
    module that is imported by a link finds what is kept for the file itself.

    Args:
      function: what to compile.
      fastmath: which of IEEE 754's rules need not be kept; as of numba.njit.
      inline: copy it into whatever compiled function calls it: passing a dozen arrays takes a tenth of a
        microsecond. For small functions that are called in the innermost loops.
      allocates: if not, it makes no array but views of those that it was given, and returns none: then references need
        not be counted, which takes an atomic instruction per array that is touched, dozens per call.
    """
    options = {"fastmath": fastmath, "inline": "always" if inline else "never", "_nrt": allocates}

    def compile_(inner: Callable[..., object]) -> Callable[..., object]:
        if not allocates and "ndarray" in str(inner.__annotations__.get("return")):
            raise TypeError(f"{inner.__name__} returns an array, whose references have to be counted")
        inner.__code__ = inner.__code__.replace(co_filename=os.path.realpath(inner.__code__.co_filename))
        try:
            return cast(Callable[..., object], _once_for_all_numbers(_keep_safely(njit(cache=True, **options)(inner))))
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            return cast(Callable[..., object], _once_for_all_numbers(njit(**options)(inner)))
    return compile_ if function is None else compile_(function)


# The C library's; POSIX.
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.voidptr))
_MONOTONIC = time.CLOCK_MONOTONIC


@compiled
def seconds_now() -> float:  # pragma: no cover (compiled)
    """Seconds on a clock that never goes back, for compiled code that has to stop in time."""
    found = np.empty(2, np.int64)
    _clock_gettime(_MONOTONIC, found.ctypes)
    return float(found[0]) + 1e-9 * float(found[1])
