import errno
import fcntl
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import time

import pytest

from pase_mtf.compat import tf
from pase_mtf.errors import FormatError, UsageError
from pase_mtf.launch.checkpoints import checkpoint
from pase_mtf.launch.checkpoints.checkpoint import find_checkpoint, forget_half_written, restore, save_checkpoint


def _save(text="weights"):
    def save(prefix):
        with open(f"{prefix}.data", "w") as file:
            file.write(text)
    return save


def _write(folder, step, text="weights", **more):
    save_checkpoint(str(folder / "checkpoint"), _save(text), step=step, graph_hash="abc", **more)


def _read(info):
    seen = []
    restore(info, lambda prefix: seen.append(pathlib.Path(f"{prefix}.data").read_text()))
    return seen[0]


def test_round_trip(tmp_path):
    _write(tmp_path, 7, next_loss=1.25, order=2, microbatches=4, recompute=("encoder1",))
    info = find_checkpoint(str(tmp_path))
    assert (info.step, info.graph_hash, info.next_loss, info.order) == (7, "abc", 1.25, 2)
    assert (info.microbatches, info.recompute) == (4, ["encoder1"])
    assert _read(info) == "weights"
    assert os.listdir(tmp_path) == ["checkpoint"]
    assert os.listdir(tmp_path / "checkpoint") == ["step-7"]


def test_the_last_two_are_kept(tmp_path):
    for step in (8, 9, 10, 100):
        _write(tmp_path, step, f"weights of {step}")
    assert sorted(os.listdir(tmp_path / "checkpoint")) == ["step-10", "step-100"]
    assert _read(find_checkpoint(str(tmp_path))) == "weights of 100"


def test_one_of_that_step_stays_as_it_is(tmp_path):
    _write(tmp_path, 7)
    _write(tmp_path, 7, "others")
    assert _read(find_checkpoint(str(tmp_path))) == "weights"


def test_a_damaged_one_is_passed_over_with_a_word(tmp_path, capsys):
    _write(tmp_path, 7)
    _write(tmp_path, 9)
    _flip(tmp_path / "checkpoint" / "step-9" / "model.data")
    assert find_checkpoint(str(tmp_path)).step == 7
    err = capsys.readouterr().err
    assert "step-9/model.data: its SHA-256" in err
    assert "going on from step 7" in err
    assert err.count("\n") == 1


def test_what_a_kill_left_is_removed(tmp_path):
    _write(tmp_path, 7)
    partial = tmp_path / "checkpoint" / ".partial-abc"
    partial.mkdir()
    (partial / "model.data").write_text("wei")
    assert find_checkpoint(str(tmp_path)).step == 7
    assert os.listdir(tmp_path / "checkpoint") == ["step-7"]


def test_a_lock_that_a_kill_left_is_removed(tmp_path):
    """Killed between the last rename and the end."""
    _write(tmp_path, 7)
    (tmp_path / "checkpoint" / ".writing.lock").touch()
    assert find_checkpoint(str(tmp_path)).step == 7
    assert os.listdir(tmp_path / "checkpoint") == ["step-7"]


def test_what_somebody_writes_is_left_alone(tmp_path):
    _write(tmp_path, 7)

    def meanwhile(prefix):
        _save()(prefix)
        assert find_checkpoint(str(tmp_path)).step == 7
    save_checkpoint(str(tmp_path / "checkpoint"), meanwhile, step=8, graph_hash="abc")
    assert find_checkpoint(str(tmp_path)).step == 8


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP])
def test_where_nothing_can_be_locked(tmp_path, monkeypatch, number):
    """What is half written there may be somebody's, but for a run that goes on in its own folder."""
    def refuses(*_):
        raise OSError(number, os.strerror(number))
    monkeypatch.setattr(fcntl, "flock", refuses)
    for step in (7, 8, 9):
        _write(tmp_path, step)
    partial = tmp_path / "checkpoint" / ".partial-abc"
    partial.mkdir()
    assert find_checkpoint(str(tmp_path)).step == 9
    assert sorted(os.listdir(tmp_path / "checkpoint")) == [".partial-abc", "step-8", "step-9"]
    forget_half_written(str(tmp_path))
    assert sorted(os.listdir(tmp_path / "checkpoint")) == ["step-8", "step-9"]


