"""What a run trains on: images, synthetic data, bad files, and the same batches again after a resume."""

import collections
import dataclasses
import gzip
import itertools
import os
import struct
import threading
import tracemalloc

import numpy as np
import PIL.Image
import pytest

from pase_mtf import models
from pase_mtf.errors import DataError
from pase_mtf.launch.data import Data, Source, check_data, open_data
from pase_mtf.launch.data.images import read_idx
from pase_mtf.launch.data.text import END, PADDING

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


@pytest.mark.parametrize(("model", "config"), [
    (ALEXNET, dataclasses.replace(IMAGES, dropout=0.1)), (TRANSFORMER, TEXT)])
def test_a_process_reads_its_own_rows(model, config):
    """The same examples in the same rows; where others' are there is nothing. Masks of dropout are those of the step.
    """
    data = open_data(None, model, config, config.batch, 0)
    asked = []

    def load(numbers):
        asked.append(len(numbers))
        return data.source.load(numbers)

    of_rank = dataclasses.replace(data, rows=(1, 2), source=dataclasses.replace(data.source, load=load))
    for number, (batch, whole) in enumerate(zip(_take(of_rank, 3, 5), _take(data, 3, 5), strict=True)):
        assert batch.number == whole.number == 5 + number
        assert batch.keys() == whole.keys() >= ({"step"} if config.dropout else set())
        for name, values in batch.items():
            expected = whole[name].copy()
            if name != "step":
                expected[[0, *range(3, config.batch)]] = 0
            assert values.dtype == expected.dtype
            np.testing.assert_array_equal(values, expected)
    assert set(asked) == {2}


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


def test_folders_that_are_called_like_files(tmp_path, pictures):
    """Kaggle's MNIST holds every file twice, once in a folder of its own name."""
    for kind, array in zip(("images{}idx3", "labels{}idx1"), pictures, strict=True):
        inner, outer = (f"train-{kind.format(mark)}-ubyte" for mark in "-.")
        (tmp_path / inner).mkdir()
        for place in (tmp_path / inner / inner, tmp_path / outer):
            place.write_bytes(_idx(array))
    data = open_data(str(tmp_path), ALEXNET, IMAGES, 4, 0)
    assert data.describe().startswith(f"20 images of 28x28x1 from {tmp_path}/train-images.idx3-ubyte (IDX)")


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


def test_grey_pictures_of_16_bits(tmp_path):
    """Their upper eight are those of a picture of eight."""
    values = np.arange(28 * 28, dtype=np.uint16).reshape(28, 28) * 83
    PIL.Image.fromarray(values).save(tmp_path / "a.png")
    (tmp_path / "labels.txt").write_text("a.png 1\n")
    data = open_data(str(tmp_path), ALEXNET, IMAGES, 1, 0)
    assert "fitted" not in data.describe()
    np.testing.assert_allclose(_take(data, 1)[0]["images"][0, ..., 0], (values >> 8) / 127.5 - 1, atol=1e-6)


@pytest.mark.parametrize(("mode", "nothing", "black"), [
    ("RGBA", (0, 0, 0, 0), (0, 0, 0, 255)), ("LA", (0, 0), (0, 255))])
def test_what_is_transparent_is_white(tmp_path, mode, nothing, black):
    """It is stored as black, and of what is drawn on it in black nothing was left."""
    picture = PIL.Image.new(mode, (28, 28), nothing)
    picture.paste(black, (4, 4, 12, 20))
    picture.save(tmp_path / "a.png")
    (tmp_path / "labels.txt").write_text("a.png 1\n")
    expected = np.ones((28, 28))
    expected[4:20, 4:12] = -1
    found = _take(open_data(str(tmp_path), ALEXNET, IMAGES, 1, 0), 1)[0]["images"][0, ..., 0]
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("content", ["a.png,3\rb.png,1\n", 'a.png,"3' + "x" * 140_000 + "\n",
                                     'a.png,"3\nb.png,1\nc.png,2\n'], ids=["CR", "long", "quotation mark"])
def test_csv_labels_that_are_none(tmp_path, content):
    PIL.Image.new("L", (28, 28)).save(tmp_path / "a.png")
    (tmp_path / "labels.csv").write_bytes(content.encode())
    with pytest.raises(DataError, match=r"labels\.csv: no comma-separated values"):
        open_data(str(tmp_path), ALEXNET, IMAGES, 1, 0)


