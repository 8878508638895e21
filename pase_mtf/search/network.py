"""The cost network: what a search minimises. A cost vector per layer, a class-compressed cost matrix per edge.

What an edge costs depends only on how the tensor is cut at either end, so an edge holds a small matrix over the classes
of cuts, and the class of every configuration of its two layers. Edges that look alike share one matrix in memory.
"""

from __future__ import annotations

import dataclasses
import io
import math
import operator
import os
import struct
import zipfile
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib import format as npy

from pase_mtf.errors import FormatError, InfeasibleError, PaseError, UsageError
from pase_mtf.files import write_atomically

__all__ = ["CostNetwork", "NetworkEdge"]

# Above this many bytes `save` writes a matrix that several edges share only once (see CostNetwork.save).
_SHARE_ABOVE = 1 << 28


@dataclasses.dataclass(frozen=True, eq=False)
class NetworkEdge:
    """The cost between two layers: under configurations i and j it is matrix[rows[i], columns[j]].

    Attributes:
      source, target: indices of the layers (they may be equal).
      matrix: float64 [R, C], cost per pair of classes; +inf forbids a pair.
      rows: int32 [configurations of the source], its class of every configuration, below R.
      columns: int32 [configurations of the target], likewise, below C.
    """

    source: int
    target: int
    matrix: np.ndarray
    rows: np.ndarray
    columns: np.ndarray


def _as(array: Any, dtype: type) -> np.ndarray:
    """The array itself if it already is of that type and contiguous, so that shared arrays stay shared."""
    found = np.asarray(array)
    if dtype is np.int32 and found.dtype != dtype and found.size:
        # Converted as they are, 1.5 would become 1, and 2**32 class 0.
        with np.errstate(invalid="ignore"):
            whole = found.astype(np.int64) if found.dtype.kind in "iufb" else None
        if whole is None or (whole != found).any() or abs(whole).max() > np.iinfo(np.int32).max:
            raise ValueError("a class that is not an integer below 2**31")
    if found.dtype.kind == "c":
        raise ValueError("complex costs")
    return np.ascontiguousarray(found, dtype)


