"""TensorFlow's errors are a page of text; the user gets the line of it that says what happened."""

from __future__ import annotations

__all__ = ["what_happened"]

_TELLING = ("OOM when allocating", "No space left", "Permission denied", "Disk quota", "not found in checkpoint")
_EMPTY = ("Graph execution error", "Detected at node", "During handling", "Traceback")


def what_happened(error: BaseException, most: int = 160) -> str:
    """The most telling line of an error's message, at most that many characters long."""
    lines = [line.strip() for line in str(getattr(error, "message", error)).splitlines() if line.strip()]
    telling = [line for line in lines if any(word in line for word in _TELLING)]
    other = [line for line in lines if not line.startswith(_EMPTY)]
    return (telling or other or lines or [type(error).__name__])[0][:most]
