import itertools

import pytest

from pase_mtf.launch.training import Timing, train


class _Arm:
    """Counts as an arm; writes down in which order the arms are stepped."""

    def __init__(self, name, diary, loss=lambda batch: float(batch)):
        self.name, self._diary, self._loss = name, diary, loss

    def step(self, batch, trace=False):
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
    assert turns == ["a", "b", "c", "b", "c", "a", "c", "a", "b", "a", "b", "c", "b", "c", "a"]
    assert [entry for entry in diary if entry[2]] == [(name, batch, True) for batch, names in ((1, "abc"), (2, "bca"))
                                                      for name in names]  # the first step, and the last untimed one


def test_the_machine_is_looked_at_before_every_turn_that_counts():
    diary, told = [], iter((1.5, None, 1.25))
    history = train([_Arm("a", diary)], itertools.count(1), warmup=2, steps=5, block=2,
                    look=lambda: diary.append("look") or next(told))
    assert history.slowness == [1.5, 1.25]
    assert [entry if entry == "look" else entry[1] for entry in diary] == [1, 2, "look", 3, 4, "look", 5, 6, "look", 7]


def test_ends_where_an_arm_is_wrong():
    """Compared after the first step, after the warm-up, and after every turn."""
    asked = []

    def check(history):
        asked.append(len(history.records["b"]))
        return "b is wrong" if len(history.records["b"]) > 8 else None
    history = train([_Arm("a", []), _Arm("b", [])], itertools.count(10), warmup=3, steps=100, block=5, check=check)
    assert asked == [1, 3, 8, 13]
    assert history.disagreement == "b is wrong"


def test_ends_between_two_steps_where_that_is_asked_for():
    """A step that was done is recorded and told to the watchers, whenever the wish came."""
    diary, seen, asked = [], [], []
    arms = [_Arm("a", diary), _Arm("b", diary, lambda batch: asked.append(batch) or 1.0)]
    arms[0]._loss = lambda batch: 1.0
    history = train(arms, itertools.count(), warmup=1, steps=10, block=5, watchers=[seen.append],
                    asked=lambda: 7 in asked)
    assert history.interrupted
    assert history.disagreement is None
    assert [(record.arm, record.step) for record in seen] == [(name, batch) for name, batch, _ in diary]
    assert [len(records) for records in history.records.values()] == [11, 8]


def test_calls_back_after_every_step():
    seen = []
    train([_Arm("a", [])], itertools.count(), warmup=1, steps=3, first_step=7, watchers=[seen.append])
    assert [(record.arm, record.step, record.timed) for record in seen] == [
        ("a", 7, False), ("a", 8, True), ("a", 9, True), ("a", 10, True)]


def test_timing():
    assert Timing.of([]) is None
    timing = Timing.of([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (timing.median, timing.lower, timing.upper, timing.steps) == (3.0, 2.0, 4.0, 5)
    assert timing.spread == pytest.approx(1.0)