class CostNetwork:
    """A sum of costs: one vector per layer, one matrix per edge.

    Attributes:
      vectors: per layer, float64 [configurations]; +inf forbids a configuration.
      edges: NetworkEdge per edge; parallel edges and edges from a layer to itself are allowed.
      kinds: a word per layer, for people ("" where unknown).

    Example:
      >>> network = CostNetwork([[1., 0.], [0., 3.]], [NetworkEdge(0, 1, [[0., 5.], [5., 0.]], [0, 1], [0, 1])])
      >>> network.cost((0, 0))
      1.0
    """

    def __init__(self, vectors: Sequence[np.ndarray], edges: Sequence[NetworkEdge], kinds: Sequence[str] = ()) -> None:
        """Takes the parts; arrays of the right type are kept as they are. `validate` checks what they hold.

        Raises:
          UsageError: a part that is not an array of numbers.
        """
        # Keyed by identity, so that what is one object before conversion is one object after it.
        self._converted: dict[tuple[int, type], tuple[Any, np.ndarray]] = {}
        try:
            self.vectors = tuple(_as(vector, np.float64) for vector in vectors)
            self.edges = tuple(
                NetworkEdge(operator.index(edge.source), operator.index(edge.target),
                            self._convert(edge.matrix, np.float64), self._convert(edge.rows, np.int32),
                            self._convert(edge.columns, np.int32))
                for edge in edges)
        except (TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"cost network: {error}; give arrays of numbers, and a NetworkEdge per edge") from error
        del self._converted
        self.kinds = tuple(str(kind) for kind in kinds) or ("",) * len(self.vectors)
        self._normal: CostNetwork | None = None

    def _convert(self, array: Any, dtype: type) -> np.ndarray:
        key = id(array), dtype
        if key not in self._converted:
            self._converted[key] = array, _as(array, dtype)
        return self._converted[key][1]

    def __repr__(self) -> str:
        return (f"CostNetwork({len(self.vectors)} layers, {len(self.edges)} edges, "
                f"{sum(map(len, self.vectors))} configurations, {self.distinct_matrices} distinct matrices)")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of configurations per layer."""
        return tuple(len(vector) for vector in self.vectors)

    @property
    def distinct_matrices(self) -> int:
        """How many different matrix objects the edges share."""
        return len({id(edge.matrix) for edge in self.edges})

    def cost(self, assignment: Sequence[int]) -> float:
        """The total cost of a configuration index per layer, rounded once (the sum itself is exact).

        Raises:
          UsageError: the assignment does not fit the network.
        """
        if len(assignment) != len(self.vectors):
            raise UsageError(f"assignment for {len(assignment)} layers, the network has {len(self.vectors)}; "
                             "give one configuration index per layer")
        for layer, (choice, vector) in enumerate(zip(assignment, self.vectors, strict=True)):
            if not 0 <= choice < len(vector):
                raise UsageError(f"layer {layer}: configuration {choice} of {len(vector)}; indices start at 0")
        terms = [float(vector[choice]) for vector, choice in zip(self.vectors, assignment, strict=True)]
        terms += [float(edge.matrix[edge.rows[assignment[edge.source]], edge.columns[assignment[edge.target]]])
                  for edge in self.edges]
        return math.inf if math.inf in terms else math.fsum(terms)

    def validate(self) -> None:
        """Checks everything a search relies on; a network that keeps its normal form has been checked.

        Raises:
          UsageError: an empty domain, a NaN or -inf, an index out of range, arrays that do not fit each other.
          InfeasibleError: a layer or an edge that has no finite entry, so that no assignment is finite.
        """
        if self._normal is not None:
            return
        if len(self.kinds) != len(self.vectors):
            raise UsageError(f"{len(self.kinds)} kinds for {len(self.vectors)} layers; give one each, or none")
        for layer, vector in enumerate(self.vectors):
            where = f"layer {layer}"
            if vector.ndim != 1 or not len(vector):
                raise UsageError(f"{where}: cost vector of shape {vector.shape}; every layer needs a configuration")
            _check_costs(vector, where)
            if vector.min() == math.inf:
                raise InfeasibleError(f"{where}: every configuration is infinite; allow at least one")
        checked: set[tuple[int, int]] = set()
        for number, edge in enumerate(self.edges):
            where = f"edge {number} ({edge.source} -> {edge.target})"
            for end in (edge.source, edge.target):
                if not 0 <= end < len(self.vectors):
                    raise UsageError(f"{where}: no layer {end}; layers are 0 to {len(self.vectors) - 1}")
            if edge.matrix.ndim != 2:
                raise UsageError(f"{where}: matrix of shape {edge.matrix.shape}; it needs two dimensions")
            if (id(edge.matrix), 0) not in checked:
                _check_costs(edge.matrix, where)
                if edge.matrix.size and edge.matrix.min() == math.inf:
                    raise InfeasibleError(f"{where}: every pair of configurations is infinite; allow at least one")
                checked.add((id(edge.matrix), 0))
            for name, classes, end, bound in (("rows", edge.rows, edge.source, edge.matrix.shape[0]),
                                              ("columns", edge.columns, edge.target, edge.matrix.shape[1])):
                if classes.shape != self.vectors[end].shape:
                    raise UsageError(f"{where}: {name} of shape {classes.shape} for the {len(self.vectors[end])} "
                                     f"configurations of layer {end}; give one class per configuration")
                if (id(classes), bound) not in checked:
                    if classes.min() < 0 or classes.max() >= bound:
                        wrong = classes.min() if classes.min() < 0 else classes.max()
                        raise UsageError(f"{where}: {name} has class {wrong}; the matrix has 0 to {bound - 1}")
                    checked.add((id(classes), bound))

    def normalized(self, *, keep: bool = False) -> CostNetwork:
        """An equal network: every edge from a lower to a higher layer, no edge from a layer to itself, no class that
        is unused or repeats another, and parallel edges summed (wherever that does not cost more memory).

        Configurations keep their indices and every assignment its cost, up to rounding.

        Args:
          keep: check the network and remember the result, so that every search of it finds it. Its arrays must not be
            changed from then on.

        Raises:
          UsageError, InfeasibleError: with `keep`, as `validate`.
        """
        if self._normal is not None:
            return self._normal
        if keep:
            self.validate()
        from pase_mtf.search.normal_form import normalize
        normal = CostNetwork(*normalize(self.vectors, self.edges), self.kinds)
        if keep:
            self._normal = normal
        return normal

    def save(self, path: str | os.PathLike) -> None:
        """Writes the network as npz, whole or not at all.

        It holds `n` (number of layers), `u{v}` (vector of layer v), `src`, `tgt`, `types`, and per edge e the matrix
        `C{e}` with the classes `rc{e}` and `cc{e}`. Networks whose matrices would take more than 256 MB written out
        one by one hold `shared`, int64 [edges], as well: C{e} stands under the number shared[e] only.

        Raises:
          UsageError: the file cannot be written.
        """
        buffer = io.BytesIO()
        first: dict[int, int] = {}
        shared = np.array([first.setdefault(id(edge.matrix), number) for number, edge in enumerate(self.edges)],
                          np.int64)
        once = sum(edge.matrix.nbytes for edge in self.edges) > _SHARE_ABOVE
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            def put(name: str, array: np.ndarray) -> None:
                content = io.BytesIO()
                npy.write_array(content, np.asanyarray(array), allow_pickle=False)
                # A fixed date: the same network is the same file.
                archive.writestr(zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0)), content.getvalue(),
                                 zipfile.ZIP_DEFLATED)
            put("n", np.int64(len(self.vectors)))
            put("src", np.array([edge.source for edge in self.edges], np.int64))
            put("tgt", np.array([edge.target for edge in self.edges], np.int64))
            put("types", np.array(self.kinds, np.str_))
            if once:
                put("shared", shared)
            for layer, vector in enumerate(self.vectors):
                put(f"u{layer}", vector)
            for number, edge in enumerate(self.edges):
                if not once or shared[number] == number:
                    put(f"C{number}", edge.matrix)
                put(f"rc{number}", edge.rows)
                put(f"cc{number}", edge.columns)
        write_atomically(path, buffer.getvalue())

    @classmethod
    def load(cls, path: str | os.PathLike) -> CostNetwork:
        """Reads a network that `save` wrote; equal matrices and class arrays become one object.

        Raises:
          FormatError: the file is missing, truncated or something else, or holds a network that is not valid.
          InfeasibleError: the network has no finite assignment.
        """
        try:
            with open(path, "rb") as file:
                raw = file.read()
        except OSError as error:
            raise FormatError(f"cannot read {path}: {error.strerror}; check the path") from error
        pool: dict[tuple, np.ndarray] = {}

        def share(array: np.ndarray) -> np.ndarray:
            return pool.setdefault((array.shape, array.dtype.str, array.tobytes()), array)
        try:
            arrays = _read_npz(raw)
            layers = int(arrays["n"])
            sources, targets = arrays["src"], arrays["tgt"]
            shared = arrays.get("shared", np.arange(len(sources)))
            kinds = arrays.get("types", np.zeros(0, np.str_))
            matrices = {number: share(arrays[f"C{number}"]) for number in set(shared.tolist())}
            network = cls(
                [arrays[f"u{layer}"] for layer in range(layers)],
                [NetworkEdge(source, target, matrices[int(shared[number])], share(arrays[f"rc{number}"]),
                             share(arrays[f"cc{number}"]))
                 for number, (source, target) in enumerate(zip(sources.tolist(), targets.tolist(), strict=True))],
                kinds.tolist())
        except (KeyError, ValueError, TypeError, IndexError, struct.error, zipfile.BadZipFile, zlib.error,
                EOFError, UsageError) as error:
            raise FormatError(f"{path}: not a complete cost network ({error}); it is truncated or foreign") from error
        try:
            network.validate()
        except InfeasibleError:
            raise
        except PaseError as error:
            raise FormatError(f"{path}: {error}") from error
        return network


def _check_costs(array: np.ndarray, where: str) -> None:
    if array.size and not array.min() > -math.inf:  # NaN propagates through min
        wrong = "NaN" if np.isnan(array).any() else "-inf"
        raise UsageError(f"{where}: a cost is {wrong}; costs are numbers, or +inf for what is forbidden")


def _read_npz(raw: bytes) -> dict[str, np.ndarray]:
    """The arrays of an npz file. Several times faster than np.load, which re-reads and re-parses a header per array:
    a network holds thousands of small arrays, few of them of different shape."""
    headers: dict[bytes, tuple[tuple[int, ...], bool, np.dtype]] = {}
    arrays = {}
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        members = archive.infolist()
    for member in members:
        if raw[member.header_offset:member.header_offset + 4] != b"PK\x03\x04":
            raise zipfile.BadZipFile("a member is not where the directory says")
        name_length, extra_length = struct.unpack_from("<HH", raw, member.header_offset + 26)
        start = member.header_offset + 30 + name_length + extra_length
        data = raw[start:start + member.compress_size]
        if member.compress_type == zipfile.ZIP_DEFLATED:
            data = zlib.decompress(data, -15, member.file_size)
        elif member.compress_type != zipfile.ZIP_STORED:
            raise zipfile.BadZipFile(f"{member.filename} has compression {member.compress_type}")
        if len(data) != member.file_size or zlib.crc32(data) != member.CRC:
            raise zipfile.BadZipFile(f"{member.filename} is damaged")
        if data[:6] != b"\x93NUMPY":
            raise ValueError(f"{member.filename} is not an array")
        body = 10 + struct.unpack_from("<H", data, 8)[0] if data[6] == 1 else 12 + struct.unpack_from("<I", data, 8)[0]
        if data[:body] not in headers:
            stream = io.BytesIO(data[:body])
            read = npy.read_array_header_1_0 if npy.read_magic(stream) == (1, 0) else npy.read_array_header_2_0
            headers[data[:body]] = read(stream)
        shape, fortran, dtype = headers[data[:body]]
        if dtype.hasobject:
            raise ValueError(f"{member.filename} holds objects")
        array = np.frombuffer(data, dtype, math.prod(shape), body)
        arrays[member.filename.removesuffix(".npy")] = array.reshape(shape, order="F" if fortran else "C")
    return arrays
