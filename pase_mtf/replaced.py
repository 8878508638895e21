"""Code of others that does something else for a while, in the thread that wants it so and in no other."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

__all__ = ["replaced"]

_Function: TypeAlias = Callable[..., Any]

_LOCK = threading.RLock()  # Python may end a block that nobody needs any more wherever it is
_PLACES: dict[tuple[int, str], _Place] = {}
"""What stands in for functions now, by the module or class that holds them, which is held on to, and their name."""


class _Here(threading.local):
    """What one thread has in place of a function, the newest last."""

    def __init__(self) -> None:
        self.stack: list[_Function] = []


class _Place:
    """A function of a module or class, and what stands in for it while any thread has something else in its place.

    Attributes:
      users: how many blocks of all threads there are.
    """

    def __init__(self, holder: Any, name: str) -> None:
        self._holder, self._name, self.original = holder, name, getattr(holder, name)
        self.here, self.users = _Here(), 0
        here, original = self.here, self.original

        @functools.wraps(original)
        def call(*args: object, **kwargs: object) -> object:
            stack = here.stack
            return (stack[-1] if stack else original)(*args, **kwargs)
        self._call = call

    def is_there(self) -> bool:
        """Whether it stands in for the function: somebody else may have replaced it since."""
        return getattr(self._holder, self._name) is self._call

    def put(self) -> None:
        """Puts it in place of the function."""
        setattr(self._holder, self._name, self._call)

    def take_away(self) -> None:
        """Puts the function back."""
        setattr(self._holder, self._name, self.original)


@contextlib.contextmanager
def replaced(holder: object, name: str, make: Callable[[_Function], _Function] | None) -> Iterator[None]:
    """Within the block a function of a module or class is another one for this thread; others do not notice.

    As TensorFlow's default graph is one per thread, so is what is built in it. Blocks may nest, and threads may enter
    and leave theirs in any order: the function itself is put back when the last one of all threads ends.

    Args:
      holder: the module or class.
      name: of the function in it.
      make: makes the other one of what the thread has there so far, which it may call; None: the thread is to have the
        function as other threads have it, whatever block this one is in.
    """
    key = id(holder), name
    with _LOCK:
        place = _PLACES.get(key)
        if place is None or not place.is_there():  # what stands before one that somebody replaced goes on to call it
            place = _PLACES[key] = _Place(holder, name)
            place.put()
        place.users += 1
    # The list itself: a block that is left open ends wherever Python finds that nobody needs it any more.
    stack = place.here.stack
    try:
        # One of its own: the same function may stand there more than once.
        function = functools.partial(place.original) if make is None else make(stack[-1] if stack else place.original)
        stack.append(function)
        try:
            yield
        finally:
            stack.remove(function)
    finally:
        with _LOCK:
            place.users -= 1
            if not place.users and place.is_there():
                place.take_away()
                _PLACES.pop(key, None)
