"""Images: IDX files (MNIST, Fashion-MNIST), or a folder of JPEG and PNG files with a list of labels."""

from __future__ import annotations

import csv
import gzip
import io
import math
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pase_mtf.errors import DataError, shortened
from pase_mtf.launch.data.batches import Batch, Source
from pase_mtf.launch.data.text import read_lines
from pase_mtf.models.checks import kept_dtype
from pase_mtf.models.presets import ImageConfig

if TYPE_CHECKING:
    import PIL.Image

__all__ = ["image_source", "read_idx"]

_MOST_COMPRESSED = 1032
"""Times that deflate makes anything smaller, at most."""
_LABEL_FILES = ("labels.txt", "labels.csv")
_IDX_NAMES = ("train-images-idx3-ubyte", "train-images.idx3-ubyte", "train-images-idx4-ubyte")
# How many files of a folder have their header read before the training starts; the others are checked when used.
_CHECKED = 2000


def image_source(paths: Sequence[str], config: ImageConfig) -> Source:
    """Examples from IDX files or from a folder of pictures.

    Args:
      paths: an IDX file of images, one of images and one of labels, or a folder.
      config: sizes of the model.

    Raises:
      DataError: what is wrong with which file.
    """
    if config.image_channels not in (1, 3):
        raise DataError(f"image_channels={config.image_channels}: pictures are read in grey (1) or in colour (3); take "
                        "one of these, or synthetic data")
    if len(paths) == 2:
        return _idx_source(paths[0], paths[1], config)
    path = paths[0]
    if not os.path.isdir(path):
        return _idx_source(path, _labels_beside(path), config)
    for name in _IDX_NAMES:
        for candidate in (os.path.join(path, name), os.path.join(path, name + ".gz")):
            if os.path.isfile(candidate):  # Kaggle's MNIST has folders of these names beside the files
                return _idx_source(candidate, _labels_beside(candidate), config)
    for name in _LABEL_FILES:
        if os.path.exists(os.path.join(path, name)):
            return _folder_source(path, os.path.join(path, name), config)
    raise DataError(f"{path}: has neither {_IDX_NAMES[0]} (or .gz) nor {' or '.join(_LABEL_FILES)}; give a folder of "
                    "IDX files, or of JPEG and PNG files with a label list (lines of \"file label\")")


def _labels_beside(path: str) -> str:
    """The file of labels that belongs to an IDX file of images."""
    folder, name = os.path.split(path)
    other = name.replace("images", "labels").replace("idx3", "idx1").replace("idx4", "idx1")
    stem = other.removesuffix(".gz")
    for candidate in (other, stem, stem + ".gz"):
        if candidate != name and os.path.isfile(os.path.join(folder, candidate)):
            return os.path.join(folder, candidate)
    raise DataError(f"{path}: no labels beside it (looked for {other}); give both as images,labels")


def read_idx(path: str) -> np.ndarray:
    """Reads an IDX file of bytes, gzipped or not (format: http://yann.lecun.com/exdb/mnist, "The IDX file format").

    Returns:
      uint8 array of the shape that stands in the header.

    Raises:
      DataError: it cannot be read, is no IDX file of bytes, or is longer or shorter than its header says.
    """
    try:
        with open(path, "rb") as file:
            raw = file.read()
        if raw[:2] == b"\x1f\x8b":
            raw = _unpacked(raw)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or f"damaged gzip data ({error})"
        raise DataError(f"cannot read {path}: {reason}; fetch the file again") from error
    if not raw:
        raise DataError(f"{path}: empty; fetch the file again")
    if len(raw) < 4 or raw[:3] != b"\0\0\x08" or not 1 <= raw[3] <= 4:
        raise DataError(f"{path}: starts with 0x{raw[:4].hex()}, an IDX file of bytes with 0x00000801 to 0x00000804; "
                        "give an IDX file")
    header, shape = 4 + 4 * raw[3], _shape(raw)
    expected = header + math.prod(shape) if shape else header
    if not shape or len(raw) < expected:
        raise DataError(f"{path}: {len(raw):,} bytes, its header promises {expected:,}; it is truncated, fetch it "
                        "again")
    if len(raw) > expected:  # how many more, nobody has unpacked
        raise DataError(f"{path}: more than the {expected:,} bytes that its header promises; it is damaged, fetch it "
                        "again")
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)


