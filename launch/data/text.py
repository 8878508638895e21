"""Text: parallel or plain files, cut into tokens by byte-pair encoding (the `tokenizers` library).

Parallel text: line i of the second file is the translation of line i of the first. Plain text: the tokens of the whole
file are cut into windows of the model's length; the encoder reads one, the decoder learns to say the next. A language
model reads a window and learns to say at every place what comes next.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import platformdirs

from pase_mtf.errors import DataError, PaseError
from pase_mtf.files import write_atomically
from pase_mtf.launch.data.batches import Batch, Source
from pase_mtf.models.presets import TextConfig
from pase_mtf.models.recurrent_presets import BiglstmConfig, RnnlmConfig

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["END", "PADDING", "RESERVED", "START", "UNKNOWN", "check_text", "language_source", "next_tokens", "pad_pair",
           "read_lines", "text_source"]

PADDING, START, END, UNKNOWN = range(4)
RESERVED = 4
_SPECIAL = ["<pad>", "<start>", "<end>", "<unknown>"]
# The reserved tokens and one for each byte: with them every text can be written down.
_LEAST_VOCABULARY = RESERVED + 256
_CHUNK = 10_000
_LONGEST_WORD = 256


def read_lines(path: str) -> list[str]:
    """The lines of a UTF-8 file, without their ends and without a byte order mark.

    Raises:
      DataError: it cannot be read, is empty, or is not UTF-8 (says in which line).
    """
    try:
        with open(path, "rb") as file:
            raw = file.read()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; give a text file") from error
    raw = raw.removeprefix(b"\xef\xbb\xbf")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}: line {line} is not UTF-8 (byte 0x{raw[error.start]:02x}); convert the file, for "
                        f"example with iconv -f {_written_in(raw)} -t UTF-8") from error
    if not text.strip():
        raise DataError(f"{path}: empty; give a file with text in it")
    if "\0" in text:
        raise DataError(f"{path}: holds zero bytes; it is no text file")
    # Not splitlines(): it also splits at characters such as U+2028 that may stand inside a sentence.
    text = text.replace("\r\n", "\n")
    # Nor at a lone carriage return, which may stand there, too, unless nothing else ends a line.
    lines = (text if "\n" in text else text.replace("\r", "\n")).split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def _written_in(raw: bytes) -> str:
    """What a text that is not UTF-8 is written in, as far as its mark tells."""
    return "UTF-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "LATIN1"


def check_text(paths: Sequence[str], config: TextConfig) -> None:
    """Reads the files, and looks at how many there are, and how many lines they have.

    Raises:
      DataError: see `read_lines`; a vocabulary too small for any text; two files of a language model, or two of which
        the lines of one are no translation of the other's.
    """
    texts = _read(paths, config, "text.txt")
    if isinstance(config, (BiglstmConfig, RnnlmConfig)):
        _check_alone(paths)
    elif len(texts) == 2:
        _pairs(paths, texts)


def text_source(paths: Sequence[str], config: TextConfig) -> Source:
    """Examples from one plain text or from two parallel ones.

    Raises:
      DataError: see `read_lines`; unequal numbers of lines; too little text; a vocabulary too small for any text.
    """
    texts = _read(paths, config, "text.txt or source.txt,target.txt")
    if len(texts) == 2:
        return _parallel(paths, texts, config)
    return _plain(paths[0], texts[0], config)


def language_source(paths: Sequence[str], config: TextConfig) -> Source:
    """Examples for a language model from one plain text: windows of it, and the same moved on by one token.

    Raises:
      DataError: see `text_source`; more than one file.
    """
    texts = _read(paths, config, "text.txt")
    _check_alone(paths)
    tokenizer, tokens = _tokens(texts[0], config)
    length = config.length
    examples = (len(tokens) - 1) // length
    if examples < 1:
        raise DataError(f"{paths[0]}: {len(tokens)} tokens, at least {length + 1} are needed (a window of {length} and "
                        "what comes next); give a longer text or a model with a shorter length")

    def load(numbers: np.ndarray) -> Batch:
        return next_tokens(tokens[numbers[:, None] * length + np.arange(length + 1)])

    shape = (np.dtype(np.int32), (length,))
    return Source(f"{len(tokens):,} tokens of plain text from {paths[0]}, {examples:,} windows of {length}; vocabulary "
                  f"of {tokenizer.get_vocab_size():,}", examples, load, {"tokens": shape, "targets": shape}, tokenizer)


def next_tokens(windows: np.ndarray) -> Batch:
    """A batch for a language model: windows of one token more than it reads."""
    return {"tokens": windows[:, :-1], "targets": windows[:, 1:]}


def _read(paths: Sequence[str], config: TextConfig, wanted: str) -> list[list[str]]:
    for path in paths:
        if os.path.isdir(path):
            raise DataError(f"{path}: a folder, and the model trains on text; give {wanted}")
    if config.vocab < _LEAST_VOCABULARY:
        raise DataError(f"vocab={config.vocab}: too small for text; use a preset with at least {_LEAST_VOCABULARY}")
    return [read_lines(path) for path in paths]


def _tokens(lines: list[str], config: TextConfig) -> tuple[Tokenizer, np.ndarray]:
    """(tokenizer, the tokens of the whole text end to end)."""
    tokenizer = _vocabulary([lines], config.vocab)
    return tokenizer, _Ragged(_encode(tokenizer, [line + "\n" for line in lines])).tokens


def _check_alone(paths: Sequence[str]) -> None:
    if len(paths) > 1:
        raise DataError(f"{','.join(paths)}: {len(paths)} files, and a language model trains on one; give text.txt")


def _pairs(paths: Sequence[str], texts: list[list[str]]) -> list[tuple[str, str]]:
    """The lines of two files that have text in both."""
    if len(texts[0]) != len(texts[1]):
        raise DataError(f"{paths[0]} has {len(texts[0]):,} lines and {paths[1]} has {len(texts[1]):,}; line i of one "
                        "has to be the translation of line i of the other")
    pairs = [(source, target) for source, target in zip(*texts, strict=True) if source.strip() and target.strip()]
    if not pairs:
        raise DataError(f"{paths[0]}, {paths[1]}: no line has text in both files; check that they belong together")
    return pairs


def _parallel(paths: Sequence[str], texts: list[list[str]], config: TextConfig) -> Source:
    pairs = _pairs(paths, texts)
    lines, texts = len(texts[0]), [list(side) for side in zip(*pairs, strict=True)]
    tokenizer = _vocabulary(texts, config.vocab)
    most = config.length - 1  # room for the end of the sentence
    sides = [_Ragged(_encode(tokenizer, text)) for text in texts]
    cut = sum(int((side.lengths > most).sum()) for side in sides)

    def load(numbers: np.ndarray) -> Batch:
        source, target = ([np.append(side[number][:most], END) for number in numbers] for side in sides)
        return pad_pair(source, target, config.length)

    notes = [f"vocabulary of {tokenizer.get_vocab_size():,}"]
    if len(pairs) < lines:
        notes.append(f"{lines - len(pairs):,} pairs with an empty side left out")
    if cut:
        notes.append(f"{cut / (2 * len(pairs)):.1%} of the sentences cut at {config.length} tokens")
    return _source(f"{len(pairs):,} sentence pairs from {paths[0]}, {paths[1]}; {'; '.join(notes)}",
                   len(pairs), load, tokenizer, config)


def _plain(path: str, lines: list[str], config: TextConfig) -> Source:
    tokenizer, tokens = _tokens(lines, config)
    examples = len(tokens) // config.length - 1
    if examples < 1:
        raise DataError(f"{path}: {len(tokens)} tokens, at least {2 * config.length} are needed (two windows of "
                        f"{config.length}); give a longer text or a model with a shorter length")
    windows = tokens[:(examples + 1) * config.length].reshape(examples + 1, config.length)

    def load(numbers: np.ndarray) -> Batch:
        return pad_pair(windows[numbers], windows[numbers + 1], config.length)

    return _source(f"{len(tokens):,} tokens of plain text from {path}, {examples:,} windows of {config.length} to be "
                   f"continued; vocabulary of {tokenizer.get_vocab_size():,}", examples, load, tokenizer, config)


def _source(description: str, examples: int, load: Callable[[np.ndarray], Batch], tokenizer: Tokenizer,
            config: TextConfig) -> Source:
    shape = (np.dtype(np.int32), (config.length,))
    return Source(description, examples, load, {"source": shape, "decoder_input": shape, "target": shape}, tokenizer)


def pad_pair(sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], length: int) -> Batch:
    """A batch for the encoder and decoder: ids padded to `length`, and the target moved right by one."""
    source, target = (np.full((len(rows), length), PADDING, np.int32) for rows in (sources, targets))
    for padded, rows in ((source, sources), (target, targets)):
        for line, row in zip(padded, rows, strict=True):
            line[:len(row)] = row
    start = np.full((len(targets), 1), START, np.int32)
    return {"source": source, "decoder_input": np.concatenate([start, target[:, :-1]], 1), "target": target}


class _Ragged:
    """Rows of different lengths, end to end: a list of arrays would take several times the memory."""

    def __init__(self, rows: Iterator[list[int]]) -> None:
        tokens, lengths = [], []
        for chunk in itertools.batched(rows, _CHUNK) if hasattr(itertools, "batched") else _chunks(rows):
            lengths.append(np.fromiter(map(len, chunk), np.int64, len(chunk)))
            tokens.append(np.fromiter(itertools.chain.from_iterable(chunk), np.int32))
        self.tokens = np.concatenate(tokens)
        self.lengths = np.concatenate(lengths)
        self._ends = np.cumsum(self.lengths)

    def __getitem__(self, number: int) -> np.ndarray:
        return self.tokens[self._ends[number] - self.lengths[number]:self._ends[number]]


def _chunks(rows: Iterator[list[int]]) -> Iterator[list[list[int]]]:
    while chunk := list(itertools.islice(rows, _CHUNK)):
        yield chunk


def _encode(tokenizer: Tokenizer, lines: Sequence[str]) -> Iterator[list[int]]:
    tokenizer.encode_special_tokens = True  # "<pad>" in a text is five letters, no padding
    for start in range(0, len(lines), _CHUNK):
        for encoding in tokenizer.encode_batch_fast(lines[start:start + _CHUNK], add_special_tokens=False):
            yield encoding.ids


def _vocabulary(texts: Sequence[Sequence[str]], size: int) -> Tokenizer:
    """A tokenizer for these texts, learned once and kept in the user's cache directory under a hash of the texts."""
    import tokenizers  # loaded only by runs that read text
    # Of another number where texts are cut otherwise: a tokenizer that is kept says how it cuts them.
    digest = hashlib.sha256(f"2 {tokenizers.__version__} {size}".encode())
    for text in texts:
        for line in text:
            digest.update(line.encode() + b"\n")
    path = None
    # A cache that cannot be read or written, or has no home, only costs the time to learn the vocabulary again.
    with contextlib.suppress(Exception):
        folder = platformdirs.user_cache_path("pase_mtf", appauthor=False) / "vocabularies"
        path = folder / f"{digest.hexdigest()[:24]}.json"
        return tokenizers.Tokenizer.from_file(str(path))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=_SPECIAL[UNKNOWN]))
    # Byte-pair encoding takes the square of a word's length, and what is blank is a word, too: one of millions of
    # letters or blanks is cut, all others are not.
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
        tokenizers.pre_tokenizers.Split(
            tokenizers.Regex(rf"\S{{{_LONGEST_WORD}}}|\s{{{_LONGEST_WORD}}}"), "isolated"),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, special_tokens=_SPECIAL, show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    _interruptible(lambda: tokenizer.train_from_iterator(itertools.chain.from_iterable(texts), trainer))
    if path is not None:
        with contextlib.suppress(OSError, PaseError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, tokenizer.to_str())
    return tokenizer


def _interruptible(work: Callable[[], None]) -> None:
    """Runs what does not look at signals (a compiled library) in a thread of its own, so that Ctrl-C need not wait."""
    outcome: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            outcome.append(error)
    thread = threading.Thread(target=run, daemon=True)  # the end of the process does not wait for it
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
    if outcome:
        raise outcome[0]