@pytest.mark.parametrize("wait", [True, False])
def test_a_lock_of_another_user_stays_as_it_is(tmp_path, monkeypatch, wait):
    """Somebody reads the checkpoint of a run, or takes it up, that may go on for all that can be seen."""
    _write(tmp_path, 7)
    (tmp_path / "checkpoint" / ".writing.lock").touch()
    (tmp_path / "checkpoint" / ".partial-abc").mkdir()
    monkeypatch.setattr("filelock.FileLock.acquire", lambda _: (_ for _ in ()).throw(PermissionError(
        errno.EACCES, os.strerror(errno.EACCES))))
    if wait:
        with pytest.raises(UsageError, match=r"cannot write .*: Permission denied"):
            _write(tmp_path, 8)
    else:
        assert find_checkpoint(str(tmp_path)).step == 7
    forget_half_written(str(tmp_path))
    assert sorted(os.listdir(tmp_path / "checkpoint")) == [".partial-abc", ".writing.lock", "step-7"]


def test_one_of_version_1_is_read(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    _save()(str(folder / "model"))
    (folder / "checkpoint.json").write_text(json.dumps({
        "format": "pase_mtf.checkpoint", "version": 1, "step": 3, "graph_hash": "abc", "files": {"model.data": 7}}))
    info = find_checkpoint(str(tmp_path))
    assert (info.step, info.next_loss, _read(info)) == (3, None, "weights")
    assert (info.microbatches, info.recompute) == (None, None)  # as of the first runs that wrote version 2
    (folder / "model.data").write_text("wei")
    with pytest.raises(FormatError, match="has 3 bytes of 7"):
        find_checkpoint(str(tmp_path))


@pytest.mark.parametrize("seed", range(5))
def test_killed_while_writing(tmp_path, seed):
    """kill -9 at any moment of one checkpoint after another: the last whole one is found, and all else removed."""
    code = ("import sys, time; from pase_mtf.launch.checkpoints import checkpoint\n"
            "checkpoint._as_usage_errors = checkpoint.contextlib.nullcontext\n"  # which loads TensorFlow
            "def save(prefix):\n"
            "    for name in ('data', 'index'):\n"
            "        open(f'{prefix}.{name}', 'wb').write(bytes(2_000_000))\n"
            "for step in range(1000):\n"
            "    checkpoint.save_checkpoint(sys.argv[1], save, step=step, graph_hash='abc')\n"
            "    print(step, flush=True)\n")
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "checkpoint")], stdout=subprocess.PIPE)
    written = int(process.stdout.readline())
    time.sleep(random.Random(seed).uniform(0, 0.1))
    process.kill()
    written = int((process.communicate()[0].split() or [written])[-1])
    assert find_checkpoint(str(tmp_path)).step in (written, written + 1)
    left = os.listdir(tmp_path / "checkpoint")
    assert all(name.startswith("step-") for name in left)
    assert len(left) <= 3  # killed before the oldest was removed


def test_hashes_of_others_are_taken_as_they_are(tmp_path):
    """A file that another process has read is not read again; whether that told the truth is seen on resume."""
    told = {"model.data": {"bytes": 7, "sha256": "of another file"}}
    save_checkpoint(str(tmp_path / "checkpoint"), lambda prefix: _save()(prefix) or told, step=7, graph_hash="abc")
    with pytest.raises(FormatError, match="its SHA-256 is not the one"):
        find_checkpoint(str(tmp_path))