def _shape(raw: bytes) -> tuple[int, ...]:
    """The sizes that the header of an IDX file of bytes tells; none where there is no whole one."""
    count = raw[3] if len(raw) > 3 and raw[:3] == b"\0\0\x08" else 0
    return struct.unpack(f">{count}I", raw[4:4 + 4 * count]) if 1 <= count <= 4 and len(raw) >= 4 + 4 * count else ()


def _unpacked(raw: bytes) -> bytes:
    """What a gzip file holds, up to a byte more than its header promises: one of a megabyte may unpack to a thousand.
    That byte, or the end in its place, also lets gzip look at its checksum."""
    with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
        start = file.read(20)  # the longest header
        if not (shape := _shape(start)):
            return start
        left = 4 + 4 * len(shape) + math.prod(shape) + 1 - len(start)
        return start + file.read(max(0, min(left, _MOST_COMPRESSED * len(raw))))


def _idx_source(images_path: str, labels_path: str, config: ImageConfig) -> Source:
    images, labels = read_idx(images_path), read_idx(labels_path)
    if images.ndim not in (3, 4):
        raise DataError(f"{images_path}: magic 0x0000080{images.ndim}, images have 0x00000803 or (with channels) "
                        "0x00000804; is it a file of labels?")
    if labels.ndim != 1:
        raise DataError(f"{labels_path}: magic 0x0000080{labels.ndim}, labels have 0x00000801; is it a file of images?")
    if len(images) != len(labels):
        raise DataError(f"{images_path} has {len(images):,} images and {labels_path} has {len(labels):,} labels; "
                        "give files that belong together")
    if not images.size:
        raise DataError(f"{images_path}: holds no images; give another file")
    if images.ndim == 3:
        images = images[..., None]
    if images.shape[3] not in (1, 3):
        raise DataError(f"{images_path}: images with {images.shape[3]} channels; they need 1 (grey) or 3 (colour)")
    labels = _checked_labels(labels.astype(np.int32), labels_path, config)
    shape, dtype = (config.image, config.image, config.image_channels), np.dtype(kept_dtype(config.dtype))
    stored = images.shape[1:]

    def load(numbers: np.ndarray) -> Batch:
        chosen = images[numbers]
        if stored != shape:
            chosen = np.stack([_fit(_picture(image), config) for image in chosen])
        return {"images": _scaled(chosen, dtype), "labels": labels[numbers]}

    return _source(f"{len(images):,} images of {'x'.join(map(str, stored))} from {images_path} (IDX)"
                   f"{_fitted_note([stored], shape)}", len(images), load, shape, dtype, config)


def _folder_source(folder: str, label_path: str, config: ImageConfig) -> Source:
    names, labels = _read_label_list(label_path, config)
    paths = [os.path.join(folder, name) for name in names]
    sizes = []
    for path in paths[:_CHECKED]:
        with _open_image(path) as image:
            grey = image.mode in ("1", "L", "LA") or image.mode.startswith("I")
            sizes.append((image.height, image.width, 1 if grey else 3))
    for path in paths[_CHECKED:]:
        if not os.path.exists(path):
            raise DataError(f"{label_path}: names {os.path.basename(path)!r}, which is not in the folder; take it off "
                            "the list or add the file")
    shape, dtype = (config.image, config.image, config.image_channels), np.dtype(kept_dtype(config.dtype))

    def load(numbers: np.ndarray) -> Batch:
        images = []
        for number in numbers:
            with _open_image(paths[number]) as image:
                images.append(_fit(image, config, paths[number]))
        return {"images": _scaled(np.stack(images), dtype), "labels": labels[numbers]}

    return _source(f"{len(paths):,} images from {folder}, labels from {os.path.basename(label_path)}"
                   f"{_fitted_note(sizes, shape)}", len(paths), load, shape, dtype, config)


def _source(description: str, examples: int, load: Callable[[np.ndarray], Batch], shape: tuple[int, ...],
            dtype: np.dtype, config: ImageConfig) -> Source:
    return Source(f"{description}; {config.classes} classes", examples, load,
                  {"images": (dtype, shape), "labels": (np.dtype(np.int32), ())})


