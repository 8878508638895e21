import contextlib
import itertools
import signal

import pytest

from pase_mtf.launch.training import Timing, train


class _Arm:
    """Counts as an arm; writes down in which order the arms are stepped."""

    def __init__(self, name, diary, loss=lambda batch: float(batch), raises=None):
        self.name, self._diary, self._loss, self._raises = name, diary, loss, raises

    def step(self, batch, trace=False):
        if self._raises and batch >= self._raises[0]:
            raise self._raises[1]
        self._diary.append((self.name, batch, trace))
        return self._loss(batch), 0.001 * (1 + batch)


def test_arms_take_turns_on_the_same_batches():
    diary = []
    arms = [_Arm(name, diary) for name in "abc"]
    history = train(arms, itertools.count(1), warmup=2, steps=5, block=2)
    for name in "abc":
        assert [batch for arm, batch, _ in diary if arm == name] == [1, 2, 3, 4, 5, 6, 7]
        assert history.losses(name) == [1, 2, 3, 4, 5, 6, 7]
        assert [record.timed for record in history.records[name]] == [False] * 2 + [True] * 5
        assert history.timing(name).steps == 5
        assert history.timing(name).median == pytest.approx(0.001 * 6)
    turns = [arm for arm, _ in itertools.groupby(diary, key=lambda entry: entry[0])]
    # Every turn begins with another arm; the last of one turn may begin the next.
    assert turns == ["a", "b", "c", "b", "c", "a", "c", "a", "b", "a", "b", "c"]
    assert [entry for entry in diary if entry[2]] == [("a", 1, True), ("b", 1, True), ("c", 1, True)]


def test_ends_where_losses_disagree():
    diary = []
    arms = [_Arm("a", diary), _Arm("b", diary, lambda batch: batch * (1.5 if batch == 13 else 1.0))]
    history = train(arms, itertools.count(10), warmup=1, steps=100, first_step=10, block=5)
    assert history.disagreement.step == 13
    assert history.disagreement.arm == "b"
    assert len(history.records["a"]) == 6


def test_ctrl_c_keeps_what_was_measured():
    diary = []
    arms = [_Arm("a", diary), _Arm("b", diary, raises=(7, KeyboardInterrupt()))]
    history = train(arms, itertools.count(), warmup=1, steps=10, block=5)
    assert history.interrupted
    assert history.disagreement is None
    assert history.timing("a").steps == 10
    assert history.timing("b").steps == 6


def test_calls_back_after_every_step():
    seen = []
    train([_Arm("a", [])], itertools.count(), warmup=1, steps=3, first_step=7, watchers=[seen.append])
    assert [(record.arm, record.step, record.timed) for record in seen] == [
        ("a", 7, False), ("a", 8, True), ("a", 9, True), ("a", 10, True)]


def test_ctrl_c_that_strikes_where_python_drops_it_ends_the_training_all_the_same():
    class Swallowing:
        name = "swallowing"
        steps = 0

        def step(self, batch, trace=False):
            self.steps += 1
            if self.steps == 3:
                with contextlib.suppress(KeyboardInterrupt):  # as in a destructor
                    signal.raise_signal(signal.SIGINT)
            return 1.0, 0.1

    arm, before = Swallowing(), signal.getsignal(signal.SIGINT)
    history = train([arm], range(100), warmup=1, steps=50)
    assert history.interrupted
    assert arm.steps == 3
    assert signal.getsignal(signal.SIGINT) is before


def test_timing():
    assert Timing.of([]) is None
    timing = Timing.of([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (timing.median, timing.lower, timing.upper, timing.steps) == (3.0, 2.0, 4.0, 5)
    assert timing.spread == pytest.approx(1.0)