def test_is_whole_or_not_there(tmp_path):
    def fails(prefix):
        _save()(prefix)
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(str(tmp_path / "checkpoint"), fails, step=1, graph_hash="abc")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", ["os", "tensorflow", "device"])
def test_full_disk_is_one_line(tmp_path, kind):
    def fails(prefix):
        if kind == "os":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if kind == "device":
            with open("/dev/full", "w") as file:
                file.write("x" * 100_000)
        raise tf.errors.ResourceExhaustedError(None, None, f"{prefix}.data; No space left on device\nmore\nlines")
    with pytest.raises(UsageError, match="No space left on device; free space") as caught:
        save_checkpoint(str(tmp_path / "checkpoint"), fails, step=1, graph_hash="abc")
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("kind", "why"), [("OutOfRangeError", "File too large"), ("AbortedError", "Stale file handle"),
                                           ("DeadlineExceededError", "Connection timed out")])
def test_whatever_keeps_it_from_the_disk_is_one_line(tmp_path, kind, why):
    def fails(prefix):
        raise getattr(tf.errors, kind)(None, None, f"{prefix}.data; {why}")
    with pytest.raises(UsageError, match=why):
        save_checkpoint(str(tmp_path / "checkpoint"), fails, step=1, graph_hash="abc")
    assert os.listdir(tmp_path) == []


def test_one_that_is_spared_goes_with_the_last_that_is_written(tmp_path):
    for step in range(1, 5):
        save_checkpoint(str(tmp_path), _save(), step=step, graph_hash="abc", spared=1)
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-3", "step-4"]
    save_checkpoint(str(tmp_path), _save(), step=4, graph_hash="abc")
    assert sorted(os.listdir(tmp_path)) == ["step-3", "step-4"]


def test_one_that_has_been_removed_since_it_was_found(tmp_path):
    save, load = _saver_of("weights", 10)
    save_checkpoint(str(tmp_path / "checkpoint"), save, step=7, graph_hash="abc")
    info = find_checkpoint(str(tmp_path))
    shutil.rmtree(info.folder)
    with pytest.raises(FormatError, match="is not there any more"):
        restore(info, load)


def _flip(path, byte=2):
    raw = bytearray(path.read_bytes())
    raw[byte] ^= 1
    path.write_bytes(raw)


def _with(**changes):
    """The manifest with other values, and the hash that goes with them."""
    def change(folder):
        manifest = json.loads((folder / "checkpoint.json").read_text())
        manifest.update(changes)
        manifest["sha256"] = checkpoint._own_hash(manifest)
        (folder / "checkpoint.json").write_text(json.dumps(manifest))
    change.__name__ = "_".join(changes)
    return change


def _flip_manifest(folder):
    text = (folder / "checkpoint.json").read_text()
    (folder / "checkpoint.json").write_text(text.replace('"abc"', '"abd"'))


def _damage_manifest(folder):
    (folder / "checkpoint.json").write_text((folder / "checkpoint.json").read_text()[:30])


def _foreign_manifest(folder):
    (folder / "checkpoint.json").write_text(json.dumps({"format": "other", "version": 1}))


def _incomplete_manifest(folder):
    (folder / "checkpoint.json").write_text(json.dumps({"format": "pase_mtf.checkpoint", "version": 1, "step": 1}))


def _newer_manifest(folder):
    (folder / "checkpoint.json").write_text(json.dumps({"format": "pase_mtf.checkpoint", "version": 99}))


def _truncate(folder):
    (folder / "model.data").write_text("wei")


def _remove(folder):
    (folder / "model.data").unlink()


