"""What a run trains on: real files, bad files, synthetic data, and the same batches again after a resume."""

import collections
import dataclasses
import gzip
import importlib.util
import itertools
import os
import struct
import subprocess
import sys

import numpy as np
import PIL.Image
import pytest

from pase_mtf import models
from pase_mtf.errors import DataError
from pase_mtf.launch.data import open_data
from pase_mtf.launch.data_images import read_idx
from pase_mtf.launch.data_text import END, PADDING, RESERVED, START, read_lines

IMAGES = models.load_config("alexnet", "tiny", batch=8)
TEXT = models.load_config("transformer", "tiny", batch=4, length=16, vocab=400)
ALEXNET, TRANSFORMER = models.get("alexnet"), models.get("transformer")
FASHION = "/usr/share/datasets/fashion-mnist"


def _take(data, count, start=0):
    return list(itertools.islice(data.batches(start), count))


def _same(one, other):
    return one.keys() == other.keys() and all((one[key] == other[key]).all() for key in one)


def _idx(array, magic=None):
    return struct.pack(f">I{array.ndim}I", magic or 0x800 + array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def pictures():
    """Twenty pictures of 28x28 whose first pixel is their number, and their labels."""
    pixels = np.random.default_rng(0).integers(256, size=(20, 28, 28), dtype=np.uint8)
    pixels[:, 0, 0] = np.arange(20)
    return pixels, (np.arange(20) % 10).astype(np.uint8)


@pytest.fixture
def idx_folder(tmp_path, pictures):
    (tmp_path / "train-images-idx3-ubyte").write_bytes(_idx(pictures[0]))
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(_idx(pictures[1]), mtime=0))
    return tmp_path


def _numbers(batch):
    """Which pictures a batch holds: their first pixel, scaled back."""
    return np.rint((batch["images"][:, 0, 0, 0] + 1) * 127.5).astype(int).tolist()


def test_idx_images_come_with_their_labels_once_per_epoch(idx_folder, pictures):
    data = open_data(str(idx_folder), ALEXNET, IMAGES, 4, seed=1)
    assert data.describe() == f"20 images of 28x28x1 from {idx_folder}/train-images-idx3-ubyte (IDX); 10 classes"
    batches = _take(data, 10)
    for batch in batches:
        assert batch["images"].dtype == np.float32
        np.testing.assert_allclose(batch["images"][..., 0], pictures[0][_numbers(batch)] / 127.5 - 1, atol=1e-6)
        assert (batch["labels"] == pictures[1][_numbers(batch)]).all()
    first, second = ([number for batch in half for number in _numbers(batch)] for half in (batches[:5], batches[5:]))
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert first != sorted(first)


def test_batches_match_the_features_of_the_model(idx_folder):
    dropped = dataclasses.replace(IMAGES, dropout=0.1)
    for model, config, spec in ((ALEXNET, dropped, str(idx_folder)), (ALEXNET, IMAGES, None),
                                (TRANSFORMER, TEXT, None)):
        batch = _take(open_data(spec, model, config, config.batch, 0), 1)[0]
        features = model.features(config, config.batch)
        assert batch.keys() == features.keys()
        for name, (shape, dtype) in features.items():
            assert list(batch[name].shape) == shape.to_integer_list
            assert batch[name].dtype == dtype.as_numpy_dtype


@pytest.mark.parametrize("source", ["idx", "images", "text"])
def test_a_resumed_stream_goes_on_as_the_first_would_have(idx_folder, source):
    model, config = (TRANSFORMER, TEXT) if source == "text" else (ALEXNET, dataclasses.replace(IMAGES, dropout=0.1))
    data = open_data(str(idx_folder) if source == "idx" else None, model, config, 6, seed=3)
    whole = _take(data, 9)
    for start in (0, 2, 7):
        assert all(map(_same, whole[start:], _take(data, 9 - start, start)))
    if config.dropout:
        assert [int(batch["step"]) for batch in whole] == list(range(9))
    other = _take(open_data(str(idx_folder) if source == "idx" else None, model, config, 6, seed=4), 1)[0]
    assert not _same(whole[0], other)


def test_a_batch_may_be_larger_than_the_data(idx_folder):
    batch = _take(open_data(str(idx_folder), ALEXNET, IMAGES, 50, 0), 1)[0]
    counts = collections.Counter(_numbers(batch))
    assert len(counts) == 20
    assert max(counts.values()) <= 3


