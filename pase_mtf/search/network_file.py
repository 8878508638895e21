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

Files of version 1 are read as well. They hold an array or two per layer and three per edge: `n` (number of layers),
`u{v}` (vector of layer v), `src`, `tgt`, `types`, and per edge e the matrix `C{e}` with the classes `rc{e}` and
`cc{e}`; where they hold `shared` (int [edges]), the matrix of edge e is C{shared[e]}.
"""

from __future__ import annotations

import io
import os
import zipfile
import zlib

import numpy as np
from numpy.lib import format as npy
from numpy.lib.npyio import NpzFile

from pase_mtf.errors import FormatError
from pase_mtf.search.arrays import NetworkArrays, NetworkEdge, collect, offsets

__all__ = ["network_bytes", "read_network"]

FORMAT = "pase_mtf.network"
VERSION = 2
# No deflated member of a zip file is smaller than its contents by more than this.
_MOST_COMPRESSED = 1032
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def network_bytes(arrays: NetworkArrays, kinds: tuple[str, ...]) -> bytes:
    """The file of a network. The same network is the same file."""
    members = {
        "format": np.array(FORMAT), "version": np.array(VERSION),
        "unary": arrays.unary, "sizes": np.diff(arrays.first),
        "values": np.concatenate([np.zeros(0), *(matrix.reshape(-1) for matrix in arrays.matrices())]),
        "shapes": arrays.shapes,
        "classes": arrays.classes, "lengths": np.diff(arrays.classes_at),
        "ends": arrays.ends, "edge_matrix": arrays.edge_matrix, "edge_classes": arrays.edge_classes,
        "kinds": np.array(kinds, np.str_)}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, array in members.items():
            content = io.BytesIO()
            npy.write_array(content, array, allow_pickle=False)
            # A date of its own would make two files of the same network differ.
            archive.writestr(zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0)), content.getvalue(),
                             zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def read_network(path: str | os.PathLike[str]) -> tuple[NetworkArrays, tuple[str, ...]]:
    """The arrays of a network file, and the kind of every layer. Whether its costs make sense is for others to check.

    Raises:
      FormatError: the file is missing, damaged or something else, or of a newer version.
    """
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            if not isinstance(archive, NpzFile):
                raise ValueError("one array, not an archive of them")
            _check_members(archive, os.fstat(file.fileno()).st_size)
            return _read_arrays(archive) if "format" in archive.files else _read_version_1(archive)
    except OSError as error:
        raise FormatError(f"cannot read {path}: {error.strerror or error}; check the path") from error
    except (KeyError, ValueError, TypeError, AttributeError, IndexError, EOFError, MemoryError, OverflowError,
            NotImplementedError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FormatError(f"{path}: not a complete cost network ({reason}); it is truncated or foreign") from error


def _check_members(archive: NpzFile, size: int) -> None:
    """Checks what the members say of themselves, before room is made for any of them.

    Raises:
      ValueError: a member is not an array of plain numbers or words, or not as long as its shape says.
    """
    assert archive.zip is not None
    for member in archive.zip.infolist():
        if member.file_size > _MOST_COMPRESSED * min(member.compress_size, size) + 1024:
            raise ValueError(f"{member.filename} of {member.file_size} bytes")
        with archive.zip.open(member) as content:
            version = npy.read_magic(content)
            if version not in _HEADERS:
                raise ValueError(f"{member.filename} of npy version {version}")
            shape, _, dtype = _HEADERS[version](content)
            length = content.tell()
        if dtype.kind not in "iufbU" or any(extent < 0 for extent in shape):
            raise ValueError(f"{member.filename} holds {dtype}")
        entries = 1
        for extent in shape:
            entries *= extent
        if length + entries * dtype.itemsize != member.file_size:
            raise ValueError(f"{member.filename} of {member.file_size} bytes for shape {shape}")


def _array(archive: NpzFile, name: str, kinds: str, shape: tuple[int, ...]) -> np.ndarray:
    """A member with a dtype of these kinds and this shape (-1: any extent).

    Raises:
      ValueError: another dtype or shape.
    """
    array: np.ndarray = archive[name]
    if array.dtype.kind not in kinds or len(array.shape) != len(shape) or any(
            wanted not in (-1, extent) for wanted, extent in zip(shape, array.shape, strict=True)):
        raise ValueError(f"{name} of shape {array.shape} and type {array.dtype}")
    return array


def _indices(archive: NpzFile, name: str, shape: tuple[int, ...], bound: int) -> np.ndarray:
    """A member of integers from 0 up to, but not including, a bound.

    Raises:
      ValueError: another shape, or an entry out of range.
    """
    array = _array(archive, name, "iu", shape)
    if array.size and (array.min() < 0 or array.max() >= bound):
        raise ValueError(f"{name} has an entry that is not from 0 to {bound - 1}")
    return np.ascontiguousarray(array, np.int64)


def _read_arrays(archive: NpzFile) -> tuple[NetworkArrays, tuple[str, ...]]:
    if str(_array(archive, "format", "U", ())) != FORMAT:
        raise ValueError("another format")
    version = int(_array(archive, "version", "iu", ()))
    if version != VERSION:
        raise ValueError(f"version {version}, this program reads up to {VERSION}; upgrade pase_mtf")
    most = np.iinfo(np.int32).max
    unary = np.ascontiguousarray(_array(archive, "unary", "f", (-1,)), np.float64)
    first = offsets(_indices(archive, "sizes", (-1,), len(unary) + 1))
    values = np.ascontiguousarray(_array(archive, "values", "f", (-1,)), np.float64)
    shapes = _indices(archive, "shapes", (-1, 2), most)
    matrix_at = offsets(shapes.prod(axis=1))
    classes = _indices(archive, "classes", (-1,), most).astype(np.int32)
    classes_at = offsets(_indices(archive, "lengths", (-1,), len(classes) + 1))
    for name, end, length in (("unary", first[-1], len(unary)), ("values", matrix_at[-1], len(values)),
                              ("classes", classes_at[-1], len(classes))):
        if end != length:
            raise ValueError(f"{name} has {length} entries, {end} are said to be there")
    ends = _indices(archive, "ends", (2, -1), len(first) - 1).astype(np.int32)
    edges = ends.shape[1]
    kinds = _array(archive, "kinds", "U", (len(first) - 1,))
    return NetworkArrays(
        first, unary, (values,), np.zeros(len(shapes), np.int64), matrix_at[:-1], shapes, classes, classes_at, ends,
        _indices(archive, "edge_matrix", (edges,), len(shapes)),
        _indices(archive, "edge_classes", (2, edges), len(classes_at) - 1)), tuple(kinds.tolist())


def _read_version_1(archive: NpzFile) -> tuple[NetworkArrays, tuple[str, ...]]:
    layers = int(_array(archive, "n", "iu", ()))
    if not 0 <= layers <= len(archive.files):
        raise ValueError(f"{layers} layers")
    sources = _array(archive, "src", "iu", (-1,))
    targets = _array(archive, "tgt", "iu", (len(sources),))
    shared = np.arange(len(sources))
    if "shared" in archive.files:
        shared = _indices(archive, "shared", (len(sources),), len(sources))
    matrices = {number: archive[f"C{number}"] for number in set(shared.tolist())}
    kinds = archive["types"].tolist() if "types" in archive.files else [""] * layers
    arrays = collect(
        [archive[f"u{layer}"] for layer in range(layers)],
        [NetworkEdge(source, target, matrices[matrix], archive[f"rc{number}"], archive[f"cc{number}"])
         for number, (source, target, matrix)
         in enumerate(zip(sources.tolist(), targets.tolist(), shared.tolist(), strict=True))])
    return arrays, tuple(str(kind) for kind in kinds)
