"""When a run writes a checkpoint, and what is said where it does not."""

import itertools
import math

import pytest

from pase_mtf.errors import DataError, UsageError
from pase_mtf.launch.checkpoints import keeping
from pase_mtf.launch.checkpoints.keeping import Keeper
from pase_mtf.launch.training import History, Record


class _Arm:
    """Counts as the arm that is kept; the loss of its next step is that of the batch."""

    name = "search"

    def loss(self, batch):
        return batch

    def save(self, prefix):
        return None


class _Data:
    """Batches that say what the next loss is, by the step."""

    def __init__(self, losses):
        self._losses = losses

    def batches(self, step):
        if self._losses is None:
            raise DataError("no such file")
        return itertools.islice(self._losses, step, None)


@pytest.fixture
def written(monkeypatch):
    """The steps of the checkpoints that were written."""
    steps = []
    monkeypatch.setattr(keeping, "save_checkpoint", lambda folder, save, *, step, **_: steps.append(step))
    return steps


def _keeper(losses, **more):
    return Keeper("checkpoint", _Arm(), _Data(losses), "abc", microbatches=1, recompute=(), **more)


def _watched(keeper, losses):
    for step, loss in enumerate(losses):
        keeper.watch(Record("search", step, loss, 0.1, True))


@pytest.mark.parametrize(("losses", "diverged"), [
    ([1.0, 1.0, 1.0, math.nan], 3), ([1.0, 1.0, 1.0, math.inf], 3),  # the update of the last step has driven it away
    ([1.0, 1.0, math.nan, math.nan], 2)])  # ended in the middle of a turn
def test_a_run_without_a_last_checkpoint_as_it_diverges_says_so(written, losses, diverged):
    keeper, history = _keeper(losses), History(0, {})
    _watched(keeper, losses[:3])
    keeper.finish(history)
    assert (written, history.diverged, history.unwritten) == ([], diverged, None)


def test_a_last_checkpoint_that_is_written_is_no_word(written, capsys):
    for losses in ([1.0] * 4, None):  # None: the next loss cannot be told
        keeper, history = _keeper(losses), History(0, {})
        _watched(keeper, [1.0] * 3)
        keeper.finish(history)
        assert (written.pop(), history.diverged, history.unwritten) == (3, None, None)
    assert capsys.readouterr() == ("", "")


def test_one_that_is_due_after_the_first_step_follows_after_the_next(written):
    keeper = _keeper([1.0] * 9, first_step=3, every=4)
    for step in range(3, 7):
        keeper.watch(Record("search", step, 1.0, 0.1, True))
    assert written == [5]


def test_one_that_cannot_be_written_is_told(monkeypatch, capsys):
    def full(*_, **__):
        raise UsageError("disk full")
    monkeypatch.setattr(keeping, "save_checkpoint", full)
    keeper, history = _keeper([1.0] * 4, every=2), History(0, {})
    _watched(keeper, [1.0] * 3)
    keeper.finish(history)
    assert (str(history.unwritten), history.diverged) == ("disk full", None)
    assert capsys.readouterr().err == "warning: no checkpoint at step 2: disk full\n"


def test_one_on_the_way_that_is_left_out_is_a_line(written, capsys):
    losses = [1.0, 1.0, math.nan, 1.0, 1.0]
    _watched(_keeper(losses, every=2), [*losses[:2], 1.0, 1.0])
    assert written == [4]
    assert capsys.readouterr().err == "warning: no checkpoint at step 2: the loss of search is not finite there\n"


def test_what_was_not_compared_with_the_run_before_is_not_kept(written):
    """As it may be that of other data, after which the right ones would be refused."""
    keeper = _keeper([1.0] * 9, first_step=5)
    keeper.watch(Record("search", 5, 1.0, 0.1, True))
    keeper.finish(History(5, {}))
    assert written == []
    keeper.finish(History(5, {}, compared=True))
    assert written == [6]


def test_the_first_step_is_not_kept_before_it_was_compared(written):
    _watched(_keeper([1.0] * 9, every=1), [1.0] * 3)
    assert written == [2, 3]


def test_the_first_step_of_a_run_that_was_interrupted_in_it_is_not_kept(written):
    keeper = _keeper([1.0] * 9)
    _watched(keeper, [1.0])
    keeper.finish(History(0, {}))
    assert written == []


def test_without_a_number_of_steps_one_follows_every_five_minutes(written):
    now = [0.0]
    keeper = _keeper([1.0] * 9, clock=lambda: now[0])
    for step, seconds in enumerate((10.0, 280.0, 10.0, 200.0, 100.0, 10.0)):
        now[0] += seconds
        keeper.watch(Record("search", step, 1.0, seconds, True))
    assert written == [3, 5]


def test_data_that_cannot_be_read_after_the_last_step_cost_no_checkpoint(written):
    """Of a run over processes neither: none of the others was told of the batch yet."""
    keeper, history = _keeper(None), History(0, {})
    _watched(keeper, [1.0] * 3)
    keeper.finish(history)
    assert (written, history.diverged, history.unwritten) == ([3], None, None)
