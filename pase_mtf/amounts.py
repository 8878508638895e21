"""Amounts of memory, and bounds, as people write and read them."""

from __future__ import annotations

import math
import re

from pase_mtf.errors import UsageError

__all__ = ["bytes_text", "gap_text", "needed_text", "parse_bytes"]

_BYTES = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12,
          "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_bytes(text: str, what: str = "--memory_limit", *, of_device: bool = True) -> float | None:
    """Reads a memory limit: bytes, "11GB", "10.5GiB", "none" (infinite), or "device" (None).

    Args:
      text: as it was given.
      what: it was given as, for people.
      of_device: whether there is a device, and "device" is an answer.

    Raises:
      UsageError: it is something else, or nothing.
    """
    word = text.strip().lower()
    if word == "none" or (of_device and word == "device"):
        return None if word == "device" else math.inf
    match = re.fullmatch(r"(\d{1,30}(?:\.\d{1,30})?(?:e\+?\d{1,2})?)\s*([kmgt]?i?b)?", word)
    limit = float(match[1]) * _BYTES[match[2] or ""] if match and (match[2] or "") in _BYTES else 0.0
    if not limit >= 1.0:
        device = ", device (what a device of the machine holds)" if of_device else ""
        raise UsageError(f"{what}={text}: give bytes (11000000000), a size (11GB, 10.5GiB){device} or none")
    return limit


def bytes_text(amount: float) -> str:
    """Bytes in the unit that people would choose, such as "10.50 GiB"."""
    for unit, form in (("B", ".0f"), ("KiB", ".1f"), ("MiB", ".1f"), ("GiB", ".2f")):
        if amount < 1024:
            return f"{amount:{form}} {unit}"
        amount /= 1024
    return f"{amount:.2f} TiB"


def needed_text(needed: float, limit: float = math.inf) -> str:
    """Bytes that something needs, rounded up: it fits whoever allows as much. All of them where the limit that they are
    above would read the same."""
    if not math.isfinite(needed):
        return bytes_text(needed)
    places = {"B": 0, "GiB": 2, "TiB": 2}
    number, unit = bytes_text(needed).split()
    step = 10.0 ** -places.get(unit, 1)
    text = f"{number} {unit}"
    if float(number) * _BYTES[unit.lower()] < needed:
        text = f"{float(number) + step:.{places.get(unit, 1)}f} {unit}"
    return f"{math.ceil(needed)} B" if text == bytes_text(limit) else text


def gap_text(gap: float, least: str = "the optimum") -> str:
    """How far something is above the least at most; rounded up, as what nobody has proven is not nothing.

    Args:
      gap: a fraction of the least; infinite: nothing is known.
      least: what that is, in words.
    """
    if not math.isfinite(gap):
        return "without a bound"
    return f"at most {max(1, math.ceil(1e4 * gap - 1e-6)) / 100:,g} % above {least}"
