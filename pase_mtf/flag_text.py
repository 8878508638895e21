"""What is wrong with flags, in our words: what absl finds, and values that are empty."""

from __future__ import annotations

from typing import Any

from pase_mtf.errors import UsageError

__all__ = ["check_not_empty", "flag_text"]

_WANTED = {"bool": "true or false", "int": "a whole number", "float": "a number"}


def check_not_empty(flag: str, value: str | None, instead: str) -> None:
    """Refuses a flag that is given without a value, as `--resume=$RUN` is where RUN is not set: it would count as not
    given.

    Args:
      flag: its name, with its dashes.
      value: None: it is not given.
      instead: what to do, if not to leave the flag out.

    Raises:
      UsageError: the value is empty.
    """
    if value is not None and not value.strip():
        raise UsageError(f"{flag} is empty; {instead}, or leave the flag out")


def flag_text(error: Exception, flags: Any) -> str:
    """What is wrong with a command line, in one line: of a value that does not parse, what to give instead.

    Args:
      error: an absl.flags.Error.
      flags: the absl.flags.FlagValues that raised it.
    """
    text, reason = str(error), f": {error.__context__}"
    if text.startswith("flag --") and text.endswith(reason):
        text = text.removeprefix("flag ").removesuffix(reason)
        text += f": give {_WANTED[flags[text[2:].partition('=')[0]].flag_type()]}"
    return " ".join(text.split())
