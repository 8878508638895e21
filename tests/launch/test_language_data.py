"""What a language model trains on: windows of a plain text, each with what comes next."""

import itertools

import numpy as np
import pytest

from pase_mtf import models
from pase_mtf.errors import DataError
from pase_mtf.launch.data import open_data
from pase_mtf.launch.data_text import RESERVED

CONFIG = models.load_config("rnnlm", "tiny", batch=4, length=16, vocab=400)
MODEL = models.get("rnnlm")


def _batches(data, count):
    return list(itertools.islice(data.batches(), count))


def test_plain_text_in_windows(tmp_path, cache_dir):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {number} of a text, {number * number} squared\n" for number in range(200)))
    data = open_data(str(path), MODEL, CONFIG, CONFIG.batch, seed=0)
    count = data.source.examples
    everything = data.source.load(np.arange(count))
    assert everything["tokens"].shape == everything["targets"].shape == (count, CONFIG.length)
    # The windows follow each other in the text: put together they are its beginning, and nothing is left out.
    assert path.read_text().startswith(data.vocabulary.decode(everything["tokens"].ravel().tolist()))
    flat = everything["tokens"].ravel()
    assert (everything["targets"].ravel()[:-1] == flat[1:]).all()
    features = MODEL.features(CONFIG, CONFIG.batch)
    batch, = _batches(data, 1)
    assert {name: list(value.shape) for name, value in batch.items()} == {
        name: shape.to_integer_list for name, (shape, _) in features.items()}


def test_one_file_of_enough_text(tmp_path, cache_dir):
    path = tmp_path / "text.txt"
    path.write_text("short\n")
    with pytest.raises(DataError, match=r"at least 17 are needed \(a window of 16 and what comes next\)"):
        open_data(str(path), MODEL, CONFIG, 4, seed=0)
    with pytest.raises(DataError, match="2 files, and a language model trains on one"):
        open_data(f"{path},{path}", MODEL, CONFIG, 4, seed=0)
    with pytest.raises(DataError, match=r"a folder, and the model trains on text; give text.txt$"):
        open_data(str(tmp_path), MODEL, CONFIG, 4, seed=0)


def test_synthetic_text_can_be_learned():
    data = open_data(None, MODEL, CONFIG, 64, seed=0)
    assert "synthetic" in data.describe()
    pairs = []
    for batch in _batches(data, 20):
        assert batch["tokens"].min() >= RESERVED
        assert batch["targets"].max() < CONFIG.vocab
        assert (batch["tokens"][:, 1:] == batch["targets"][:, :-1]).all()
        pairs += zip(batch["tokens"].ravel().tolist(), batch["targets"].ravel().tolist(), strict=True)
    # Three times out of four the next word is the one that mostly follows.
    followers = {}
    for word, following in pairs:
        followers.setdefault(word, []).append(following)
    usual = sum(max(map(words.count, set(words))) for words in followers.values())
    assert 0.7 < usual / len(pairs) < 0.9
