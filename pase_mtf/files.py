"""Files that are written whole or not at all, and read with errors a person can use."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tempfile
from typing import TYPE_CHECKING, Any

from pase_mtf.errors import FormatError, UsageError, shortened

if TYPE_CHECKING:
    from pydantic import TypeAdapter

__all__ = ["check_schema", "path_of", "read_json", "remove_partial", "write_atomically"]

_PARTIAL = ".partial-"
"""Stands in the name of a file that is being written."""


def path_of(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """The path itself (UsageError: it is none; an integer would be an open file)."""
    if not isinstance(path, (str, os.PathLike)) or "\0" in os.fspath(path):
        raise UsageError(f"{shortened(path)} is no path; give the path of a file")
    return path


def write_atomically(path: str | os.PathLike[str], data: str | bytes) -> None:
    """Writes beside `path`, then renames: a reader sees the old file or the new one, never a part.

    Raises:
      UsageError: the file cannot be written (no such folder, no permission, disk full).
    """
    path = os.fspath(path_of(path))
    raw = data.encode() if isinstance(data, str) else data
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{os.path.basename(path)}{_PARTIAL}",
                                             dir=os.path.dirname(path) or ".")
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


def remove_partial(folder: str) -> None:
    """Removes what a process that was killed has left of files that it was writing there."""
    for name in os.listdir(folder):
        if name.startswith(".") and _PARTIAL in name[1:]:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(folder, name))


def read_json(path: str | os.PathLike[str], expected: str, version: int) -> dict[str, Any]:
    """Reads a JSON file of ours and checks that it says it is one.

    Args:
      path: the file.
      expected: the value its "format" key must have.
      version: the newest version of that format that this program understands.

    Raises:
      FormatError: missing, not JSON, another format, or a newer version.
    """
    path_of(path)
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
    except OSError as error:
        raise FormatError(f"cannot read {path}: {error.strerror or error}; check the path") from error
    except (ValueError, RecursionError, MemoryError) as error:  # also numbers of thousands of digits
        raise FormatError(f"{path}: not a JSON file ({shortened(error)}): truncated or foreign; "
                          f"give a whole {expected} file") from error
    if not isinstance(data, dict) or data.get("format") != expected:
        raise FormatError(f"{path}: not a {expected} file: truncated or foreign; give one that this program wrote")
    found = data.get("version")
    if type(found) is not int or not 1 <= found <= version:
        raise FormatError(f"{path}: {expected} version {shortened(found)}, this program reads up to {version}; "
                          "upgrade pase_mtf")
    return data


def check_schema(path: str | os.PathLike[str], data: object, schema: type) -> None:
    """Checks the types of what a file holds: nothing is converted, and nothing may stand there that is not known.

    Args:
      path: the file, for the message.
      data: what `read_json` returned, less what the schema does not tell.
      schema: a typing_extensions.TypedDict. Numbers are finite.

    Raises:
      FormatError: names the first entry that does not fit.
    """
    from pydantic import ValidationError  # loaded where there is a file: a tenth of a second
    try:
        _adapter(schema).validate_python(data, strict=True)
    except (ValidationError, RecursionError) as error:
        if isinstance(error, RecursionError):
            raise FormatError(f"{path}: nested too deep; it is foreign") from error
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "file"
        problem = "is missing" if first["type"] == "missing" else (
            "is not known" if first["type"] == "extra_forbidden" else
            f"is {shortened(first['input'])}: {first['msg'][:1].lower()}{first['msg'][1:]}")
        raise FormatError(f"{path}: {shortened(where, 80, quoted=False)} {problem}; it was changed or is foreign"
                          ) from error


@functools.cache
def _adapter(schema: Any) -> TypeAdapter[object]:
    from pydantic import TypeAdapter  # as in `check_schema`
    schema.__pydantic_config__ = {"strict": True, "extra": "forbid", "allow_inf_nan": False}
    return TypeAdapter(schema)
