"""Epochs measured: gradients of pieces add up, settings are kept, runs go on where they were."""

import dataclasses
import json
import struct
import threading
import time
import types

import numpy as np
import pytest
from micro_models import SIZES

from pase_mtf import models
from pase_mtf.compat import tf
from pase_mtf.epochs.curve import EpochCurve
from pase_mtf.errors import DataError, FormatError, UsageError
from pase_mtf.launch.data import Source, open_data
from pase_mtf.launch.epochs import measure as measure_module
from pase_mtf.launch.epochs import measure_command
from pase_mtf.launch.epochs.command import main
from pase_mtf.launch.epochs.measure import (
    Measured,
    RunFile,
    Settings,
    _in_pieces,
    _train,
    measure,
    pieces_of,
    split,
)
from pase_mtf.launch.epochs.training import Trainer
from pase_mtf.models.presets import load_config

_SETTINGS = Settings("alexnet", {"optimizer": "sgd", "dropout": 0.0}, "made up", examples=64, held_out=16, target=1.0,
                     rate=0.1, rate_batch=8, rule="sqrt", warmup=0.5, cap=2.0, piece=8)


@pytest.fixture(scope="module")
def preset(tmp_path_factory):
    """A file with sizes of alexnet: one convolution, one narrow layer."""
    path = tmp_path_factory.mktemp("presets") / "micro.json"
    path.write_text(json.dumps({
        "preset": "tiny", "image": 12, "fully_connected": [16], "batch": 8, "learning_rate": 0.05,
        "convolutions": [{"channels": 4, "kernel": 3, "stride": 2, "pool": 2}]}))
    return str(path)


def _measure(preset, path, *flags):
    return main(["measure", "--model=alexnet", f"--preset={preset}", f"--output={path}", "--target=1.8", "--cap=6",
                 "--batches=4,16", "--seeds=0,1", "--examples=256", "--held_out=64", "--piece=8", *flags])