def _read_label_list(path: str, config: ImageConfig) -> tuple[list[str], np.ndarray]:
    """File names and labels. Labels are numbers, or names of classes, numbered in alphabetical order."""
    lines, example = read_lines(path), f"lines such as \"cat.png{',' if path.endswith('.csv') else ' '}3\""
    if path.endswith(".csv"):
        try:
            # Strict: a quotation mark that is never closed would take all lines behind it for one label.
            rows = [[field.strip() for field in row] for row in csv.reader(lines, strict=True)]
        except csv.Error as error:
            raise DataError(f"{path}: no comma-separated values ({error}); write {example}") from error
    else:
        rows = [line.rsplit(None, 1) for line in lines]
    entries = []
    for number, row in enumerate(rows, 1):
        if not any(row):
            continue
        if len(row) != 2 or not all(row):
            raise DataError(f"{path}: line {number} is not a file and a label; write {example}")
        entries.append(row)
    if path.endswith(".csv") and len(entries) > 1 and not _is_number(entries[0][1]) and _is_number(entries[1][1]):
        entries = entries[1:]  # a heading
    if not entries:
        raise DataError(f"{path}: lists no images; write {example}")
    names, given = [entry[0] for entry in entries], [entry[1] for entry in entries]
    if all(map(_is_number, given)):
        # Python reads no number of thousands of digits; one of twenty is no label either.
        labels = np.array([int(label) if len(label) < 20 else -1 for label in given], object)
    else:
        classes = {label: number for number, label in enumerate(sorted(set(given)))}
        labels = np.array([classes[label] for label in given], object)
    return names, _checked_labels(labels, path, config, given)


def _is_number(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


def _checked_labels(labels: np.ndarray, path: str, config: ImageConfig, given: Sequence[str] = ()) -> np.ndarray:
    wrong = np.flatnonzero((labels < 0) | (labels >= config.classes))
    if len(wrong):
        number = int(wrong[0])
        label = shortened(given[number] if given else labels[number], quoted=False)
        raise DataError(f"{path}: label {label} (example {number + 1}) is out of range, the model has "
                        f"{config.classes} classes, 0 to {config.classes - 1}; use a preset with more classes")
    return labels.astype(np.int32)


def _open_image(path: str) -> PIL.Image.Image:
    """The opened file; its pixels are not read yet."""
    import PIL.Image  # loaded only by runs that read pictures
    try:
        return PIL.Image.open(path, formats=("JPEG", "PNG"))
    except FileNotFoundError as error:
        raise DataError(f"{path}: named in the label list, and not in the folder; take it off the list or add the "
                        "file") from error
    except (OSError, ValueError, PIL.Image.DecompressionBombError) as error:  # ValueError: of texts in it, or profiles
        raise DataError(f"{path}: not a readable JPEG or PNG file; replace it or take it off the label list") from error


def _picture(pixels: np.ndarray) -> PIL.Image.Image:
    import PIL.Image  # as in `_open_image`
    return PIL.Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)


def _fit(image: PIL.Image.Image, config: ImageConfig, path: str = "") -> np.ndarray:
    """Pixels in the model's size and channels, uint8."""
    import PIL.Image  # as in `_open_image`
    try:
        if image.mode.startswith("I"):  # 16 bits of grey, which Pillow would cut off at 255
            image = PIL.Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8))
        if "A" in image.getbands() or "transparency" in image.info:
            # What is stored where nothing is seen is black as a rule, and so may be what is drawn on it.
            seen = image.convert("RGBA")
            image = PIL.Image.alpha_composite(PIL.Image.new("RGBA", seen.size, "white"), seen)
        image = image.convert("L" if config.image_channels == 1 else "RGB")
        if image.size != (config.image, config.image):
            image = image.resize((config.image, config.image), PIL.Image.Resampling.BILINEAR)
    except (OSError, SyntaxError, ValueError) as error:  # Pillow raises all of them for damaged files
        raise DataError(f"{path}: damaged ({error}); replace it, or take it off the label list and begin anew"
                        ) from error
    pixels = np.asarray(image)
    return pixels[..., None] if pixels.ndim == 2 else pixels


def _fitted_note(sizes: Sequence[tuple[int, ...]], shape: tuple[int, ...]) -> str:
    others = sorted({size for size in sizes if size != shape})
    if not others:
        return ""
    found = "x".join(map(str, others[0])) + (" and other sizes" if len(others) > 1 else "")
    return f", fitted from {found} to {'x'.join(map(str, shape))}"


def _scaled(pixels: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """0 to 255 -> -1 to 1."""
    return pixels.astype(dtype) / dtype.type(127.5) - dtype.type(1)
