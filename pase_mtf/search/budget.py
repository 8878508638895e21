"""What a search may use: time, and memory beside the network it was given."""

from __future__ import annotations

import dataclasses
import math
import time

from pase_mtf.arguments import as_float
from pase_mtf.errors import UsageError, shortened

__all__ = ["SEARCH_MEMORY", "Budget", "DoesNotFitError"]

SEARCH_MEMORY = 2 << 30
"""Bytes that a search may hold unless told otherwise."""
_FOREVER = 1e18
"""Seconds; more of them make no difference."""


class DoesNotFitError(MemoryError):
    """Something is not made, as it would be larger than the memory that is left.

    Attributes:
      needed: bytes that it takes.
    """

    def __init__(self, what: str, needed: int) -> None:
        """Takes what it is, and its bytes."""
        super().__init__(f"{needed} bytes for {what}")
        self.needed = needed


@dataclasses.dataclass(frozen=True)
class Budget:
    """Time and memory of a search.

    Attributes:
      deadline: time.perf_counter() value at which to stop.
      memory: bytes that may still be held, beside the network given and what a process needs anyway.
      held: bytes that are held already, of the same sum.
    """

    deadline: float = math.inf
    memory: float = SEARCH_MEMORY
    held: float = 0.0

    @classmethod
    def of(cls, time_limit: float | None, memory: float = SEARCH_MEMORY) -> Budget:
        """The budget of a search that starts now.

        Raises:
          UsageError: time or memory is no positive number.
        """
        seconds, nbytes = _FOREVER if time_limit is None else as_float(time_limit), as_float(memory)
        if not seconds > 0:
            raise UsageError(f"time limit of {shortened(time_limit)} seconds; give a positive number, or none")
        if not nbytes > 0:
            raise UsageError(f"search memory of {shortened(memory)} bytes; give a positive number")
        return cls(math.inf if time_limit is None else time.perf_counter() + min(seconds, _FOREVER), nbytes)

    @property
    def seconds(self) -> float:
        """What is left of the time; never negative."""
        return max(0.0, self.deadline - time.perf_counter())

    @property
    def over(self) -> bool:
        """Whether the deadline has passed."""
        return time.perf_counter() > self.deadline

    def time_limit(self, part: float = 1.0) -> float | None:
        """What is left of the time, or a part of it, as searches take it: None without an end, and never 0."""
        return None if self.deadline == math.inf else max(part * self.seconds, 1e-9)

    @property
    def used_up(self) -> str:
        """What there is no more of, where a search ended without a result: the tail of an error message."""
        if self.over:
            return "in time; raise the time limit"
        return f"within {self.held + self.memory:.4g} bytes; raise search_memory"

    def less(self, held: float) -> Budget:
        """What is left while so many more bytes are held."""
        left = math.inf if self.memory == math.inf else self.memory - held  # a part of it is infinite as well
        return dataclasses.replace(self, memory=left, held=self.held + held)

    def until(self, deadline: float) -> Budget:
        """The same memory, and the time until then."""
        return dataclasses.replace(self, deadline=deadline)

    def check_time(self) -> None:
        """Raises TimeoutError once the deadline has passed: for steps that have no result before they are done."""
        if self.over:
            raise TimeoutError

    def require(self, needed: float) -> None:
        """Refuses what cannot be done within the memory.

        Raises:
          UsageError: so many bytes are more than there are.
        """
        if needed > self.memory:
            raise UsageError(f"search memory of {self.held + self.memory:.4g} bytes: this network needs "
                             f"{self.held + needed:.4g} at least; "
                             "raise search_memory, or offer fewer configurations")
