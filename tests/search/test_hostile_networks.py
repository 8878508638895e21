"""Network files that nobody of ours wrote: refused in one line, and before their contents are unpacked."""

import io
import pathlib
import zipfile

import numpy as np
import pytest

from pase_mtf.errors import FormatError
from pase_mtf.search import network_file
from pase_mtf.search.network import CostNetwork, NetworkEdge

INSTANCES = pathlib.Path(__file__).parents[1] / "data" / "instances"


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """The arrays of one network in either version of the format."""
    path = tmp_path_factory.mktemp("networks") / "new.npz"
    CostNetwork.load(INSTANCES / "alexnet_8.npz").save(path)
    return {1: dict(np.load(INSTANCES / "alexnet_8.npz")), 2: dict(np.load(path))}


def write(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, value in members.items():
            content = io.BytesIO()
            np.lib.format.write_array(content, np.asarray(value), allow_pickle=True)
            archive.writestr(f"{name}.npy", content.getvalue())
    return path


def refused(path, match):
    with pytest.raises(FormatError, match=match) as caught:
        CostNetwork.load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("version", "name", "change"), [
    (1, "n", lambda old: np.inf), (1, "n", lambda old: 10 ** 9), (1, "n", lambda old: -1),
    (1, "u0", lambda old: old.astype("M8[s]")), (1, "u0", lambda old: np.zeros(len(old), [("a", "f8")])),
    (1, "u0", lambda old: old > 0), (1, "u0", lambda old: old.astype(np.longdouble)),
    (1, "u0", lambda old: np.zeros(len(old), np.float16)), (1, "u0", lambda old: old.astype(complex)),
    (1, "u0", lambda old: old.astype(object)), (1, "u0", lambda old: np.array(["1"] * len(old))),
    (1, "rc0", lambda old: old > 0), (1, "rc0", lambda old: old.astype(float)), (1, "rc0", lambda old: old - 1),
    (1, "rc0", lambda old: old[:-1]), (1, "src", lambda old: old + 100), (1, "types", lambda old: np.arange(14)),
    (1, "C0", lambda old: old[0]), (2, "version", lambda old: 3), (2, "version", lambda old: 2.0),
    (2, "unary", lambda old: old.astype(">f8")), (2, "format", lambda old: "pase_mtf.machine"),
    (2, "shapes", lambda old: np.full_like(old, 2 ** 31 - 2)), (2, "sizes", lambda old: old[::-1]),
    (2, "ends", lambda old: old + 100), (2, "kinds", lambda old: np.arange(14))])
def test_members_of_another_kind(versions, tmp_path, version, name, change):
    members = versions[version]
    refused(write(tmp_path / "bad.npz", {**members, name: change(members[name])}), "bad.npz")


@pytest.mark.parametrize(("version", "name", "dtype"), [
    (1, "u0", np.float64), (2, "values", np.float64), (2, "unary", np.float64), (2, "sizes", np.int64),
    (2, "surprise", np.float64)])
def test_nothing_is_unpacked_that_cannot_belong(versions, tmp_path, version, name, dtype, monkeypatch):
    """80 MB of zeros in 80 kB; what no other array tells the length of falls to the limit of all together."""
    path = write(tmp_path / "bomb.npz", {**versions[version], name: np.zeros(10 ** 7, dtype)})
    if name in ("sizes", "surprise"):
        monkeypatch.setattr(network_file, "_MOST_BYTES", 10 ** 7)
    unpack = np.lib.npyio.NpzFile.__getitem__

    def unpacked(archive, key):
        assert key != name
        return unpack(archive, key)
    monkeypatch.setattr(np.lib.npyio.NpzFile, "__getitem__", unpacked)
    refused(path, "bomb.npz")


def test_one_array_is_not_read(tmp_path):
    np.save(tmp_path / "one.npy", np.zeros(3))
    refused(tmp_path / "one.npy", "no archive")
    (tmp_path / "empty.npz").write_bytes(b"")
    refused(tmp_path / "empty.npz", "no archive")


def npy(value):
    content = io.BytesIO()
    np.lib.format.write_array(content, np.asarray(value))
    return content.getvalue()


@pytest.mark.parametrize("name", ["unary", "values"])
def test_a_name_that_two_members_have(versions, tmp_path, name):
    """NumPy reads the one without the suffix, whatever the other is like."""
    with zipfile.ZipFile(tmp_path / "bad.npz", "w") as archive:
        archive.writestr(name, npy(versions[2][name][:1]))
        for other, value in versions[2].items():
            archive.writestr(f"{other}.npy", npy(value))
    refused(tmp_path / "bad.npz", "twice")


def test_a_header_that_does_not_end(versions, tmp_path):
    with zipfile.ZipFile(tmp_path / "bad.npz", "w") as archive:
        for name, value in versions[2].items():
            archive.writestr(f"{name}.npy", npy(value).replace(b"}", b" ", 1) if name == "unary" else npy(value))
    refused(tmp_path / "bad.npz", "bad.npz")


@pytest.mark.parametrize("method", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_a_method_of_compression_that_numpy_does_not_write(versions, tmp_path, method):
    with zipfile.ZipFile(tmp_path / "bad.npz", "w", method) as archive:
        for name, value in versions[2].items():
            archive.writestr(f"{name}.npy", npy(value))
    refused(tmp_path / "bad.npz", f"method {method}")


def test_a_matrix_of_no_edge_is_looked_at(tmp_path):
    """Its NaN hid that other costs are negative: what is left of costs that cancel was called proven."""
    ends = [0, 1]
    CostNetwork([[1e20, 0.0], [0.0, 0.0]], [
        NetworkEdge(0, 1, [[-1e20, np.inf], [np.inf, 0.0]], ends, ends),
        NetworkEdge(0, 1, [[-0.5, np.inf], [np.inf, -0.25]], ends, ends)]).save(tmp_path / "bad.npz")
    members = dict(np.load(tmp_path / "bad.npz"))
    members["values"] = np.append(members["values"], np.nan)
    members["shapes"] = np.append(members["shapes"], [[1, 1]], axis=0)
    refused(write(tmp_path / "bad.npz", members), "matrix 2, of no edge: a cost is NaN")
