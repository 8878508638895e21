"""Variables that several processes write, each a part, are one checkpoint of whole variables."""

import numpy as np
import pytest

from pase_mtf.compat import tf
from pase_mtf.errors import UsageError
from pase_mtf.launch.checkpoints.checkpoint import entry_of
from pase_mtf.launch.checkpoints.shards import ShardWriter, data_file, merge_shards, shard_prefix

_VALUE = np.arange(24, dtype=np.float32).reshape(4, 6)


def _parts(*blocks):
    return {"weights": ([4, 6], [((row, column), tf.constant(_VALUE[row:row + 2, column:column + 3]))
                                 for row, column in blocks])}


def test_parts_are_one_checkpoint(tmp_path):
    prefix = str(tmp_path / "model")
    with tf.Graph().as_default(), tf.Session() as session:
        writers = [ShardWriter({"step": tf.constant(7), "scale": tf.constant(0.5)}, _parts((0, 0), (2, 3))),
                   ShardWriter({}, {**_parts((0, 3), (2, 0)), "bias": ([3], [((0,), tf.constant([1.0, 2.0, 3.0]))])}),
                   ShardWriter({}, {})]
        assert [writer.empty for writer in writers] == [False, False, True]
        for rank, writer in enumerate(writers):
            session.run(writer.write, {writer.prefix: shard_prefix(prefix, rank)})
    hashes = [entry_of(data_file(shard_prefix(prefix, rank))) for rank in range(2)]
    names = merge_shards(prefix, [0, 1])
    # What each has read of its own is what stands there now under its name.
    assert [entry_of(str(tmp_path / name)) for name in names] == hashes
    assert hashes[0] != hashes[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "model.data-00000-of-00002", "model.data-00001-of-00002", "model.index"]
    written = tf.train.load_checkpoint(prefix)
    assert set(written.get_variable_to_shape_map()) == {"step", "scale", "weights", "bias"}
    np.testing.assert_array_equal(written.get_tensor("weights"), _VALUE)
    np.testing.assert_array_equal(written.get_tensor("bias"), [1.0, 2.0, 3.0])
    assert (written.get_tensor("step"), written.get_tensor("scale")) == (7, 0.5)


def test_a_shard_that_others_do_not_see(tmp_path):
    with pytest.raises(UsageError, match=r"what rank 3 wrote is not there; .* a file system that all hosts share"):
        merge_shards(str(tmp_path / "model"), [3])
