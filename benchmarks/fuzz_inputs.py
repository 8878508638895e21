"""Inputs for `benchmarks.fuzz`: files that are changed or damaged, and what is done with one."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
import warnings
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np

from pase_mtf.errors import PaseError

__all__ = ["VALUES", "Target", "csv_of", "damaged", "json_of", "lines_of", "npz_of"]

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 2 ** 31, 2 ** 63, 2 ** 64, -2 ** 63, 10 ** 30, 10 ** 400, 0.0, -0.0, 0.5, 1e-300,
    5e-324, 1e300, 1.7e308, float("nan"), float("inf"), "", "8", "yes", "batch", "\0", "é" * 9, "x" * 10_000, [], [[]],
    [None], [1, 2], ["batch", 8], [["batch", 8]], {}, {"a": 1}, {"": {}})
_DTYPES = ("f2", "f4", "f8", ">f8", "g", "i1", "i4", "i8", "u8", "?", "c16", "O", "U3", "S3", "M8[s]", "m8[s]")


class Target:
    """One kind of input.

    Attributes:
      name: for people.
      make: (source of randomness, number of the input) -> what is fed to `read`.
      read: reads it and uses it; a PaseError refuses it.
    """

    def __init__(self, name: str, make: Callable[[random.Random], Any], read: Callable[[Any], object]) -> None:
        """Takes the parts."""
        self.name, self.make, self.read = name, make, read

    def refuses(self, source: random.Random) -> bool:
        """Whether an input is refused, as it should be, rather than taken.

        Raises:
          AssertionError: the refusal is no single line.
          Exception: whatever else came of it.
        """
        made = self.make(source)
        try:
            with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
                warnings.simplefilter("error")
                self.read(made)
        except PaseError as error:
            text = str(error)
            if not text or "\n" in text:
                raise AssertionError(f"no single line of use: {text[:300]!r}") from error
            return True
        return False


def _value(source: random.Random) -> Any:
    """One of `VALUES`; what is put into it later is put into a copy."""
    return copy.deepcopy(source.choice(VALUES))


def _changed(data: Any, source: random.Random) -> Any:
    """The same with one to three places changed: another value there, nothing, or something new beside it."""
    data = json.loads(json.dumps(data))
    for _ in range(source.choice((1, 1, 1, 2, 3))):
        place, keys = data, None
        while isinstance(place, (dict, list)) and place and (keys is None or source.random() < 0.8):
            keys = place, source.choice(list(place) if isinstance(place, dict) else range(len(place)))
            place = place[keys[1]]
        if keys is None:
            return _value(source)
        holder, key = keys
        kind = source.randrange(6)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[source.choice(("surprise", "", str(key) + "s"))] = _value(source)
        elif kind == 1:
            holder.insert(key, _value(source))
        elif kind == 2 and isinstance(place, (int, float)) and not isinstance(place, bool):
            factor = source.choice((-1, 0, 2, 0.5, 1e30))
            holder[key] = place * factor if abs(place) < 1e300 else -place
        else:
            holder[key] = _value(source)
    return data


def damaged(raw: bytes, source: random.Random) -> bytes:
    """The same bytes, some of them changed, missing or repeated."""
    kind, at = source.randrange(5), source.randrange(len(raw) + 1)
    if kind == 0:
        return raw[:at]
    if kind == 1:
        return raw[:at] + bytes(source.randrange(256) for _ in range(source.randrange(1, 9))) + raw[at + 1:]
    if kind == 2:
        return raw[:at] + raw[at + source.randrange(1, 200):]
    if kind == 3:
        return raw[:at] + raw[:at]
    extra = source.choice((b"[" * 50_000, b'{"a":' * 50_000, b"9" * 6000, b"\0", b"\xff\xfe", b"NaN"))
    return raw[:at] + extra + raw[at:]


def json_of(data: dict[str, Any], source: random.Random, seal: Callable[[dict[str, Any]], None] | None = None) -> bytes:
    """A file with these contents, changed; with the hash, mostly, that it then has to have."""
    if source.random() < 0.25:
        return damaged(json.dumps(data).encode(), source)
    changed = _changed(data, source)
    if seal is not None and isinstance(changed, dict) and source.random() < 0.9:
        with contextlib.suppress(TypeError, KeyError, AttributeError, RecursionError):
            seal(changed)
    return json.dumps(changed).encode()


def lines_of(text: str, source: random.Random) -> bytes:
    """A file of lines of JSON, one of them changed; or damaged."""
    if source.random() < 0.25:
        return damaged(text.encode(), source)
    lines = text.encode().splitlines()
    number = source.randrange(len(lines))
    lines[number] = json_of(json.loads(lines[number]), source)
    return b"\n".join(lines)


def csv_of(text: str, source: random.Random) -> bytes:
    """A file of rows, one to three of its values changed; or damaged."""
    if source.random() < 0.25:
        return damaged(text.encode(), source)
    rows = [line.split(",") for line in text.splitlines()]
    for _ in range(source.randrange(1, 4)):
        row = source.choice(rows)
        kind, place = source.randrange(6), source.randrange(len(row) + 1)
        if kind == 0:
            row.insert(place, str(source.choice(VALUES)))
        elif kind == 1:
            del row[place:place + 1]
        elif kind == 2:
            rows.append(list(row))
        else:
            row[place:place + 1] = [source.choice((*map(str, VALUES[:-12]), "9" * 6000, "1e999", '"', "\0", "\r"))]
    return "\n".join(map(",".join, rows)).encode(errors="replace")


def npz_of(members: dict[str, np.ndarray], source: random.Random) -> bytes:
    """A network file, changed."""
    members = dict(members)
    for _ in range(source.choice((1, 1, 2))):
        name = source.choice(list(members))
        array, kind = members[name], source.randrange(6)
        with np.errstate(all="ignore"), contextlib.suppress(ValueError, TypeError, OverflowError):
            if kind == 0:
                del members[name]
            elif kind == 1:
                members[name] = array.astype(source.choice(_DTYPES))
            elif kind == 2:
                members[name] = array.reshape(-1)[:source.randrange(array.size + 1)]
            elif kind == 3:
                members[name] = np.array(source.choice(VALUES[:26]))
            elif kind == 4 and array.size:
                flat = array.copy().reshape(-1)
                flat[source.randrange(array.size)] = source.choice(VALUES[3:23])
                members[name] = flat.reshape(array.shape)
            else:
                members[name] = np.zeros((source.choice((0, 3, 10 ** 7)), *array.shape[1:]), array.dtype)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, array in members.items():
            content = io.BytesIO()
            np.lib.format.write_array(content, np.asarray(array), allow_pickle=True)
            archive.writestr(f"{name}.npy", content.getvalue())
    return damaged(buffer.getvalue(), source) if source.random() < 0.2 else buffer.getvalue()
