"""Files that are written whole or not at all, and read with errors a person can use."""

import json
import os
import tempfile
from typing import Any

from pase_mtf.errors import FormatError, UsageError

__all__ = ["read_json", "write_atomically"]


def write_atomically(path: str | os.PathLike[str], data: str | bytes) -> None:
    """Writes beside `path`, then renames: a reader sees the old file or the new one, never a part.

    Raises:
      UsageError: the file cannot be written (no such folder, no permission, disk full).
    """
    path = os.fspath(path)
    raw = data.encode() if isinstance(data, str) else data
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{os.path.basename(path)}.", dir=os.path.dirname(path) or ".")
        with os.fdopen(handle, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        raise UsageError(f"cannot write {path}: {error.strerror}; free space or choose another place") from error


def read_json(path: str | os.PathLike[str], expected: str, version: int) -> dict[str, Any]:
    """Reads a JSON file of ours and checks that it says it is one.

    Args:
      path: the file.
      expected: the value its "format" key must have.
      version: the newest version of that format that this program understands.

    Raises:
      FormatError: missing, not JSON, another format, or a newer version.
    """
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
    except OSError as error:
        raise FormatError(f"cannot read {path}: {error.strerror}; check the path") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: not a JSON file ({error}); it is truncated or foreign") from error
    if not isinstance(data, dict) or data.get("format") != expected:
        raise FormatError(f"{path}: not a {expected} file; it is truncated or foreign")
    if not isinstance(data.get("version"), int) or data["version"] > version:
        raise FormatError(f"{path}: {expected} version {data.get('version')!r}, this program reads up to {version}; "
                          "upgrade pase_mtf")
    return data