@pytest.mark.parametrize(("damage", "says"), [
    (_damage_manifest, "truncated"), (_foreign_manifest, "foreign"), (_incomplete_manifest, "is missing"),
    (_newer_manifest, "upgrade"), (_truncate, "has 3 bytes of 7"), (_remove, "is missing"),
    (lambda folder: _flip(folder / "model.data"), "model.data: its SHA-256"), (_flip_manifest, "their own SHA-256"),
    (_with(step=-5), "checkpoint.json: step -5, it has to be 0 to"), (_with(step=10**20), "step 1000"),
    (_with(step=2**31), "step 2147483648"), (_with(step=10**400), "step 1000"), (_with(step=True), "step is True"),
    (_with(step=8), "is of step 8, its folder says 7"),
])
def test_refuses_damaged_checkpoints(tmp_path, damage, says):
    save_checkpoint(str(tmp_path / "checkpoint"), _save(), step=7, graph_hash="abc")
    damage(tmp_path / "checkpoint" / "step-7")
    with pytest.raises(FormatError, match=says) as caught:
        find_checkpoint(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_refuses_a_folder_without_one(tmp_path):
    with pytest.raises(FormatError, match="holds no checkpoint"):
        find_checkpoint(str(tmp_path))
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(FormatError, match="before its first was written"):
        find_checkpoint(str(tmp_path))


def _saver_of(name, size):
    graph = tf.Graph()
    with graph.as_default():
        tf.get_variable(name, [size], initializer=tf.ones_initializer())
        saver, session = tf.train.Saver(), tf.Session()
        session.run(tf.global_variables_initializer())

    def save(prefix):
        with graph.as_default():
            saver.save(session, prefix, write_meta_graph=False, write_state=False)

    def load(prefix):
        with graph.as_default():
            saver.restore(session, prefix)
    return save, load


def test_variables_of_another_program(tmp_path):
    save_checkpoint(str(tmp_path / "checkpoint"), _saver_of("weights", 10000)[0], step=7, graph_hash="abc")
    with pytest.raises(FormatError, match="another program") as caught:
        restore(find_checkpoint(str(tmp_path)), _saver_of("other", 10000)[1])
    assert "\n" not in str(caught.value)


def test_bits_that_flip_after_the_check(tmp_path):
    save, load = _saver_of("weights", 10000)
    save_checkpoint(str(tmp_path / "checkpoint"), save, step=7, graph_hash="abc")
    info = find_checkpoint(str(tmp_path))
    restore(info, load)
    _flip(next((tmp_path / "checkpoint" / "step-7").glob("model.data*")), 2000)
    with pytest.raises(FormatError, match="damaged"):
        restore(info, load)


def test_those_that_a_run_removes_meanwhile_are_not_damaged(tmp_path, monkeypatch, capsys):
    """It goes on writing while its checkpoints are looked at."""
    folder, known, later = str(tmp_path / "checkpoint"), checkpoint._sha256, [8, 9]
    for step in (6, 7):
        save_checkpoint(folder, _save(), step=step, graph_hash="abc")

    def slow(path):
        steps, later[:] = later[:], []
        for step in steps:
            save_checkpoint(folder, _save(), step=step, graph_hash="abc")
        return known(path)
    monkeypatch.setattr(checkpoint, "_sha256", slow)
    assert find_checkpoint(str(tmp_path)).step == 9
    assert capsys.readouterr().err == ""


def test_all_of_it_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Else a power cut leaves a checkpoint of empty files in the place of the last."""
    done, fsync, rename = [], os.fsync, os.rename

    def to_disk(handle):
        done.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def renamed(source, target):
        done.append("renamed")
        rename(source, target)
    monkeypatch.setattr(os, "fsync", to_disk)
    monkeypatch.setattr(os, "rename", renamed)
    _write(tmp_path, 7)
    # The values, the manifest, the names of both; and the name of all, behind its renaming.
    assert [name.partition(".partial-")[0] for name in done] == [
        "model.data", ".checkpoint.json", "", "renamed", "checkpoint"]


def test_one_of_a_later_version_is_not_passed_over(tmp_path):
    """A run that went on from the one before would remove it."""
    _write(tmp_path, 7)
    _write(tmp_path, 9)
    _with(version=99)(tmp_path / "checkpoint" / "step-9")
    with pytest.raises(FormatError, match=r"step-9.*version 99.*upgrade"):
        find_checkpoint(str(tmp_path))
