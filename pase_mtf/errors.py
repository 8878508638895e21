"""The errors a user can cause. Each message is one line: the offending value, and what to do about it."""

__all__ = ["ClusterError", "DataError", "FormatError", "InfeasibleError", "MismatchError", "OutOfMemoryError",
           "PaseError", "UsageError", "nearest", "shortened"]

import difflib
import math
from collections.abc import Iterable


class PaseError(Exception):
    """Base of every error of ours; `exit_code` is what a command exits with when it meets one."""

    exit_code = 2


class UsageError(PaseError):
    """A flag or argument that cannot be used."""


class DataError(PaseError):
    """A data file that is missing, malformed or does not fit the model."""


class FormatError(PaseError):
    """A file of ours (graph, strategy, machine, network, checkpoint) that is truncated or foreign."""


class InfeasibleError(PaseError):
    """No strategy satisfies the constraints; names the constraint.

    Attributes:
      proven: whether there is none; where not, none was found.
      lower_bound: what one would cost at least, as far as that is known.
    """

    exit_code = 3

    def __init__(self, message: str, *, proven: bool = True) -> None:
        """Takes what is told."""
        super().__init__(message)
        self.proven, self.lower_bound = proven, math.inf if proven else -math.inf


class OutOfMemoryError(PaseError):
    """The devices ran out of memory."""

    exit_code = 4


class MismatchError(PaseError):
    """A strategy was made for another graph."""

    exit_code = 5


class ClusterError(PaseError):
    """A process of a run over several is missing, or was lost; names its rank."""

    exit_code = 7


def nearest(value: object, choices: Iterable[str]) -> str:
    """The tail of an error message about an unknown name: the nearest known name, and all of them."""
    choices = sorted(choices)
    close = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}(known: {', '.join(choices)})"


def shortened(value: object, most: int = 60, *, quoted: bool = True) -> str:
    """A value (or with `quoted=False` a text) in one line of an error message, its middle left out where it is long."""
    try:
        text = str(value) if isinstance(value, BaseException) or not quoted else repr(value)
    except Exception:  # numbers of thousands of digits, what nests too deep, what cannot be told at all
        text = f"a {type(value).__name__}"
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[:most - 20]} ... {text[-15:]}"
