"""Cost networks as npz files.

A file holds the arrays of `NetworkArrays`, matrices and class vectors that edges share once:

  format, version   "pase_mtf.network" and 2
  unary, sizes      all cost vectors, one after another, and their lengths
  values, shapes    all matrices likewise, row-major, and their shapes [matrices, 2]
  classes, lengths  all class vectors likewise, and their lengths
  ends              [2, edges]: source and target of an edge
  edge_matrix       [edges]: the number of its matrix
  edge_classes      [2, edges]: the numbers of the class vectors of its source and of its target
  kinds             a word per layer
  memory            bytes per device of every configuration, as long as unary; may be missing

Files of version 1 are read as well. They hold an array or two per layer and three per edge: `n` (number of layers),
`u{v}` (vector of layer v), `src`, `tgt`, `types`, and per edge e the matrix `C{e}` with the classes `rc{e}` and
`cc{e}`; where they hold `shared` (int [edges]), the matrix of edge e is C{shared[e]}.
"""

from __future__ import annotations

import io
import math
import os
import tokenize
import zipfile
import zlib
from collections.abc import Collection

import numpy as np
from numpy.lib import format as npy
from numpy.lib.npyio import NpzFile

from pase_mtf.errors import FormatError
from pase_mtf.files import path_of
from pase_mtf.search.arrays import NetworkArrays, NetworkEdge, collect, offsets

__all__ = ["network_bytes", "read_network"]

FORMAT = "pase_mtf.network"
VERSION = 2
# No deflated member of a zip file is smaller than its contents by more than this.
_MOST_COMPRESSED = 1032
_MOST_BYTES, _MOST_PER_BYTE = 1 << 30, 64
"""All members together, unpacked: more than that, and than so many times what the file has, nobody has saved."""
_NUMBERS = frozenset(map(np.dtype, ("<f4", "<f8")))
_INTEGERS = frozenset(map(np.dtype, ("|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8")))
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def network_bytes(arrays: NetworkArrays, kinds: tuple[str, ...], memory: np.ndarray | None = None) -> bytes:
    """The file of a network. The same network is the same file."""
    members = {
        "format": np.array(FORMAT), "version": np.array(VERSION),
        "unary": arrays.unary, "sizes": np.diff(arrays.first),
        "values": np.concatenate([np.zeros(0), *(matrix.reshape(-1) for matrix in arrays.matrices())]),
        "shapes": arrays.shapes,
        "classes": arrays.classes, "lengths": np.diff(arrays.classes_at),
        "ends": arrays.ends, "edge_matrix": arrays.edge_matrix, "edge_classes": arrays.edge_classes,
        "kinds": np.array(kinds, np.str_), **({} if memory is None else {"memory": memory})}
    held = sum(array.nbytes + 256 for array in members.values())  # with its header
    for method in (zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED):  # what shrinks too much is refused when it is read
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", method, compresslevel=1) as archive:
            for name, array in members.items():
                content = io.BytesIO()
                npy.write_array(content, array, allow_pickle=False)
                # A date of its own would make two files of the same network differ.
                archive.writestr(zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0)), content.getvalue(), method)
        if held <= max(_MOST_BYTES, _MOST_PER_BYTE * buffer.getbuffer().nbytes):
            break
    return buffer.getvalue()


def read_network(path: str | os.PathLike[str]) -> tuple[NetworkArrays, tuple[str, ...], np.ndarray | None]:
    """The arrays of a network file, the kind of every layer, and its bytes of memory if it holds them.

    Whether its costs make sense is for others to check.

    Raises:
      FormatError: the file is missing, damaged or something else, or of a newer version.
    """
    path_of(path)
    try:
        with open(path, "rb") as file:
            if not zipfile.is_zipfile(file):  # one array, perhaps: np.load would read it
                raise ValueError("no archive of arrays")
            file.seek(0)
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, NpzFile):
                raise ValueError("no archive of arrays")
            members = _Members(archive, os.fstat(file.fileno()).st_size)
            return _read_arrays(members) if "format" in archive.files else _read_version_1(members)
    except OSError as error:
        raise FormatError(f"cannot read {path}: {error.strerror or error}; check the path") from error
    except (KeyError, ValueError, TypeError, AttributeError, IndexError, EOFError, MemoryError, OverflowError,
            NotImplementedError, RuntimeError, SyntaxError, tokenize.TokenError, zipfile.BadZipFile,
            zlib.error) as error:  # SyntaxError, TokenError: NumPy reads headers as Python
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FormatError(f"{path}: not a complete cost network ({reason}); it is truncated or foreign; give one that "
                          "CostNetwork.save wrote") from error