@pytest.mark.parametrize(("labels", "message"), [
    ("", "labels.txt: empty"),
    ("lonely.png\n", "line 1 is not a file and a label"),
    ("picture 0.png 10\n", "label 10 (example 1) is out of range"),
    ("picture 0.png -1\n", "label -1 (example 1) is out of range"),
    pytest.param(f"picture 0.png {'9' * 5000}\n", "99 (example 1) is out of range", id="digits"),
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


def _refused_picture(folder, message, **info):
    PIL.Image.new("RGB", (32, 32)).save(folder / "picture 1.png", **info)
    (folder / "labels.txt").write_text("picture 1.png 0\n")
    _refused(str(folder), ALEXNET, IMAGES, message)


def test_a_picture_with_too_long_a_text_in_it_is_named(picture_folder):
    info = PIL.PngImagePlugin.PngInfo()
    info.add_text("words", "x" * (2 << 20), zip=True)
    _refused_picture(picture_folder, "picture 1.png: not a readable JPEG or PNG file", pnginfo=info)


def test_a_list_of_nothing_is_refused(picture_folder):
    (picture_folder / "labels.txt").unlink()
    (picture_folder / "labels.csv").write_text(",\n")
    _refused(str(picture_folder), ALEXNET, IMAGES, "labels.csv: lists no images")


def test_pictures_of_other_than_one_or_three_channels_are_refused_at_once(picture_folder):
    config = dataclasses.replace(IMAGES, image_channels=4)
    _refused(str(picture_folder), ALEXNET, config, "image_channels=4: pictures are read in grey")


def test_synthetic_text_of_long_windows_takes_little_memory():
    config = models.load_config("rnnlm", "tiny", batch=2, length=4096)
    tracemalloc.start()
    try:
        data = open_data(None, models.get("rnnlm"), config, 2, 0)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 600e6
    assert data.source.examples == 4096
    assert _take(data, 1)[0]["tokens"].shape == (2, 4096)


def test_any_error_of_a_source_is_one_line():
    def load(numbers):
        raise RuntimeError("the tape\nis torn")

    data = open_data(None, ALEXNET, IMAGES, 6, 0)
    data = dataclasses.replace(data, source=dataclasses.replace(data.source, load=load))
    with pytest.raises(DataError, match=r"^cannot read the data: the tape$"):
        next(data.batches())


def _order(seed, epoch, examples=60_000):
    """The numbers of all examples in the order of an epoch."""
    source = Source("numbers", examples, lambda numbers: {"number": numbers}, {"number": (np.dtype(np.int64), ())})
    return next(Data(source, examples, seed).batches(epoch))["number"]


@pytest.mark.parametrize(("one", "other"), [((0, 0), (0, 1)), ((0, 0), (1, 0)), ((0, 0), (0, 256)), ((0, 0), (256, 0)),
                                            ((1, 2), (2, 1))])
def test_orders_of_epochs_and_seeds_have_nothing_in_common(one, other):
    """Where a list is sorted by ten classes, a place has the same class in both orders in one case of ten."""
    orders = [_order(*which) for which in (one, other)]
    for order in orders:
        np.testing.assert_array_equal(np.sort(order), np.arange(60_000))
        assert abs(np.corrcoef(order, np.arange(60_000))[0, 1]) < 0.02
    assert abs(np.corrcoef(*orders)[0, 1]) < 0.02
    same = (orders[0] // 6_000 == orders[1] // 6_000).mean()
    assert 0.08 < same < 0.12


def test_as_many_batches_are_read_ahead_as_are_asked_for(monkeypatch):
    """While devices compute, all that they ask for at once afterwards is read."""
    read, enough = [], threading.Event()

    def load(numbers):
        read.append(numbers)
        if len(read) >= 6:
            enough.set()
        return data.source.load(numbers)

    data = open_data(None, ALEXNET, IMAGES, 6, 0)
    batches = dataclasses.replace(data, source=dataclasses.replace(data.source, load=load)).batches(ahead=5)
    next(batches)
    assert enough.wait(60)


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


def test_an_idx_file_is_unpacked_as_far_as_its_header_promises(tmp_path):
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(WHOLE + bytes(1 << 26), mtime=0))
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="it is damaged"):
            read_idx(str(path))
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()


def test_synthetic_pictures_are_all_different():
    """Or some of those that are held out would be trained on."""
    pictures = open_data(None, ALEXNET, IMAGES, 1, 0).source.load(np.arange(4000))["images"]
    assert len(set(map(bytes, pictures))) == 4000


@pytest.mark.parametrize(("channels", "told"), [(1, ""), (3, ", fitted from 28x28x1 to 28x28x3")])
def test_grey_pictures_with_transparency_are_grey(tmp_path, channels, told):
    PIL.Image.new("LA", (28, 28), (0, 255)).save(tmp_path / "a.png")
    (tmp_path / "labels.txt").write_text("a.png 1\n")
    data = open_data(str(tmp_path), ALEXNET, dataclasses.replace(IMAGES, image_channels=channels), 1, 0)
    assert data.describe() == f"1 images from {tmp_path}, labels from labels.txt{told}; 10 classes"


def test_a_pipe_is_no_data():
    """It would be empty, or wait for ever, when it is read again behind the check."""
    reader, writer = os.pipe()
    os.write(writer, b"a sentence\n" * 100)
    os.close(writer)
    try:
        with pytest.raises(DataError, match="is a device or a pipe; name a file"):
            check_data(f"/dev/fd/{reader}", TEXT)
    finally:
        os.close(reader)
