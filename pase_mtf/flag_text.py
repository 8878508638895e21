"""What absl finds wrong with flags, in our words."""

from __future__ import annotations

from typing import Any

__all__ = ["flag_text"]

_WANTED = {"bool": "true or false", "int": "a whole number", "float": "a number"}


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
