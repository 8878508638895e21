"""Variable scopes that are left at once: TensorFlow goes through all scopes of a graph whenever one is left."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterator, Mapping

from pase_mtf.compat import variable_scope
from pase_mtf.replaced import replaced

__all__ = ["quick_scopes"]


class _Counts(dict[str, int]):
    """How often each variable scope was opened, as TensorFlow keeps it; what stands below a scope is found by its name.
    """

    def __init__(self, counts: Mapping[str, int]) -> None:
        super().__init__(counts)
        self._names = sorted(self)

    def __copy__(self) -> _Counts:
        return _Counts(self)

    def __setitem__(self, name: str, count: int) -> None:
        if name not in self:
            bisect.insort(self._names, name)
        super().__setitem__(name, count)

    def close(self, scope: str) -> None:
        """Forgets what stands below a scope: not to be known and to be counted as zero are the same."""
        first = bisect.bisect_left(self._names, f"{scope}/")
        end = bisect.bisect_left(self._names, f"{scope}0", first)  # "0" is what comes after "/"
        for name in self._names[first:end]:
            self.pop(name, None)
        del self._names[first:end]


@contextlib.contextmanager
def quick_scopes() -> Iterator[None]:
    """Within the block leaving a variable scope takes no longer in a graph of many scopes than in a small one.

    Mesh-TF opens one for most operations. Names come out as ever.
    """
    with replaced(variable_scope._VariableScopeStore, "close_variable_subscopes", _quick):
        yield


def _quick(original: Callable[..., None]) -> Callable[..., None]:
    def close(self: variable_scope._VariableScopeStore, scope: str | None) -> None:
        if scope is None:
            original(self, scope)
            return
        if not isinstance(self.variable_scopes_count, _Counts):
            self.variable_scopes_count = _Counts(self.variable_scopes_count)
        self.variable_scopes_count.close(scope)
    return close
