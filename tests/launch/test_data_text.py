"""What a run trains on: parallel text, plain text to be continued, and the windows of a language model."""

import _thread
import dataclasses
import itertools
import signal
import threading
from pathlib import Path

import numpy as np
import platformdirs
import pytest

from pase_mtf import models
from pase_mtf.errors import DataError
from pase_mtf.launch.data import check_data, open_data
from pase_mtf.launch.data.synthetic import _text, _translations
from pase_mtf.launch.data.text import END, PADDING, RESERVED, START, _interruptible, read_lines

TEXT = models.load_config("transformer", "tiny", batch=4, length=16, vocab=400)
TRANSFORMER = models.get("transformer")
LANGUAGE = models.load_config("rnnlm", "tiny", batch=4, length=16, vocab=400)
RNNLM = models.get("rnnlm")


def _take(data, count):
    return list(itertools.islice(data.batches(), count))


def _refused(spec, model, config, message):
    with pytest.raises(DataError) as caught:
        open_data(spec, model, config, config.batch, 0)
    assert message in str(caught.value)
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
    lines = ["Grüße, 東京 — naïve\u2028½ 🙂", "tab\tand  spaces", "a<pad> or <end>, <start> <unknown>"]
    for name in ("a", "b"):
        (tmp_path / name).write_bytes("\ufeff".encode() + "\n".join(lines).encode())
    config = dataclasses.replace(TEXT, length=128)
    data = open_data(f"{tmp_path}/a,{tmp_path}/b", TRANSFORMER, config, 3, 0)
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


def test_plain_text_in_windows(tmp_path, cache_dir):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {number} of a text, {number * number} squared\n" for number in range(200)))
    data = open_data(str(path), RNNLM, LANGUAGE, LANGUAGE.batch, seed=0)
    count = data.source.examples
    everything = data.source.load(np.arange(count))
    assert everything["tokens"].shape == everything["targets"].shape == (count, LANGUAGE.length)
    # The windows follow each other in the text: put together they are its beginning, and nothing is left out.
    assert path.read_text().startswith(data.vocabulary.decode(everything["tokens"].ravel().tolist()))
    flat = everything["tokens"].ravel()
    assert (everything["targets"].ravel()[:-1] == flat[1:]).all()
    features = RNNLM.features(LANGUAGE, LANGUAGE.batch)
    batch, = _take(data, 1)
    assert {name: list(value.shape) for name, value in batch.items()} == {
        name: shape.to_integer_list for name, (shape, _) in features.items()}


def test_a_language_model_wants_one_file_of_enough_text(tmp_path, cache_dir):
    path = tmp_path / "text.txt"
    path.write_text("short\n")
    with pytest.raises(DataError, match=r"at least 17 are needed \(a window of 16 and what comes next\)"):
        open_data(str(path), RNNLM, LANGUAGE, 4, seed=0)
    with pytest.raises(DataError, match="2 files, and a language model trains on one"):
        open_data(f"{path},{path}", RNNLM, LANGUAGE, 4, seed=0)
    with pytest.raises(DataError, match=r"a folder, and the model trains on text; give text.txt$"):
        open_data(str(tmp_path), RNNLM, LANGUAGE, 4, seed=0)


def test_synthetic_text_can_be_learned():
    data = open_data(None, RNNLM, LANGUAGE, 64, seed=0)
    assert "synthetic" in data.describe()
    pairs = []
    for batch in _take(data, 20):
        assert batch["tokens"].min() >= RESERVED
        assert batch["targets"].max() < LANGUAGE.vocab
        assert (batch["tokens"][:, 1:] == batch["targets"][:, :-1]).all()
        pairs += zip(batch["tokens"].ravel().tolist(), batch["targets"].ravel().tolist(), strict=True)
    # Three times out of four the next word is the one that mostly follows.
    followers = {}
    for word, following in pairs:
        followers.setdefault(word, []).append(following)
    usual = sum(max(map(words.count, set(words))) for words in followers.values())
    assert 0.7 < usual / len(pairs) < 0.9


def test_windows_of_synthetic_text_share_nothing():
    """Or those that are held out would be trained on."""
    source = _text(dataclasses.replace(LANGUAGE, vocab=60000), seed=0)
    windows = source.load(np.arange(40))["tokens"].tolist()
    runs = [{tuple(window[begin:begin + 8]) for begin in range(len(window) - 7)} for window in windows]
    assert len(set().union(*runs)) > 0.9 * 40 * (LANGUAGE.length - 7)  # some words are frequent
    assert np.isfinite(source.load(np.array([source.examples - 1]))["targets"]).all()


