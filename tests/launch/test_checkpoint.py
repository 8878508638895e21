import errno
import json
import os
import pathlib

import pytest

from pase_mtf.compat import tf
from pase_mtf.errors import FormatError, UsageError
from pase_mtf.launch.checkpoint import find_checkpoint, restore, save_checkpoint


def _save(text="weights"):
    def save(prefix):
        with open(f"{prefix}.data", "w") as file:
            file.write(text)
    return save


def test_round_trip(tmp_path):
    save_checkpoint(str(tmp_path / "checkpoint"), _save(), step=7, graph_hash="abc")
    info = find_checkpoint(str(tmp_path))
    assert (info.step, info.graph_hash) == (7, "abc")
    seen = []
    restore(info, lambda prefix: seen.append(pathlib.Path(f"{prefix}.data").read_text()))
    assert seen == ["weights"]
    assert os.listdir(tmp_path) == ["checkpoint"]


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
    (_damage_manifest, "truncated"), (_foreign_manifest, "foreign"), (_incomplete_manifest, "not a complete"),
    (_newer_manifest, "upgrade"), (_truncate, "has 3 bytes of 7"), (_remove, "is missing"),
])
def test_refuses_damaged_checkpoints(tmp_path, damage, says):
    save_checkpoint(str(tmp_path / "checkpoint"), _save(), step=7, graph_hash="abc")
    damage(tmp_path / "checkpoint")
    with pytest.raises(FormatError, match=says) as caught:
        find_checkpoint(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_refuses_a_folder_without_one(tmp_path):
    with pytest.raises(FormatError, match="holds no checkpoint"):
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


def test_flipped_bits(tmp_path):
    save, load = _saver_of("weights", 10000)
    save_checkpoint(str(tmp_path / "checkpoint"), save, step=7, graph_hash="abc")
    restore(find_checkpoint(str(tmp_path)), load)
    path = next((tmp_path / "checkpoint").glob("model.data*"))
    raw = bytearray(path.read_bytes())
    raw[2000] ^= 255
    path.write_bytes(raw)
    with pytest.raises(FormatError, match="damaged"):
        restore(find_checkpoint(str(tmp_path)), load)
