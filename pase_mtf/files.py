"""Files that are written whole or not at all, and never in place of what a command reads; read with errors a person can
use."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import filelock
import platformdirs

from pase_mtf.errors import FormatError, UsageError, shortened

if TYPE_CHECKING:
    from pydantic import TypeAdapter

__all__ = ["check_outputs", "check_schema", "is_empty", "locked", "one_at_a_time", "path_of", "read_json",
           "remove_partial", "says_format", "take_lock", "write_atomically"]

_PARTIAL = ".partial-"
"""Stands in the name of a file that is being written."""
_BEGIN = 32
"""Characters of a file's name that the name begins with under which it is written: names may have 255 bytes, or 143."""
_HEAD = 4096
"""Bytes of a file of ours, among which it says what it is."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""What file systems say that have no locks."""


def path_of(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """The path itself (UsageError: it is none; an integer would be an open file)."""
    if not isinstance(path, (str, os.PathLike)) or "\0" in os.fspath(path):
        raise UsageError(f"{shortened(path)} is no path; give the path of a file")
    return path


def write_atomically(path: str | os.PathLike[str], data: str | bytes) -> None:
    """Writes beside `path`, then renames: a reader sees the old file or the new one, never a part.

    A link stays one: what it leads to is replaced. A file that is replaced keeps its permissions; a new one has those
    that the umask leaves. What of a text has no encoding (of a path that is no UTF-8, say) is written as "\\udcff".

    Raises:
      UsageError: the file cannot be written (no such folder, no permission, disk full).
    """
    path = os.fspath(path_of(path))
    raw = data.encode(errors="backslashreplace") if isinstance(data, str) else data
    target = os.path.realpath(path) if os.path.islink(path) else path
    folder, name = os.path.split(target)
    temporary = os.path.join(folder, f".{name[:_BEGIN]}{_PARTIAL}{os.urandom(8).hex()}")
    try:
        mode = stat.S_IMODE(os.stat(target).st_mode) if os.path.exists(target) else None
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else mode)
        with os.fdopen(handle, "wb") as file:
            if mode is not None:
                os.fchmod(handle, mode)  # the umask may have left less
            file.write(raw)
            file.flush()
            os.fsync(handle)
        os.replace(temporary, target)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; free space or choose another place") from error
    finally:  # also where a signal came
        if os.path.exists(temporary):
            os.unlink(temporary)


def check_outputs(outputs: Mapping[str, str | None], inputs: Iterable[tuple[str, str | None]] = (), *,
                  may_replace: Callable[[str], bool] = lambda path: False, otherwise: str = "") -> None:
    """Refuses files that a command is to write, before it computes anything: each is a new file in a folder that can
    be written to, or one that may be replaced; and it is no file that the command reads or writes besides.

    Args:
      outputs: flag -> the file that it names; None: none.
      inputs: flags and the files that are read for them.
      may_replace: whether a file that exists may be, where it is none of the others.
      otherwise: ends the line about a file that may not: what else to do than choose another name.

    Raises:
      UsageError: names the first that cannot be meant.
    """
    read, seen = list(inputs), dict[str, str]()
    for flag, path in outputs.items():
        if path is None:
            continue
        named = f"{flag}={shortened(path_of(path), 200, quoted=False)}"
        folder = os.path.dirname(path) or os.curdir
        if not path.strip():
            raise UsageError(f"{flag} is empty; name a file, or leave the flag out")
        if os.path.isdir(path):
            raise UsageError(f"{named} is a folder; name a file")
        if os.path.exists(path) and not os.path.isfile(path):
            # It may have no end to read to, and what is renamed to it takes its place for everybody.
            raise UsageError(f"{named} is a device or a pipe; name a file")
        if not os.path.isdir(folder):
            raise UsageError(f"{named}: there is no folder {folder}; make it first, or choose another place")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(f"{named}: the folder {folder} cannot be written to; choose another place")
        for other, file in read:
            if file is not None and os.path.exists(file) and _is_same(path, file):  # else it is a name
                raise UsageError(f"{named} is read for {other}, and would be lost; choose another name")
        for other, file in seen.items():
            if _is_same(path, file):
                raise UsageError(f"{named} is the file of {other} as well; choose another name")
        if os.path.lexists(path) and not is_empty(path) and not may_replace(path):
            raise UsageError(f"{named} exists; choose another name{otherwise}")
        seen[flag] = path


def is_empty(path: str | os.PathLike[str]) -> bool:
    """Whether it is a file in which nothing is, as `mktemp` makes them: that is nothing to lose."""
    return os.path.isfile(path) and os.path.getsize(path) == 0


def _is_same(path: str, other: str) -> bool:
    """Whether two paths lead to one file, by whatever links; of files that are not there yet, whether they will."""
    try:
        return os.path.samefile(path, other)
    except OSError:
        return os.path.realpath(path) == os.path.realpath(other)


def remove_partial(folder: str) -> None:
    """Removes what a process that was killed has left of files that it was writing there."""
    for name in os.listdir(folder):
        if name.startswith(".") and _PARTIAL in name[1:]:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(folder, name))


def take_lock(lock: filelock.BaseFileLock) -> bool:
    """Acquires a lock, and returns whether it is held: some file systems have none, and who comes goes on without (NFS
    whose server serves none, FUSE).

    Raises:
      filelock.Timeout: somebody else holds it.
      OSError: it cannot be looked at, as of another user's: somebody may hold it.
    """
    try:
        lock.acquire()
    except NotImplementedError:
        return False
    except OSError as error:  # Timeout is one, too
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True


@contextlib.contextmanager
def locked(path: str | os.PathLike[str]) -> Iterator[None]:
    """Within the block no other process is in one of the same file, as far as there are locks (`take_lock`).

    Raises:
      OSError: the file cannot be made, or be looked at.
    """
    lock = filelock.FileLock(path)
    take_lock(lock)
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def one_at_a_time(what: str) -> Iterator[None]:
    """Within the block no other process of this user does the same on this host, as far as there are locks.

    Args:
      what: a name for it, of letters.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, RuntimeError):  # a cache that cannot be written to, or no home for one
            folder = platformdirs.user_cache_path("pase_mtf", appauthor=False)
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder / f"{what}.lock"))
        yield


def says_format(path: object, expected: str) -> bool:
    """Whether a file says of itself that it is one of ours of that format, whatever else is wrong with it."""
    try:
        if not os.path.isfile(path):  # type: ignore[arg-type]
            return False  # who waits at the other end of a pipe would be waited for
        with open(path, "rb") as file:  # type: ignore[call-overload]
            head = file.read(_HEAD)
    except (OSError, TypeError, ValueError):
        return False
    return f'"{expected}"'.encode() in head


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
