"""What a command writes is checked before it computes: never in place of what it reads, nor of what else it writes."""

import os
import stat

import pytest

from pase_mtf.errors import UsageError
from pase_mtf.files import check_outputs, says_format, write_atomically


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where there is a file that is read, a link to it, one that may be replaced, a pipe, and a folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "read.csv").write_text("precious")
    (tmp_path / "link.csv").symlink_to("read.csv")
    (tmp_path / "old.json").write_text("{}")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "there").mkdir()
    (tmp_path / "way").symlink_to("there")
    return tmp_path


@pytest.mark.parametrize(("outputs", "says"), [
    ({"--json": "read.csv"}, "--json=read.csv is read for --curve, and would be lost"),
    ({"--json": "link.csv"}, "is read for --curve"), ({"--json": "there/../read.csv"}, "is read for --curve"),
    ({"--json": "new.json", "--plot": "./new.json"}, "--plot=./new.json is the file of --json as well"),
    ({"--json": "there/new.json", "--plot": "way/new.json"}, "is the file of --json as well"),
    ({"--json": "old.json", "--plot": "old.json"}, "is the file of --json as well"),
    ({"--json": "there"}, "--json=there is a folder; name a file"),
    ({"--json": "/dev/full"}, "--json=/dev/full is a device or a pipe; name a file"), ({"--json": "pipe"}, "or a pipe"),
    ({"--json": ""}, "--json is empty"),
    ({"--json": "none/new.json"}, "there is no folder none; make it first"),
    ({"--json": "old.json/new.json"}, "there is no folder old.json"), ({"--json": "no\0path"}, "is no path")])
def test_what_would_be_lost_is_refused(folder, outputs, says):
    before = sorted(folder.rglob("*"))
    with pytest.raises(UsageError) as error:
        check_outputs(outputs, [("--curve", "read.csv")], may_replace=lambda path: True)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert sorted(folder.rglob("*")) == before


def test_what_is_new_or_may_be_replaced_is_not(folder):
    read = [("--curve", "read.csv"), ("--machine", "local"), ("--steps", None)]
    check_outputs({"--json": "new.json", "--plot": "there/new.svg", "--save": None}, read)
    check_outputs({"--json": "old.json"}, read, may_replace=lambda path: path == "old.json")
    check_outputs({"--json": "local"}, read)  # the name of a machine, and no file
    (folder / "made.tmp").touch()  # as mktemp does
    check_outputs({"--json": "made.tmp"}, read)
    with pytest.raises(UsageError, match="is read for --curve"):
        check_outputs({"--json": "made.tmp"}, [("--curve", "made.tmp")])
    for path in ("old.json", "dangling"):
        (folder / "dangling").unlink(missing_ok=True)
        (folder / "dangling").symlink_to("nowhere")
        with pytest.raises(UsageError, match=f"--json={path} exists; choose another name, or add --overwrite"):
            check_outputs({"--json": path}, read, otherwise=", or add --overwrite")


def test_a_folder_that_cannot_be_written_to(folder, monkeypatch):
    """Nor can a file in it be replaced; root may write anywhere, so that the system's word is made up."""
    monkeypatch.setattr(os, "access", lambda path, mode: not (mode & os.W_OK and path == "there"))
    (folder / "there" / "old.json").write_text("{}")
    for path in ("there/new.json", "there/old.json"):
        with pytest.raises(UsageError, match=f"--json={path}: the folder there cannot be written to; choose another"):
            check_outputs({"--json": path}, may_replace=lambda path: True)
    check_outputs({"--json": "new.json"})


def test_a_signal_while_a_file_is_written_leaves_nothing(folder, monkeypatch):
    def interrupted(descriptor):
        raise KeyboardInterrupt
    monkeypatch.setattr(os, "fsync", interrupted)
    before = sorted(folder.iterdir())
    with pytest.raises(KeyboardInterrupt):
        write_atomically("old.json", "new")
    assert sorted(folder.iterdir()) == before
    assert (folder / "old.json").read_text() == "{}"


def test_a_link_stays_one(folder):
    (folder / "dangling").symlink_to("there/new")
    for link, leads_to in (("link.csv", "read.csv"), ("dangling", "there/new")):
        write_atomically(link, "new")
        assert os.readlink(link) == leads_to
        assert (folder / leads_to).read_text() == "new"
    assert [path.name for path in (folder / "there").iterdir()] == ["new"]


@pytest.fixture(params=[0o077, 0o022, 0o002], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_permissions_are_those_of_the_file_before_or_what_the_umask_leaves(folder, umask):
    for mode in (None, 0o600, 0o640, 0o664):
        if mode is not None:
            os.chmod("new.json", mode)
        write_atomically("new.json", "new")
        assert stat.S_IMODE(os.stat("new.json").st_mode) == (0o666 & ~umask if mode is None else mode)


@pytest.mark.parametrize("name", [255 * "x", 127 * "\u00fc", 63 * "\U0001f600", "\udcff.json"])
def test_every_name_that_a_file_may_have(folder, name):
    write_atomically(name, "new")
    assert (folder / name).read_text() == "new"
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_a_text_without_an_encoding(folder):
    """Of a path that is no UTF-8, or of a name in somebody's JSON."""
    write_atomically("new.txt", "data/m\udcfcller.csv, \ud800")
    assert (folder / "new.txt").read_text(encoding="utf-8") == r"data/m\udcfcller.csv, \ud800"


def test_what_a_file_says_it_is(folder):
    (folder / "solution.json").write_text('{"format": "pase_mtf.solution", trunc')
    assert says_format("solution.json", "pase_mtf.solution")
    assert not says_format("solution.json", "pase_mtf.kernels")
    for path in ("read.csv", "there", "none", "no\0path", None):
        assert not says_format(path, "pase_mtf.solution")