def test_a_word_of_a_million_letters(tmp_path, cache_dir):
    """Byte-pair encoding took the square of its length; the words of other texts are not touched by the cut."""
    rng = np.random.default_rng(0)
    (tmp_path / "long.txt").write_bytes(rng.integers(97, 107, 1_000_000, np.uint8).tobytes())
    data = open_data(str(tmp_path / "long.txt"), RNNLM, LANGUAGE, LANGUAGE.batch, 0)
    assert next(data.batches())["tokens"].shape == (4, 16)


def test_a_run_of_blanks_is_cut_as_a_word_is(parallel):
    tokenizer = open_data(parallel, TRANSFORMER, TEXT, 4, 0).vocabulary
    for text in (3000 * " " + "end", 3000 * "\t"):
        pieces = tokenizer.pre_tokenizer.pre_tokenize_str(text)
        assert max(end - begin for _, (begin, end) in pieces) <= 257


def test_data_is_checked_without_a_model(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    for spec, match in ((str(tmp_path / "nothing.txt"), "no such file"), (str(tmp_path / "empty.txt"), "empty"),
                        (str(tmp_path), "a folder")):
        with pytest.raises(DataError, match=match):
            check_data(spec, LANGUAGE)
    (tmp_path / "one.txt").write_text("a\n")
    (tmp_path / "two.txt").write_text("a\nb\n")
    for config, match in ((TEXT, "has 1 lines and .* has 2"), (LANGUAGE, "a language model trains on one")):
        with pytest.raises(DataError, match=match):
            check_data(f"{tmp_path}/one.txt,{tmp_path}/two.txt", config)
    with pytest.raises(DataError, match=r"empty\.txt"):
        check_data(str(tmp_path / "empty.txt"), models.load_config("alexnet", "tiny", batch=4))


def test_ctrl_c_does_not_wait_for_a_library():
    """Compiled code looks at no signal, so it runs beside the thread that does."""
    started, release = threading.Event(), threading.Event()
    places = []

    def work():
        places.append(threading.current_thread())
        started.set()
        release.wait(60)

    threading.Thread(target=lambda: started.wait(60) and _thread.interrupt_main(), daemon=True).start()
    # A process that a script starts in the background ignores Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            _interruptible(work)
    finally:
        signal.signal(signal.SIGINT, before)
    release.set()
    assert places[0] is not threading.main_thread()


def test_what_fails_beside_fails():
    with pytest.raises(ZeroDivisionError):
        _interruptible(lambda: 1 / 0)


def test_carriage_returns_alone_end_lines(parallel):
    """Two files of 19 sentences were one pair, cut at the length of the model."""
    for path in map(Path, parallel.split(",")):
        path.write_bytes(path.read_bytes().replace(b"\r\n", b"\n").replace(b"\n", b"\r"))
    assert open_data(parallel, TRANSFORMER, TEXT, 9, 0).describe().startswith("18 sentence pairs from ")


def test_a_carriage_return_within_a_sentence_stays(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\rtwo\nthree\n")
    assert read_lines(str(tmp_path / "a.txt")) == ["one\rtwo", "three"]


@pytest.mark.parametrize(("encoding", "told"), [("utf-16", "UTF-16"), ("latin-1", "LATIN1")])
def test_of_another_encoding_it_is_told_which(tmp_path, encoding, told):
    (tmp_path / "a.txt").write_bytes("Grüße\n".encode(encoding))
    with pytest.raises(DataError, match=f"iconv -f {told} -t UTF-8"):
        read_lines(str(tmp_path / "a.txt"))


def test_synthetic_sentences_share_nothing():
    """Or those that are held out would be trained on."""
    source = _translations(dataclasses.replace(TEXT, vocab=60000), seed=0)
    sentences = [line[:line.index(END)] for line in source.load(np.arange(4000))["source"].tolist()]
    runs = [tuple(line[begin:begin + 6]) for line in sentences for begin in range(len(line) - 5)]
    assert len(set(runs)) > 0.99 * len(runs)
    assert source.load(np.array([source.examples - 1]))["target"].any()


def test_without_a_home_folder_a_vocabulary_is_learned_and_not_kept(parallel, cache_dir, monkeypatch):
    def unknown(*_, **__):
        raise RuntimeError("could not determine the home directory for '~/.cache'")
    monkeypatch.setattr(platformdirs, "user_cache_path", unknown)
    assert open_data(parallel, TRANSFORMER, TEXT, 4, 0).vocabulary.get_vocab_size() > RESERVED + 256
    assert not any(cache_dir.rglob("vocabularies"))
