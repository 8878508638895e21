"""What ranks tell each other, in pieces; and which batches are kept for what they are told."""

import dataclasses
import itertools
import json
import struct
from types import SimpleNamespace

import numpy as np
import pytest

from pase_mtf import models
from pase_mtf.compat import tf
from pase_mtf.errors import DataError, FormatError, MismatchError, OutOfMemoryError, UsageError
from pase_mtf.launch.arms.arm import Arm
from pase_mtf.launch.checkpoints.checkpoint import CheckpointInfo
from pase_mtf.launch.cluster import follower
from pase_mtf.launch.cluster.board import Board, _more, _pieces, _text
from pase_mtf.launch.cluster.follower import _Feed, _run, _told
from pase_mtf.launch.command_line import parse_command_line
from pase_mtf.launch.data import open_data
from pase_mtf.launch.plan import resolve
from pase_mtf.runtime import Devices


@pytest.mark.parametrize("length", [0, 3, 503, 504, 505, 100_000, 2_500_001])
def test_a_message_in_pieces(length):
    text = ("äbcdefg" * (1 + length // 7))[:length]
    (_, first), *others = _pieces(text, 3)
    assert first[1] == 3
    assert _more(first) == len(others)
    assert _text([first, *(words for _, words in others)]) == text


def test_a_single_process_talks_to_nobody():
    board = Board(Devices.over_tasks(2, "cpu", ("127.0.0.1:1",), rank=0))
    assert board.leads
    board.tell(do="step")
    assert board.gather([1, "x"]) == [[1, "x"]]
    board.close()


def test_batches_by_their_steps(monkeypatch):
    """Arms take turns on a few; float64 looks at the first ones again."""
    config = models.load_config("alexnet", "tiny", batch=2)
    data = open_data(None, models.get("alexnet"), config, 2, 0)
    opened = []

    class Counted(type(data)):
        def batches(self, start_step=0, ahead=2):
            opened.append((start_step, self.rows))
            return super().batches(start_step, ahead)

    feed = _Feed(Counted(**{field.name: getattr(data, field.name) for field in dataclasses.fields(data)}), 3)
    expected = list(itertools.islice(data.batches(), 8))
    for step in (0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 5, 4):
        assert (feed.batch(step)["images"] == expected[step]["images"]).all()
    assert opened == [(0, None)]
    feed.read((1,))
    for step in (6, 7, 0, 1):
        assert (feed.batch(step)["images"][1] == expected[step]["images"][1]).all()
        assert not feed.batch(step)["images"][0].any()
    assert opened == [(0, None), (6, (1,)), (0, (1,))]


def test_what_a_rank_refuses(tmp_path):
    """It has the plan of rank 0, to the last number; but the files of its own host."""
    plan = resolve(parse_command_line(["--model=alexnet", "--mesh=2", "--devices=cpu", "--machine=h100", "--batch=4",
                                       "--seed=3", f"--output_dir={tmp_path / 'run'}"]))
    data = open_data(None, models.get("alexnet"), plan.config, 4, 3)
    devices = Devices.over_tasks(2, "cpu", ("127.0.0.1:1", "127.0.0.1:2"), rank=1)
    told = json.loads(json.dumps(_told(plan, data)))
    mine, feed = _run(told, devices)
    assert mine == dataclasses.replace(plan, devices=devices, machine=None, asked=None)
    assert (feed.batch(2)["images"] == next(data.batches(2))["images"]).all()
    with pytest.raises(MismatchError, match=r"rank 1 finds .synthetic.*; give every host the same files"):
        _run({**told, "data": "pictures of something else"}, devices)
    gone = CheckpointInfo(str(tmp_path / "gone"), 5, "0" * 8)
    with pytest.raises(FormatError, match="gone: is not there for rank 1"):
        _run(_told(dataclasses.replace(plan, checkpoint=gone), data), devices)


def test_a_rank_with_other_examples_is_refused(tmp_path):
    """As many, as large, under the same name: what is told of them in words is the same."""
    folder = tmp_path / "images"
    folder.mkdir()

    def write(values):
        pixels = np.asarray(values, np.uint8).reshape(-1, 1, 1) * np.ones((1, 28, 28), np.uint8)
        for name, held in (("train-images-idx3-ubyte", pixels), ("train-labels-idx1-ubyte", np.zeros(8, np.uint8))):
            header = struct.pack(f">BBBB{held.ndim}I", 0, 0, 8, held.ndim, *held.shape)
            (folder / name).write_bytes(header + held.tobytes())
    write(range(8))
    plan = resolve(parse_command_line(["--model=alexnet", "--mesh=2", "--devices=cpu", "--machine=h100", "--batch=4",
                                       f"--data={folder}", f"--output_dir={tmp_path / 'run'}"]))
    data = open_data(str(folder), models.get("alexnet"), plan.config, 4, 0)
    devices = Devices.over_tasks(2, "cpu", ("127.0.0.1:1", "127.0.0.1:2"), rank=1)
    told = json.loads(json.dumps(_told(plan, data)))
    _run(told, devices)
    for others in ([9] * 8, range(7, -1, -1)):  # the second: the same in another order
        write(others)
        with pytest.raises(MismatchError, match="rank 1 finds other examples there than rank 0"):
            _run(told, devices)


def test_what_only_a_closed_arm_has_read_is_read_no_more(monkeypatch):
    made = [SimpleNamespace(rows=frozenset(rows), close=lambda: None) for rows in ((0, 1), (0,), (2,))]
    reads, build = [], {"do": "build", "recipe": None}
    monkeypatch.setattr(follower, "_run", lambda told, devices: (None, SimpleNamespace(read=reads.append)))
    monkeypatch.setattr("pase_mtf.launch.arms.arm.build_arm", lambda *_: made.pop(0))
    monkeypatch.setattr("pase_mtf.launch.arms.recipe.Recipe.of_json", lambda found: found)
    told = [{"do": "run"}, build, build, {"do": "close", "arm": 0}, build, {"do": "close", "arm": 2}, {"do": "end"}]
    follower.follow(SimpleNamespace(hear=lambda: told.pop(0)), None)
    assert reads == [(0, 1), (0, 1), (0,), (0, 2), (0,)]


def test_an_arm_is_closed_when_all_have_heard_but_after_an_error():
    """Others may still fill their variables, and one that hears it later than the rest would hear nothing any more."""
    told, arm = [], Arm.__new__(Arm)
    arm._number, arm._session = 3, SimpleNamespace(close=lambda: None)
    arm._board = SimpleNamespace(tell=lambda *, within=None, **message: told.append((within, message)))
    arm.close()
    try:
        raise OutOfMemoryError("a step does not fit")
    except OutOfMemoryError:
        arm.close()
    assert told == [(None, {"do": "close", "arm": 3}), (5.0, {"do": "close", "arm": 3})]


def test_after_a_message_that_not_all_have_heard_nothing_is_told():
    runs = []

    def run(*_, **__):
        runs.append(None)
        raise tf.errors.DeadlineExceededError(None, None, "too late")
    board = Board(Devices.over_tasks(2, "cpu", ("127.0.0.1:1",), rank=0))
    board._session = SimpleNamespace(run=run, close=lambda: None)
    board._channels = {1 << 7: ("piece", "cast", None)}
    board.tell(within=0.1, do="close")
    board.tell(do="step")
    board.close()
    assert len(runs) == 1


def test_a_batch_that_only_another_rank_cannot_read_costs_its_loss_alone(monkeypatch):
    """Rank 0 reads its own rows; what another cannot read after the last step must not end a run that is done."""
    heard = []

    def unreadable(step, ahead):
        raise DataError("picture 3 is damaged")
        yield

    def loss(batch):
        heard.append(batch)
        raise DataError("a rank cannot read it")
    feed = _Feed(SimpleNamespace(rows=(0,), batches=unreadable), 3)
    for _ in range(2):
        with pytest.raises(DataError, match="picture 3"):
            feed.batch(5)
    made = SimpleNamespace(rows=frozenset((0,)), loss=loss)
    monkeypatch.setattr(follower, "_run", lambda told, devices: (None, feed))
    monkeypatch.setattr("pase_mtf.launch.arms.arm.build_arm", lambda *_: made)
    monkeypatch.setattr("pase_mtf.launch.arms.recipe.Recipe.of_json", lambda found: found)
    told = [{"do": "run"}, {"do": "build", "recipe": None}, {"do": "loss", "arm": 0, "batch": 5}, {"do": "end"}]
    follower.follow(SimpleNamespace(hear=lambda: told.pop(0)), None)
    assert heard == [None]
    arm = Arm.__new__(Arm)
    arm.name, arm._number, arm._placeholders = "search", 0, {}
    arm._board = SimpleNamespace(tell=lambda **_: None, gather=lambda mine: [mine, False])
    with pytest.raises(DataError, match="a rank cannot read"):
        arm.loss({})


def test_a_rank_that_does_not_see_where_checkpoints_go(tmp_path):
    """Else a run would learn at its first checkpoint that it keeps none."""
    folder = tmp_path / "run"
    plan = resolve(parse_command_line(["--model=alexnet", "--mesh=2", "--devices=cpu", "--machine=h100", "--batch=4",
                                       f"--output_dir={folder}"]))
    data = open_data(None, models.get("alexnet"), plan.config, 4, 0)
    devices = Devices.over_tasks(2, "cpu", ("127.0.0.1:1", "127.0.0.1:2"), rank=1)
    folder.mkdir()
    told = json.loads(json.dumps(_told(plan, data)))
    _run(told, devices)
    folder.rmdir()
    with pytest.raises(UsageError, match=r"run: is not there for rank 1; .* that all hosts share"):
        _run(told, devices)