class _Members:
    """The arrays of an archive. What they say of themselves is checked before room is made for any of them."""

    def __init__(self, archive: NpzFile, size: int) -> None:
        """Reads the headers.

        Args:
          archive: the file.
          size: its bytes.

        Raises:
          ValueError: a member is not an array of plain numbers or words, or not as long as its shape says, or all of
            them are larger than any network can be.
        """
        assert archive.zip is not None
        self._archive, self._headers = archive, dict[str, tuple[tuple[int, ...], np.dtype]]()
        total, most = 0, max(_MOST_BYTES, _MOST_PER_BYTE * size)
        for member in archive.zip.infolist():
            name = member.filename.removesuffix(".npy")
            if name in self._headers:  # NumPy reads one of the two: what is checked has to be what is read
                raise ValueError(f"{name} twice")
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others have own errors
                raise ValueError(f"{member.filename} is compressed by method {member.compress_type}")
            total += member.file_size
            if member.file_size > _MOST_COMPRESSED * min(member.compress_size, size) + 1024 or total > most:
                raise ValueError(f"{member.filename} of {member.file_size} bytes")
            self._headers[name] = self._header(archive.zip, member)

    @staticmethod
    def _header(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> tuple[tuple[int, ...], np.dtype]:
        with archive.open(member) as content:
            version = npy.read_magic(content)
            if version not in _HEADERS:
                raise ValueError(f"{member.filename} of npy version {version}")
            shape, _, dtype = _HEADERS[version](content)
            length = content.tell()
        if not (dtype in _NUMBERS or dtype in _INTEGERS or dtype.kind in "bU") or any(extent < 0 for extent in shape):
            raise ValueError(f"{member.filename} holds {dtype}")
        if length + math.prod(shape) * dtype.itemsize != member.file_size:
            raise ValueError(f"{member.filename} of {member.file_size} bytes for shape {shape}")
        return shape, dtype

    def __contains__(self, name: str) -> bool:
        return name in self._headers

    def __len__(self) -> int:
        return len(self._headers)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a member, which is not read."""
        return self._headers[name][0]

    def numbers(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A member of costs, as float64, of this shape (-1: any extent).

        Raises:
          ValueError: another shape, or something else than numbers.
        """
        return np.ascontiguousarray(self._read(name, shape, _NUMBERS | _INTEGERS), np.float64)

    def indices(self, name: str, shape: tuple[int, ...], bound: int) -> np.ndarray:
        """A member of integers from 0 up to, but not including, a bound.

        Raises:
          ValueError: another shape, or an entry out of range.
        """
        array = self._read(name, shape, _INTEGERS)
        if array.size and (array.min() < 0 or array.max() >= bound):
            raise ValueError(f"{name} has an entry that is not from 0 to {bound - 1}")
        return np.ascontiguousarray(array, np.int64)

    def integer(self, name: str) -> int:
        """A member that is one integer (ValueError: it is something else)."""
        return int(self._read(name, (), _INTEGERS))

    def words(self, name: str, shape: tuple[int, ...]) -> list[str]:
        """A member of words (ValueError: it is something else)."""
        if self._headers[name][1].kind != "U":
            raise ValueError(f"{name} of type {self._headers[name][1]}")
        found: list[str] = self._read(name, shape, {self._headers[name][1]}).reshape(-1).tolist()
        return found

    def _read(self, name: str, shape: tuple[int, ...], dtypes: Collection[np.dtype]) -> np.ndarray:
        found, dtype = self._headers[name]
        if dtype not in dtypes or len(found) != len(shape) or any(
                wanted not in (-1, extent) for wanted, extent in zip(shape, found, strict=True)):
            raise ValueError(f"{name} of shape {found} and type {dtype}")
        array: np.ndarray = self._archive[name]
        return array


def _total(sizes: np.ndarray) -> int:
    """The sum, however large."""
    return sum(map(int, sizes.tolist()))


def _read_arrays(members: _Members) -> tuple[NetworkArrays, tuple[str, ...], np.ndarray | None]:
    if members.words("format", ()) != [FORMAT]:
        raise ValueError("another format")
    version = members.integer("version")
    if version != VERSION:
        raise ValueError(f"version {version}, this program reads up to {VERSION}; upgrade pase_mtf")
    most = np.iinfo(np.int32).max
    (configurations,), (entries,), (listed,) = (members.shape(name) for name in ("unary", "values", "classes"))
    # First what says how long the others are.
    sizes = members.indices("sizes", (-1,), configurations + 1)
    layers, edges = len(sizes), members.shape("edge_matrix")[0]
    lengths = members.indices("lengths", (-1,), listed + 1)
    shapes = members.indices("shapes", (-1, 2), most)
    for name, said, length in (("unary", _total(sizes), configurations), ("classes", _total(lengths), listed),
                               ("values", sum(height * width for height, width in shapes.tolist()), entries)):
        if said != length:
            raise ValueError(f"{name} has {length} entries, {said} are said to be there")
    arrays = NetworkArrays(
        offsets(sizes), members.numbers("unary", (-1,)), (members.numbers("values", (-1,)),),
        np.zeros(len(shapes), np.int64), offsets(shapes.prod(axis=1))[:-1], shapes,
        members.indices("classes", (-1,), most).astype(np.int32), offsets(lengths),
        members.indices("ends", (2, edges), layers).astype(np.int32),
        members.indices("edge_matrix", (edges,), len(shapes)),
        members.indices("edge_classes", (2, edges), len(lengths)))
    memory = members.numbers("memory", (configurations,)) if "memory" in members else None
    if memory is not None and not (np.isfinite(memory).all() and (memory >= 0).all()):
        raise ValueError("memory is not all finite bytes of at least 0")
    return arrays, tuple(members.words("kinds", (layers,))), memory


def _read_version_1(members: _Members) -> tuple[NetworkArrays, tuple[str, ...], None]:
    layers, edges = members.integer("n"), members.shape("src")[0]
    if not 0 <= layers <= len(members) or edges > len(members):
        raise ValueError(f"{layers} layers and {edges} edges in {len(members)} arrays")
    sources, targets = (members.indices(name, (edges,), layers).tolist() for name in ("src", "tgt"))
    shared = list(range(edges))
    if "shared" in members:
        shared = members.indices("shared", (edges,), edges).tolist()
    for number, ends in enumerate(zip(sources, targets, strict=True)):
        for name, layer in zip(("rc", "cc"), ends, strict=True):
            if members.shape(f"{name}{number}") != members.shape(f"u{layer}"):
                raise ValueError(f"{name}{number} of shape {members.shape(f'{name}{number}')} for the "
                                 f"{members.shape(f'u{layer}')} configurations of layer {layer}")
    matrices = {number: members.numbers(f"C{number}", (-1, -1)) for number in set(shared)}
    most = np.iinfo(np.int32).max
    arrays = collect(
        [members.numbers(f"u{layer}", (-1,)) for layer in range(layers)],
        [NetworkEdge(source, target, matrices[matrix], members.indices(f"rc{number}", (-1,), most),
                     members.indices(f"cc{number}", (-1,), most))
         for number, (source, target, matrix) in enumerate(zip(sources, targets, shared, strict=True))])
    return arrays, tuple(members.words("types", (layers,)) if "types" in members else [""] * layers), None