def _cut(batches, piece):
    """The pieces of batches of 16."""
    return ({name: values[start:start + piece] for name, values in batch.items()}
            for batch in batches for start in range(0, 16, piece))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_pieces_train_as_their_batch_does(preset, optimizer):
    config = load_config("alexnet", preset, optimizer=optimizer)
    model = models.get("alexnet")
    whole = open_data(None, model, config, 16, 0)
    batches = whole.batches()
    held = [next(batches)]
    steps = [next(batches) for _ in range(3)]
    losses = {}
    for piece in (16, 4):
        with Trainer(model, config, piece, seed=3) as trainer:
            cut = _cut(steps, piece)
            losses[piece] = [*(trainer.step(cut, 16 // piece, 0.05) for _ in steps), trainer.loss(_cut(held, piece))]
    np.testing.assert_allclose(losses[4], losses[16], rtol=2e-5)
    assert len(set(losses[16])) == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["alexnet", "transformer"])
def test_what_fills_no_piece_is_looked_at_too(preset, tmp_path, name):
    """By its examples, or by its words, of which it has fewer."""
    model, path = models.get(name), tmp_path / "micro.json"
    path.write_text(json.dumps({**SIZES[name], "preset": "tiny"}))
    config = load_config(name, preset if name == "alexnet" else str(path))
    source = open_data(None, model, config, 16, 0).source
    losses = []
    for piece, sizes in ((16, [16]), (8, [8, 8]), (6, [6, 6, 4]), (20, [16])):
        pieces, rest = _in_pieces(dataclasses.replace(source, examples=16), piece)
        shapes = [len(next(iter(part.values()))) for part in [*pieces, *([rest] if rest else [])]]
        assert shapes == sizes
        with Trainer(model, config, piece, seed=3, rest=16 % piece) as trainer:
            losses.append(trainer.loss(pieces, rest))
    np.testing.assert_allclose(losses, losses[0], rtol=2e-5)


def test_batch_normalisation_is_judged_by_the_same_pieces_whatever_the_batch(tmp_path, monkeypatch):
    """An example's loss depends on those that it is normalised with."""
    sizes, seen, loss = tmp_path / "micro.json", [], Trainer.loss
    sizes.write_text(json.dumps({**SIZES["resnet101"], "preset": "tiny"}))

    def looked(self, pieces, rest=None):
        pieces = list(pieces)
        seen.append([len(part["images"]) for part in [*pieces, *([rest] if rest else [])]])
        return loss(self, pieces, rest)
    monkeypatch.setattr(Trainer, "loss", looked)
    assert main(["measure", "--model=resnet101", f"--preset={sizes}", f"--output={tmp_path / 'curve.csv'}",
                 "--target=0.001", "--cap=0.5", "--batches=4,8", "--seeds=0", "--examples=32", "--held_out=12",
                 "--piece=8"]) == 0
    assert seen
    assert all(parts == [8, 4] for parts in seen)  # by batches of 4 these were three pieces of 4


def test_every_batch_is_judged_by_all_held_out_examples(preset, tmp_path, monkeypatch):
    """Whatever pieces it is computed in: of 64, pieces of 6 are 60."""
    seen, loss = set(), Trainer.loss

    def looked(self, pieces, rest=None):
        pieces = list(pieces)
        images = np.concatenate([part["images"] for part in [*pieces, *([rest] if rest else [])]])
        seen.add(images.tobytes())
        return loss(self, pieces, rest)
    monkeypatch.setattr(Trainer, "loss", looked)
    assert _measure(preset, tmp_path / "curve.csv", "--batches=4,12,16", "--seeds=0", "--cap=0.5") == 0
    assert len(seen) == 1


@pytest.mark.parametrize(("batch", "looks"), [(1, 10), (4, 16), (6, 11), (8, 8), (64, 1)])
def test_held_out_examples_are_looked_at_ten_to_twenty_times_an_epoch(batch, looks):
    """Or after every step, where an epoch of 64 has fewer than ten."""
    seen = []
    settings = dataclasses.replace(_SETTINGS, cap=20.0)
    _train(settings, types.SimpleNamespace(step=lambda *_: 2.0), iter(()), batch, 1, lambda: 2.0,
           lambda epochs, loss: seen.append(epochs))
    assert len(seen) / seen[-1] == pytest.approx(looks, abs=0.7)


def test_every_seed_has_initial_values_of_its_own(preset):
    """The spread of a curve is that of its seeds."""
    config, model = load_config("alexnet", preset), models.get("alexnet")
    batch = next(open_data(None, model, config, 16, 0).batches())
    losses = set()
    for seed in (0, 1, 1):
        with Trainer(model, config, 16, seed=seed) as trainer:
            losses.add(trainer.loss([batch]))
    assert len(losses) == 2


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_in_float64(preset, optimizer):
    config, model = load_config("alexnet", preset, dtype="float64", optimizer=optimizer), models.get("alexnet")
    batch = next(open_data(None, model, config, 16, 0).batches())
    with Trainer(model, config, 16, seed=0) as trainer:
        losses = [trainer.step([batch], 1, 0.05 if optimizer == "sgd" else 1e-4) for _ in range(3)]
    assert losses[-1] < losses[0]


def test_pieces_count_by_their_words(tmp_path):
    """The transformer's loss is a mean over words, of which pieces have more or fewer."""
    path = tmp_path / "micro.json"
    path.write_text(json.dumps({**SIZES["transformer"], "preset": "tiny", "learning_rate": 0.1}))
    config, model = load_config("transformer", str(path), optimizer="sgd"), models.get("transformer")
    batches = open_data(None, model, config, 16, 0).batches()
    steps = [{name: values.copy() for name, values in next(batches).items()} for _ in range(3)]
    for batch in steps:
        batch["target"][4:, 2:] = 0  # words that are none: of three pieces of four most
    losses = {}
    for piece in (16, 4):
        with Trainer(model, config, piece, seed=3) as trainer:
            cut = _cut(steps, piece)
            losses[piece] = [*(trainer.step(cut, 16 // piece, 0.1) for _ in steps),
                             trainer.loss(_cut(steps[:1], piece))]
            if piece == 4:
                alone = [trainer.loss([one]) for one in _cut(steps[:1], piece)]
    np.testing.assert_allclose(losses[4], losses[16], rtol=2e-5)
    assert abs(np.mean(alone) / losses[16][-1] - 1) > 1e-3


def test_a_measurement_from_end_to_end(preset, tmp_path, capsys):
    path = tmp_path / "curve.csv"
    assert _measure(preset, path, "--seeds=0") == 0
    curve = EpochCurve.load(path)
    assert curve.batches == (4, 16)
    assert all(run.reached and 0 < run.epochs < 6 for run in curve.runs)
    assert "batch" in capsys.readouterr().out
    first = path.read_text()
    assert _measure(preset, path) == 0  # goes on: what was there stays, to the digit
    assert "2 runs are in" in capsys.readouterr().err
    assert set(first.splitlines()) <= set(path.read_text().splitlines())
    assert len(EpochCurve.load(path).runs) == 4

    steps, plot, answer = tmp_path / "steps.csv", tmp_path / "plot.svg", tmp_path / "answer.json"
    steps.write_text("workers,ways,seconds\n1,1,0.1\n4,1,0.1\n1,2,0.06\n")
    flags = [f"--curve={path}", f"--steps={steps}", "--worker_batch=4", "--devices=1-4", "--ways=1,2",
             f"--plot={plot}", f"--json={answer}"]
    assert main(["project", *flags]) == 0
    assert "data parallelism alone" in capsys.readouterr().out
    assert [point["devices"] for point in json.loads(answer.read_text())["points"]] == [1, 2, 3, 4]
    assert plot.read_text().lstrip().startswith("<?xml")
    assert main(["project", *flags]) == 2
    assert capsys.readouterr().err.count("\n") == 1  # they exist
    drawn = plot.read_bytes()
    assert main(["project", *flags, "--overwrite"]) == 0
    assert plot.read_bytes() == drawn


def test_a_file_in_which_nothing_is_takes_runs(tmp_path):
    """As `mktemp` makes them."""
    path, row = tmp_path / "curve.csv", Measured(8, 0, 1.5, 1, 0.9, 12, 0.1, 3.25)
    path.touch()
    RunFile(str(path), _SETTINGS).add(row)
    assert list(RunFile(str(path), _SETTINGS).rows.values()) == [row]


def test_a_device_is_no_file_of_runs(preset, capsys):
    """One has no end to read to."""
    for path in ("/dev/full", "/dev/null"):
        assert _measure(preset, path) == 2
        assert capsys.readouterr().err == f"error: --output={path} is a device or a pipe; name a file\n"


def test_memory_that_runs_out_is_told_in_the_flags_of_the_command(preset, tmp_path, monkeypatch, capsys):
    def fail(*given, **named):
        raise MemoryError
    monkeypatch.setattr(measure_command, "open_data", fail)
    assert _measure(preset, tmp_path / "curve.csv") == 4
    assert capsys.readouterr().err == (
        "error: out of memory; take a smaller --preset, and for `measure` also a smaller --piece\n")
    with pytest.raises(SystemExit):
        main(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "4 out of memory; 130 (Ctrl-C), 143 (SIGTERM), 129 (SIGHUP) and 141 (nobody reads the output)" in told


def test_other_settings_are_refused(preset, tmp_path, capsys):
    path = tmp_path / "curve.csv"
    assert _measure(preset, path, "--seeds=0", "--batches=16") == 0
    before = path.read_text()
    capsys.readouterr()
    assert _measure(preset, path, "--target=1.7") == 2
    error = capsys.readouterr().err
    assert "its runs have target=1.8, not 1.7" in error
    assert error.count("\n") == 1
    assert path.read_text() == before


def test_a_run_that_does_not_reach_its_target_says_so(preset, tmp_path):
    path = tmp_path / "curve.csv"
    assert _measure(preset, path, "--target=0.0001", "--cap=0.5", "--seeds=0", "--batches=16") == 0
    run, = EpochCurve.load(path).runs
    assert not run.reached
    assert run.epochs == 0.5
    diverged = tmp_path / "diverged.csv"
    assert _measure(preset, diverged, "--learning_rate=1e9", "--warmup=0", "--seeds=0", "--batches=16") == 0
    run, = EpochCurve.load(diverged).runs
    assert not run.reached
    assert run.epochs == 6


def test_interrupted_it_goes_on_where_it_was(preset, tmp_path, monkeypatch, capsys):
    path, steps = tmp_path / "curve.csv", Trainer.step

    def interrupted(self, pieces, count, rate):
        if path.exists():  # a run was added
            raise KeyboardInterrupt
        return steps(self, pieces, count, rate)
    monkeypatch.setattr(Trainer, "step", interrupted)
    assert _measure(preset, path) == 130
    error = capsys.readouterr().err
    assert "interrupted; 1 runs are kept" in error
    monkeypatch.setattr(Trainer, "step", steps)
    kept = path.read_text().splitlines()
    assert _measure(preset, path) == 0
    assert len(kept) == 3
    assert kept == path.read_text().splitlines()[:3]


class _Seen:
    """Takes the place of a Trainer: keeps what it is given; the held-out loss is below any target after 20 steps."""

    runs: list["_Seen"]

    def __init__(self, model, config, piece, seed, *unused, **settings):
        self.of, self.trained, self.rates, self.held = (model, config, piece, seed), [], [], set()
        self.runs.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        pass

    def step(self, pieces, count, rate):
        self.trained += [int(number) for _ in range(count) for number in next(pieces)["number"]]
        self.rates.append(rate)
        return 5.0

    def loss(self, pieces, rest):
        self.held |= {int(number) for piece in [*pieces, *filter(None, [rest])] for number in piece["number"]}
        return 0.5 if len(self.rates) >= 20 else 5.0


def test_what_a_run_trains_on_and_counts(tmp_path, monkeypatch):
    """Batches of 8 end at the cap, of 4 at the target: epochs count what was trained on, which is not held out."""
    monkeypatch.setattr("pase_mtf.launch.epochs.training.Trainer", type("_Own", (_Seen,), {"runs": (runs := [])}))
    settings, config = dataclasses.replace(_SETTINGS, piece=4, held_out=18), object()
    source = Source("numbers", 96, lambda chosen: {"number": chosen}, {"number": (np.dtype(np.int64), ())})
    rows = list(measure(settings, source, config, RunFile(str(tmp_path / "curve.csv"), settings), [4, 8], [0, 7]))
    assert [(row.batch, row.seed, row.reached) for row in rows] == [(4, 0, 1), (8, 0, 0), (4, 7, 1), (8, 7, 0)]
    assert [run.of for run in runs] == [(models.get("alexnet"), config, 4, row.seed) for row in rows]
    for row, run in zip(rows, runs, strict=True):
        assert row.steps == len(run.rates) >= (20 if row.reached else 16)
        assert row.epochs == row.steps * row.batch / 64 == len(run.trained) / 64
        assert run.rates == [settings.rate_of(row.batch, step * row.batch) for step in range(1, row.steps + 1)]
        assert len(set(run.trained[:64])) == 64  # an epoch
        assert len(run.held) == 18
        assert not run.held & set(run.trained)
    first, second, third, fourth = (run.trained[:64] for run in runs)
    assert first == second  # the stream is that of the seed, whatever the batch
    assert third == fourth != first
    assert sorted(third) == sorted(first)


def test_a_rate_is_of_its_optimizer(preset, tmp_path):
    path = tmp_path / "curve.csv"
    assert _measure(preset, path, "--optimizer=adam", "--cap=0.1", "--seeds=0", "--batches=8") == 0
    assert json.loads(path.read_text().splitlines()[0].removeprefix("# "))["rate"] == 0.001


def test_wrong_data_do_not_wait_for_tensorflow(preset, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measure_command.models, "get", lambda name: pytest.fail("TensorFlow was asked for"))
    assert _measure(preset, tmp_path / "curve.csv", f"--data={tmp_path}/none") == 2
    assert "no such file" in capsys.readouterr().err


def test_rates_follow_their_rule():
    assert _SETTINGS.rate_of(32, 10 ** 6) == pytest.approx(0.2)
    assert _SETTINGS.rate_of(32, 16) == pytest.approx(0.1)  # half of the warm-up
    assert dataclasses.replace(_SETTINGS, rule="linear", warmup=0.0).rate_of(32, 1) == pytest.approx(0.4)
    assert dataclasses.replace(_SETTINGS, rule="constant").rate_of(32, 10 ** 6) == pytest.approx(0.1)


@pytest.mark.parametrize(("changes", "message"), [
    ({"rule": "linar"}, "did you mean 'linear'"), ({"target": 0.0}, "target=0.0"), ({"warmup": -1.0}, "warmup"),
    ({"warmup": float("inf")}, "warmup"), ({"sizes": {"optimizer": "adafactor", "dropout": 0.0}, "rate": None}, "sgd"),
    ({"sizes": {"optimizer": "adafactor", "dropout": 0.0}}, "take sgd or adam"),
    ({"sizes": {"optimizer": "sgd", "dropout": 0.1}}, "dropout")])
def test_settings_that_make_no_sense(changes, message):
    with pytest.raises(UsageError, match=message):
        dataclasses.replace(_SETTINGS, **changes).check()


def test_pieces_divide_the_batch():
    assert pieces_of(512, 64) == (64, 8)
    assert pieces_of(48, 32) == (24, 2)
    assert pieces_of(7, 4) == (1, 7)


def test_what_is_held_out_is_not_trained_on():
    config = load_config("alexnet", "tiny")
    source = open_data(None, models.get("alexnet"), config, 1, 0).source
    train, held = split(source, 40, 20)
    images = [set(map(bytes, part.load(np.arange(part.examples))["images"])) for part in (train, held)]
    assert not images[0] & images[1]
    with pytest.raises(DataError, match="ask for fewer"):
        split(source, source.examples, 1)


def test_what_another_process_added_stays(tmp_path):
    path = str(tmp_path / "curve.csv")
    files = [RunFile(path, _SETTINGS) for _ in range(2)]
    for seed, file in enumerate(files):
        file.add(Measured(8, seed, 1.5, 1, 0.9, 12, 0.1, 3.25))
    assert sorted(RunFile(path, _SETTINGS).rows) == [(8, 0), (8, 1)]


def test_runs_of_an_earlier_version_are_read_and_not_added_to(tmp_path):
    """They saw the examples in another order."""
    path, row = tmp_path / "curve.csv", Measured(8, 0, 1.5, 1, 0.9, 12, 0.1, 3.25)
    RunFile(str(path), _SETTINGS).add(row)
    RunFile(str(path), _SETTINGS).check_more()
    old = path.read_text().replace('"version": 2', '"version": 1')
    path.write_text(old)
    file = RunFile(str(path), _SETTINGS)
    assert list(file.rows.values()) == [row]
    for add in (file.check_more, lambda: file.add(dataclasses.replace(row, seed=1))):
        with pytest.raises(UsageError, match="measured its 1 runs, on examples in another order; choose another name"):
            add()
    assert path.read_text() == old
    assert len(EpochCurve.load(path).runs) == 1


@pytest.mark.parametrize("text", ["\n", "batch,epochs\n1,2\n", "# {}\n", '# {"format": "x", "version": 1}\n',
                                  f"# {{}}\nbatch\n{'1' * 200_000}\n", f"# {'[' * 100_000}\n"],
                         ids=["blank", "bare", "{}", "x", "long", "deep"])
def test_what_is_no_file_of_runs_is_left_alone(tmp_path, text):
    path = tmp_path / "curve.csv"
    path.write_text(text)
    with pytest.raises(FormatError, match="choose another name"):
        RunFile(str(path), _SETTINGS)
    assert path.read_text() == text


def test_of_two_that_add_at_once_both_stay(tmp_path, monkeypatch):
    path, write = str(tmp_path / "curve.csv"), measure_module.write_atomically
    monkeypatch.setattr(measure_module, "write_atomically", lambda *given: (time.sleep(0.3), write(*given)))
    threads = [threading.Thread(target=RunFile(path, _SETTINGS).add,
                                args=(Measured(8, seed, 1.5, 1, 0.9, 12, 0.1, 3.25),)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(RunFile(path, _SETTINGS).rows) == [(8, 0), (8, 1)]


@pytest.mark.parametrize(("flag", "says"), [("--rule=cubic", "cubic"), ("--warmup=-1", "warmup=-1.0")])
def test_settings_that_make_no_sense_do_not_wait_for_tensorflow(preset, tmp_path, monkeypatch, capsys, flag, says):
    monkeypatch.setattr(measure_command.models, "get", lambda name: pytest.fail("TensorFlow was asked for"))
    assert _measure(preset, tmp_path / "curve.csv", flag) == 2
    assert says in capsys.readouterr().err


def test_memory_that_tensorflow_finds_missing_is_told_as_such(preset, tmp_path, monkeypatch, capsys):
    """It has an error of its own for that."""
    def fail(*given, **named):
        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor with shape[8,4096]\nmore")
    monkeypatch.setattr(tf.Session, "run", fail)
    assert _measure(preset, tmp_path / "curve.csv") == 4
    assert "error: out of memory; take a smaller --preset" in capsys.readouterr().err


def test_the_size_that_differs_is_named(tmp_path):
    path = str(tmp_path / "curve.csv")
    sizes = {"preset": "a_file_of_a_rather_long_name.json", "units": 128, "vocab": 512, "optimizer": "sgd",
             "dropout": 0.0, "dtype": "float32"}
    before = dataclasses.replace(_SETTINGS, sizes=sizes)
    RunFile(path, before).add(Measured(8, 0, 1.5, 1, 0.9, 12, 0.1, 3.25))
    for name, value, told in (("units", 256, "units=128, not 256"),
                              ("optimizer", "adam", "optimizer='sgd', not 'adam'")):
        with pytest.raises(UsageError, match=f"its runs have {told}; choose another name"):
            RunFile(path, dataclasses.replace(before, sizes={**sizes, name: value}))


def test_other_data_that_are_described_alike_are_refused(preset, tmp_path, capsys):
    path, folder = tmp_path / "curve.csv", tmp_path / "data"
    folder.mkdir()
    (folder / "train-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 0x801, 80) + bytes(80))
    flags = [f"--data={folder}", "--examples=40", "--held_out=16", "--cap=0.1", "--batches=8"]
    for shade, seeds, code in ((0, "0", 0), (200, "0,1", 2)):
        pixels = bytes([shade]) * (80 * 12 * 12)
        (folder / "train-images-idx3-ubyte").write_bytes(struct.pack(">4I", 0x803, 80, 12, 12) + pixels)
        assert _measure(preset, path, *flags, f"--seeds={seeds}") == code
    assert "its runs have contents=" in capsys.readouterr().err
    assert len(EpochCurve.load(path).runs) == 1


def test_data_that_a_decoder_rounds_otherwise_are_the_same(tmp_path):
    path = str(tmp_path / "curve.csv")
    seen = dataclasses.replace(_SETTINGS, contents=[0.5, 3.0])
    RunFile(path, seen).add(Measured(8, 0, 1.5, 1, 0.9, 12, 0.1, 3.25))
    assert RunFile(path, dataclasses.replace(seen, contents=[0.5001, 3.0])).rows
    with pytest.raises(UsageError, match="its runs have contents="):
        RunFile(path, dataclasses.replace(seen, contents=[0.6, 3.0]))