def test_images_are_fitted_to_the_model_and_the_run_says_so(idx_folder):
    config = dataclasses.replace(IMAGES, image=32, image_channels=3)
    data = open_data(str(idx_folder), ALEXNET, config, 4, 0)
    assert ", fitted from 28x28x1 to 32x32x3" in data.describe()
    images = _take(data, 1)[0]["images"]
    assert images.shape == (4, 32, 32, 3)
    assert (images[..., 0] == images[..., 2]).all()
    assert -1 <= images.min() < -0.5 < 0.5 < images.max() <= 1


def test_colour_idx(tmp_path):
    pixels = np.random.default_rng(0).integers(256, size=(8, 28, 28, 3), dtype=np.uint8)
    (tmp_path / "my-images.idx4").write_bytes(_idx(pixels))
    (tmp_path / "tags").write_bytes(_idx(np.arange(8, dtype=np.uint8)))
    spec = f"{tmp_path}/my-images.idx4,{tmp_path}/tags"
    batch = _take(open_data(spec, ALEXNET, dataclasses.replace(IMAGES, image_channels=3), 8, 0), 1)[0]
    np.testing.assert_allclose(batch["images"], pixels[batch["labels"]] / 127.5 - 1, atol=1e-6)
    grey = _take(open_data(spec, ALEXNET, IMAGES, 8, 0), 1)[0]
    luminance = pixels[grey["labels"]] @ [0.299, 0.587, 0.114] / 127.5 - 1
    np.testing.assert_allclose(grey["images"][..., 0], luminance, atol=0.01)


@pytest.mark.skipif(not os.path.isdir(FASHION), reason="Debian's package dataset-fashion-mnist is not installed")
def test_fashion_mnist():
    data = open_data(FASHION, ALEXNET, IMAGES, 1000, 0)
    assert data.source.examples == 60_000
    labels = np.concatenate([batch["labels"] for batch in _take(data, 60)])
    assert np.bincount(labels).tolist() == [6000] * 10


WHOLE = _idx(np.zeros((20, 28, 28), np.uint8))


@pytest.mark.parametrize(("name", "content", "message"), [
    ("images", b"", "empty"),
    ("images", b"\x89PNG\r\n\x1a\n", "starts with 0x89504e47"),
    ("images", WHOLE[:-1], "15,695 bytes, its header promises 15,696; it is truncated"),
    ("images", WHOLE + b"0", "it is damaged"),
    ("images", WHOLE[:7], "7 bytes, its header promises 16"),
    ("images", struct.pack(">I3I", 0x803, 2 ** 31, 2 ** 31, 2 ** 31), "it is truncated"),
    ("images", _idx(np.zeros(20, np.uint8)), "is it a file of labels"),
    ("images", _idx(np.zeros((0, 28, 28), np.uint8)), "20 labels"),
    ("images", _idx(np.zeros((19, 28, 28), np.uint8)), "has 19 images"),
    ("images", _idx(np.zeros((20, 28, 28, 2), np.uint8)), "2 channels"),
    ("images", gzip.compress(WHOLE, mtime=0)[:-9], "damaged gzip"),
    ("images", b"\x1f\x8bnonsense", "damaged gzip"),
    ("labels", _idx(np.full(20, 10, np.uint8)), "label 10 (example 1) is out of range, the model has 10 classes"),
    ("labels", _idx(np.zeros((20, 2), np.uint8)), "is it a file of images"),
    ("labels", None, "no labels beside it"),
])
def test_bad_idx_files_get_one_line(idx_folder, name, content, message):
    path = idx_folder / {"images": "train-images-idx3-ubyte", "labels": "train-labels-idx1-ubyte.gz"}[name]
    path.unlink() if content is None else path.write_bytes(content)
    _refused(str(idx_folder), ALEXNET, IMAGES, message)


def _refused(spec, model, config, message):
    with pytest.raises(DataError) as caught:
        open_data(spec, model, config, config.batch, 0)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_images_at_all(tmp_path):
    (tmp_path / "images").write_bytes(_idx(np.zeros((0, 28, 28), np.uint8)))
    (tmp_path / "labels").write_bytes(_idx(np.zeros(0, np.uint8)))
    _refused(str(tmp_path / "images"), ALEXNET, IMAGES, "holds no images")


