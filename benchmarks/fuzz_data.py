"""Kinds of input for `benchmarks.fuzz` that a run reads besides: its metrics, what it trains on, and kept traces."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import math
import os
import pathlib
import random
import sqlite3
import struct
import warnings
from collections.abc import Sequence
from unittest import mock

import numpy as np
import PIL.Image

from benchmarks.fuzz_inputs import Target, damaged, json_of, lines_of
from pase_mtf.launch.data.images import image_source
from pase_mtf.launch.data.text import language_source
from pase_mtf.launch.files import _step_of
from pase_mtf.launch.judging.judge import _metrics
from pase_mtf.lowering.kept_traces import _SEAL, KeptTraces
from pase_mtf.lowering.traces import Trace, TracedNode
from pase_mtf.machine.references import REFERENCES
from pase_mtf.models import load_config

__all__ = ["DATA_TARGETS", "data_targets"]

DATA_TARGETS = ("metrics", "IDX", "labels", "pictures", "text", "traces")
"""The names of `data_targets`."""
_PICTURES = (*(("PNG", mode) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")), ("JPEG", "L"), ("JPEG", "RGB"))
"""Formats and modes of pictures."""


class _Workplace:
    """Originals of these files, and a folder for those that are changed."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder / "data"
        (self._folder / "pictures").mkdir(parents=True)
        self._images = load_config("alexnet", "tiny", batch=4)
        self._texts = load_config("rnnlm", "tiny", batch=4, length=16, vocab=400)
        for name in ("one.png", "two.png"):
            PIL.Image.new("L", (8, 8)).save(self._folder / "pictures" / name)
        self._trace = Trace([TracedNode(REFERENCES[0], "abc", True, [(0, 1), None, (-1, 0)], [(0, -1)])], [(0, 0)])
        with contextlib.closing(KeptTraces(self._folder / "kept.sqlite", "one")) as kept:
            kept.keep(("key",), self._trace)
        self._traces = (self._folder / "kept.sqlite").read_bytes()

    def _path(self, name: str, raw: bytes) -> pathlib.Path:
        path = self._folder / name
        path.write_bytes(raw)
        return path

    def metrics(self, source: random.Random) -> bytes:
        return lines_of("\n".join(json.dumps({"step": step, "arm": "search", "loss": 0.5, "ms": 1.0, "timed": True})
                                  for step in range(4)), source)

    def read_metrics(self, raw: bytes) -> None:
        path = self._path("metrics.jsonl", raw)
        _metrics(str(path), "search")
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            _step_of(line)

    def idx(self, source: random.Random) -> bytes:
        shape = source.choice(((6, 8, 8), (6, 8, 8, 3), (6,)))
        raw = struct.pack(f">I{len(shape)}I", 0x800 + len(shape), *shape) + bytes(math.prod(shape))
        raw = gzip.compress(raw, mtime=0) if source.random() < 0.3 else raw
        return damaged(raw, source) if source.random() < 0.8 else raw

    def read_idx(self, raw: bytes) -> None:
        labels = self._path("labels", struct.pack(">II", 0x801, 6) + bytes(6))
        found = image_source([str(self._path("images", raw)), str(labels)], self._images)
        found.load(np.arange(found.examples))

    def labels(self, source: random.Random) -> tuple[str, bytes]:
        name = source.choice(("labels.txt", "labels.csv"))
        between = "," if name.endswith(".csv") else " "
        rows: Sequence[str] = [f"{picture}{between}{source.choice(('3', 'cat', '-1', '99', ''))}"
                               for picture in ("one.png", "two.png")]
        raw = "\n".join(rows).encode()
        return name, damaged(raw, source) if source.random() < 0.7 else raw

    def read_labels(self, made: tuple[str, bytes]) -> None:
        for other in ("labels.txt", "labels.csv"):
            (self._folder / "pictures" / other).unlink(missing_ok=True)
        self._path(f"pictures/{made[0]}", made[1])
        found = image_source([str(self._folder / "pictures")], self._images)
        found.load(np.arange(found.examples))

    def picture(self, source: random.Random) -> bytes:
        raw, (form, mode) = io.BytesIO(), source.choice(_PICTURES)
        PIL.Image.new(mode, (8, 8)).save(raw, form)
        return damaged(raw.getvalue(), source)

    def read_picture(self, raw: bytes) -> None:
        (self._folder / "seen").mkdir(exist_ok=True)  # apart from those that the labels are of
        self._path("seen/labels.txt", b"one.png 3\n")
        self._path("seen/one.png", raw)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)  # of a large one that is read
            found = image_source([str(self._folder / "seen")], self._images)
            found.load(np.arange(found.examples))

    def text(self, source: random.Random) -> bytes:
        lines = ("".join(source.choices("the cat sat, é1\t", k=30)) for _ in range(20))
        return damaged("\n".join(lines).encode(), source)

    def read_text(self, raw: bytes) -> None:
        # Vocabularies are kept in the user's cache folder.
        with mock.patch.dict(os.environ, XDG_CACHE_HOME=str(self._folder)):
            found = language_source([str(self._path("read.txt", raw))], self._texts)
        found.load(np.arange(found.examples))

    def traces(self, source: random.Random) -> bytes:
        if source.random() < 0.5:
            return damaged(self._traces, source)
        path = self._path("made.sqlite", self._traces)
        with contextlib.closing(sqlite3.connect(path)) as file, file:
            (text,), = file.execute("SELECT trace FROM traces").fetchall()
            changed = json_of(json.loads(text[_SEAL:]), source).decode(errors="replace")
            file.execute("UPDATE traces SET trace = ?", (text[:_SEAL] + changed,))
        return path.read_bytes()

    def read_traces(self, raw: bytes) -> None:
        with contextlib.closing(KeptTraces(self._path("read.sqlite", raw), "one")) as kept:
            if kept.get(("key",)) not in (None, self._trace):
                raise AssertionError("a trace that was changed is taken")
            kept.keep(("key",), self._trace)


def data_targets(folder: pathlib.Path) -> list[Target]:
    """All of them; what they need lies in the folder."""
    place = _Workplace(folder)
    return [Target("metrics", place.metrics, place.read_metrics), Target("IDX", place.idx, place.read_idx),
            Target("labels", place.labels, place.read_labels), Target("pictures", place.picture, place.read_picture),
            Target("text", place.text, place.read_text),
            Target("traces", place.traces, place.read_traces)]
