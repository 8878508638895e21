"""What is wrong with flags, in a line of ours: what absl and argparse find, and values that are empty."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from typing import Any, NoReturn

from absl import flags as absl_flags

from pase_mtf.errors import UsageError, shortened

__all__ = ["FlagParser", "check_not_empty", "read_words"]

_WANTED = {"bool": "true or false", "int": "a whole number", "float": "a number",
           "comma separated list of strings": "names or numbers separated by commas, on one line"}
_SEE = "--help lists the flags"


class FlagParser(argparse.ArgumentParser):
    """Whose errors are one line, without the usage, and whose flags are to be written out: a flag of another command
    would be taken for one that begins like it."""

    def __init__(self, **named: Any):
        super().__init__(allow_abbrev=False, **named)

    def error(self, message: str) -> NoReturn:
        """Raises UsageError with the message."""
        raise UsageError(f"{' '.join(message.split())}; {_SEE}")


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


def read_words(flags: absl_flags.FlagValues, arguments: Sequence[str]) -> list[str]:
    """Sets absl's flags by a command line.

    Args:
      flags: that are known.
      arguments: the program's name, and what follows it.

    Returns:
      The words that are no flags.

    Raises:
      UsageError: an unknown flag, a value that does not parse, or a --flagfile that cannot be read.
    """
    try:
        return flags(arguments)[1:]
    except absl_flags.Error as error:
        raise UsageError(f"{_text(error, flags)}; {_SEE}") from error
    except UnicodeDecodeError as error:
        files = [word if "=" in word else f"{word}={value}" for word, value in itertools.pairwise([*arguments, ""])
                 if word.lstrip("-").partition("=")[0] == "flagfile"]
        raise UsageError(f"{shortened(' '.join(files), 200, quoted=False)}: is no text; give a file with a flag on "
                         "every line") from error
    except ValueError as error:  # a value behind --noFLAG
        raise UsageError(f"{shortened(error, 200)}; leave it out") from error


def _text(error: Exception, flags: absl_flags.FlagValues) -> str:
    """What is wrong with a command line, in one line: of a value that does not parse, what to give instead."""
    text, reason = str(error), f": {error.__context__}"
    if text.startswith("flag --") and text.endswith(reason):
        text = text.removeprefix("flag ").removesuffix(reason)
        text += f": give {_WANTED[flags[text[2:].partition('=')[0]].flag_type()]}"
    return " ".join(text.split())