def test_read_idx_of_a_missing_file(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        read_idx(str(tmp_path / "none"))


@pytest.fixture
def picture_folder(tmp_path):
    """Six flat pictures, JPEG and PNG, grey and colour, of several sizes; brightness 40 * label."""
    lines = []
    for label, (size, mode, suffix) in enumerate(itertools.product((28, 40), ("L", "RGB", "P"), ("png",))):
        name = f"picture {label}.{'jpg' if mode == 'RGB' else suffix}"
        value = 40 * label
        PIL.Image.new("L", (size, size + 4), value).convert(mode).save(tmp_path / name)
        lines.append(f"{name} {label}\n")
    (tmp_path / "labels.txt").write_text("".join(lines))
    return tmp_path


def test_a_folder_of_pictures(picture_folder):
    data = open_data(str(picture_folder), ALEXNET, IMAGES, 6, 0)
    assert data.describe() == (f"6 images from {picture_folder}, labels from labels.txt, fitted from 32x28x1 and other "
                               "sizes to 28x28x1; 10 classes")
    batch = _take(data, 1)[0]
    assert sorted(batch["labels"]) == list(range(6))
    for image, label in zip(batch["images"], batch["labels"], strict=True):
        np.testing.assert_allclose(image, 40 * label / 127.5 - 1, atol=0.03)


@pytest.mark.parametrize(("content", "labels"), [
    ("file,label\na.png,3\n\nb.png,1\n", [1, 3]), ("a.png,3\nb.png,1\n", [1, 3]), ("a.png,dog\nb.png,cat\n", [0, 1])])
def test_csv_labels(tmp_path, content, labels):
    for name in ("a.png", "b.png"):
        PIL.Image.new("L", (28, 28)).save(tmp_path / name)
    (tmp_path / "labels.csv").write_text(content)
    batch = _take(open_data(str(tmp_path), ALEXNET, IMAGES, 2, 0), 1)[0]
    assert sorted(batch["labels"].tolist()) == labels


@pytest.mark.parametrize(("labels", "message"), [
    ("", "labels.txt: empty"),
    ("lonely.png\n", "line 1 is not a file and a label"),
    ("picture 0.png 10\n", "label 10 (example 1) is out of range"),
    ("picture 0.png -1\n", "label -1 (example 1) is out of range"),
    ("picture 9.png 1\n", "picture 9.png: named in the label list, and not in the folder"),
    ("notes.png 1\n", "notes.png: not a readable JPEG or PNG file"),
    (b"caf\xe9.png 1\n", "line 1 is not UTF-8"),
    (None, "has neither"),
])
def test_bad_folders_get_one_line(picture_folder, labels, message):
    (picture_folder / "notes.png").write_text("no picture")
    path = picture_folder / "labels.txt"
    if labels is None:
        path.unlink()
    else:
        path.write_bytes(labels if isinstance(labels, bytes) else labels.encode())
    _refused(str(picture_folder), ALEXNET, IMAGES, message)


def test_a_picture_damaged_behind_its_header_is_named_when_it_is_read(picture_folder):
    path = picture_folder / "picture 1.jpg"
    noise = np.random.default_rng(0).integers(256, size=(64, 64, 3), dtype=np.uint8)
    PIL.Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:1500])
    data = open_data(str(picture_folder), ALEXNET, IMAGES, 6, 0)
    with pytest.raises(DataError, match=r"picture 1\.jpg: damaged") as caught:
        next(data.batches())
    assert "\n" not in str(caught.value)


SENTENCES = [f"the {adjective} {noun} is {verb}" for adjective in ("old", "new", "lazy")
             for noun in ("cat", "dog", "sun") for verb in ("here", "gone")]


@pytest.fixture
def parallel(tmp_path, cache_dir):
    """Eighteen sentences and their "translation": in capitals, and one pair without a translation."""
    (tmp_path / "source.txt").write_text("".join(f"{line}\n" for line in [*SENTENCES, "alone"]))
    (tmp_path / "target.txt").write_text("".join(f"{line.upper()}\r\n" for line in [*SENTENCES, " "]))
    return f"{tmp_path}/source.txt,{tmp_path}/target.txt"


def test_parallel_text(parallel):
    data = open_data(parallel, TRANSFORMER, TEXT, 9, 0)
    assert data.describe().startswith("18 sentence pairs from ")
    assert "1 pairs with an empty side left out" in data.describe()
    seen = []
    for batch in _take(data, 2):
        assert (batch["decoder_input"][:, 0] == START).all()
        assert (batch["decoder_input"][:, 1:] == batch["target"][:, :-1]).all()
        for source, target in zip(batch["source"], batch["target"], strict=True):
            assert ((source == PADDING) == (np.arange(16) > list(source).index(END))).all()
            sentence = data.vocabulary.decode(source.tolist())
            assert data.vocabulary.decode(target.tolist()) == sentence.upper()
            seen.append(sentence)
            assert source.max() < TEXT.vocab
    assert sorted(seen) == sorted(SENTENCES)


def test_long_sentences_are_cut_and_the_run_says_so(tmp_path, cache_dir):
    (tmp_path / "a").write_text("word " * 50 + "\nshort\n")
    (tmp_path / "b").write_text("short\nanother\n")
    data = open_data(f"{tmp_path}/a,{tmp_path}/b", TRANSFORMER, TEXT, 2, 0)
    assert "25.0% of the sentences cut at 16 tokens" in data.describe()
    source = _take(data, 1)[0]["source"]
    long = source[source[:, -1] != PADDING]
    assert len(long) == 1
    assert long[0, -1] == END


def test_plain_text_is_continued(tmp_path, cache_dir):
    path = tmp_path / "book.txt"
    path.write_text("".join(f"{line}.\n" for line in SENTENCES * 3), "utf-8")
    data = open_data(str(path), TRANSFORMER, TEXT, 4, 0)
    text = path.read_text("utf-8")
    for source, target in zip(*(_take(data, 1)[0][key] for key in ("source", "target")), strict=True):
        joined = data.vocabulary.decode([*source, *target])
        assert joined in text
        assert len(joined) > 32
        assert source.min() >= RESERVED


def test_every_character_survives_the_vocabulary(tmp_path, cache_dir):
    lines = ["Grüße, 東京 — naïve\u2028½ 🙂", "tab\tand  spaces"]
    for name in ("a", "b"):
        (tmp_path / name).write_bytes("\ufeff".encode() + "\n".join(lines).encode())
    config = dataclasses.replace(TEXT, length=128)
    data = open_data(f"{tmp_path}/a,{tmp_path}/b", TRANSFORMER, config, 2, 0)
    sources = _take(data, 1)[0]["source"]
    assert sorted(data.vocabulary.decode(line.tolist()) for line in sources) == sorted(lines)


def test_the_vocabulary_is_kept_and_a_damaged_one_made_anew(parallel, cache_dir):
    first = open_data(parallel, TRANSFORMER, TEXT, 4, 0).vocabulary.to_str()
    kept = list((cache_dir / "pase_mtf" / "vocabularies").iterdir())
    assert len(kept) == 1
    assert open_data(parallel, TRANSFORMER, TEXT, 4, 0).vocabulary.to_str() == first
    kept[0].write_text("{")
    assert open_data(parallel, TRANSFORMER, TEXT, 4, 0).vocabulary.to_str() == first
    assert kept[0].read_text() != "{"
    open_data(parallel, TRANSFORMER, dataclasses.replace(TEXT, vocab=300), 4, 0)
    assert len(list(kept[0].parent.iterdir())) == 2


def test_a_cache_that_cannot_be_written_does_no_harm(parallel, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert open_data(parallel, TRANSFORMER, TEXT, 4, 0).vocabulary.get_vocab_size() > RESERVED + 256


@pytest.mark.parametrize(("source", "target", "message"), [
    (b"", b"x\n", "source.txt: empty"),
    (b" \n\n", b"x\n", "source.txt: empty"),
    (b"a\nb\n", b"a\n", "has 2 lines and"),
    (b"a\n\n", b"\nb\n", "no line has text in both files"),
    (b"good\nbad \xff\n", b"a\nb\n", "line 2 is not UTF-8 (byte 0xff)"),
    (b"a\0b\n", b"a\n", "holds zero bytes"),
    (None, b"a\n", "no such file"),
])
def test_bad_text_gets_one_line(tmp_path, cache_dir, source, target, message):
    for name, content in (("source.txt", source), ("target.txt", target)):
        if content is not None:
            (tmp_path / name).write_bytes(content)
    _refused(f"{tmp_path}/source.txt,{tmp_path}/target.txt", TRANSFORMER, TEXT, message)


def test_other_mistakes_with_text(tmp_path, cache_dir):
    (tmp_path / "short.txt").write_text("a few words\n")
    _refused(str(tmp_path / "short.txt"), TRANSFORMER, TEXT, "at least 32 are needed")
    _refused(str(tmp_path), TRANSFORMER, TEXT, "a folder, and the model trains on text")
    _refused(str(tmp_path / "short.txt"), TRANSFORMER, dataclasses.replace(TEXT, vocab=100), "vocab=100: too small")
    _refused("a,b,c", TRANSFORMER, TEXT, "3 paths")
    _refused(str(tmp_path / "none.txt"), TRANSFORMER, TEXT, "synthetic data")
    with pytest.raises(DataError, match="Is a directory"):
        read_lines(str(tmp_path))


def test_synthetic_data_says_so_and_can_be_learned():
    data = open_data(None, ALEXNET, IMAGES, 512, 0)
    assert data.describe().startswith("synthetic (no --data)")
    train, test = _take(data, 2)
    means = np.stack([train["images"][train["labels"] == label].mean(0) for label in range(10)])
    guesses = ((test["images"][:, None] - means) ** 2).sum((2, 3, 4)).argmin(1)
    assert (guesses == test["labels"]).mean() > 0.9

    data = open_data(None, TRANSFORMER, TEXT, 64, 0)
    assert data.describe().startswith("synthetic (no --data)")
    dictionary = {}
    for batch in _take(data, 20):
        for word, translation in zip(batch["source"].ravel(), batch["target"].ravel(), strict=True):
            assert dictionary.setdefault(word, translation) == translation
    assert dictionary[PADDING] == PADDING
    assert dictionary[END] == END
    assert 50 < len(dictionary) <= TEXT.vocab


def test_data_is_checked_without_tensorflow(tmp_path):
    code = ("import sys, types; from pase_mtf.launch.data import open_data; from pase_mtf.models import load_config\n"
            "open_data(None, types.SimpleNamespace(data_kind='images'), load_config('alexnet', 'tiny'), 4, 0)\n"
            "print('tensorflow' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def _catalogue(pairs):
    """A .mo file (https://www.gnu.org/software/gettext/manual, "The Format of GNU MO Files")."""
    header = "Content-Type: text/plain; charset=UTF-8\nPlural-Forms: nplurals=2; plural=n != 1;\n"
    pairs = sorted([("", header), *pairs])
    keys, values = ([text.encode() for text in side] for side in zip(*pairs, strict=True))
    start = 28 + 16 * len(pairs)
    tables, blob = [b"", b""], b""
    for side, texts in enumerate((keys, values)):
        for text in texts:
            tables[side] += struct.pack("<II", len(text), start + len(blob))
            blob += text + b"\0"
    return struct.pack("<7I", 0x950412DE, 0, len(pairs), 28, 28 + 8 * len(pairs), 0, start) + b"".join(tables) + blob


def test_parallel_text_from_message_catalogues(tmp_path, repository):
    path = repository / "benchmarks" / "make_parallel_text.py"
    folder = tmp_path / "de" / "LC_MESSAGES"
    folder.mkdir(parents=True)
    (folder / "one.mo").write_bytes(_catalogue([
        ("_Open file", "Datei ö_ffnen"), ("%s: %d", "%s: %d"), ("same", "same"), ("menu\x04Two\nlines", "Zwei\nZeilen"),
        ("one file\0many files", "eine Datei\0viele Dateien")]))
    (folder / "broken.mo").write_bytes(_catalogue([("a word", "ein Wort")]).replace(b"Wort", b"W\xf6rt"))
    spec = importlib.util.spec_from_file_location("make_parallel_text", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.collect("de", str(tmp_path)) == [
        ("Open file", "Datei öffnen"), ("Two lines", "Zwei Zeilen"), ("one file", "eine Datei"),
        ("one file", "viele Dateien")]
    done = subprocess.run([sys.executable, path, "xx", tmp_path / "out", "--locales", tmp_path], capture_output=True,
                          text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: no translations into 'xx'")
