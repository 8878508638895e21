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


def _ended_after(asked_after, seconds=0.001, insisted_after=1000, warmup=1, block=5):
    """The steps of three arms where the training is asked to end in the midst of one of all that they do."""
    diary, seen = [], []
    arms = [_Arm(name, diary) for name in "abc"]
    for arm in arms:
        arm.step = lambda batch, trace=False, step=arm.step: (step(batch, trace)[0], seconds)
    history = train(arms, itertools.count(), warmup=warmup, steps=100, block=block, watchers=[seen.append],
                    asked=lambda: len(diary) >= asked_after, insisted=lambda: len(diary) >= insisted_after)
    assert history.interrupted
    assert history.disagreement is None
    # A step that was done is recorded and told to the watchers, whenever the wish came.
    assert [(record.arm, record.step) for record in seen] == [(name, batch) for name, batch, _ in diary]
    return {name: len(records) for name, records in history.records.items()}


@pytest.mark.parametrize(("warmup", "block"), [(1, 5), (4, 2)])
def test_ends_between_two_steps_where_that_is_asked_for(warmup, block):
    """And after the same step of all arms, with none that no arm had begun by then."""
    for asked_after in range(1, 60):
        done = _ended_after(asked_after, warmup=warmup, block=block)
        assert len(set(done.values())) == 1, (asked_after, done)
        assert asked_after <= sum(done.values()) <= asked_after + 2 * max(block, warmup - 1)
    assert _ended_after(27) == dict.fromkeys("abc", 11)
    assert _ended_after(43) == dict.fromkeys("abc", 16)


def test_ends_at_once_where_others_would_take_long_or_that_is_insisted_on():
    """Up to five seconds are not long."""
    assert _ended_after(5, seconds=1.2) == dict.fromkeys("abc", 3)
    assert _ended_after(5, seconds=1.3) == {"a": 1, "b": 3, "c": 1}
    assert _ended_after(1, seconds=2.6) == {"a": 1, "b": 0, "c": 0}
    assert _ended_after(6, insisted_after=8) == {"a": 1, "b": 4, "c": 3}


@pytest.mark.parametrize(("before", "catching_up", "over"), [
    (0.4, 8.0, 8.0),  # no other step is begun
    (0.4, 2.0, 4.0),  # after two of them the other five would take too long even by the median
    (0.1, 0.3, 2.1)])  # all catch up
def test_catching_up_that_takes_longer_than_before_is_given_up(before, catching_up, over):
    """No step is begun after five seconds, nor one after which the others would need more than are left."""
    now, diary = [0.0], []
    arms = [_Arm(name, diary) for name in "abc"]

    def step(arm, batch):
        diary.append(arm.name)
        took = before if len(diary) <= 41 else catching_up
        now[0] += took
        return 1.0, took
    for arm in arms:
        arm.step = lambda batch, trace=False, arm=arm: step(arm, batch)
    history = train(arms, itertools.count(), warmup=1, steps=100, asked=lambda: len(diary) >= 41,
                    clock=lambda: now[0])
    assert history.interrupted
    assert now[0] - 41 * before == pytest.approx(over)
    assert (len({len(records) for records in history.records.values()}) == 1) == (catching_up < 2.0)


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


def test_a_long_warm_up_holds_a_turn_of_batches():
    diary, most, drawn = [], [0], itertools.count(1)

    def batches():
        for batch in itertools.count():
            most[0] = max(most[0], next(drawn) - len(diary))
            yield batch
    history = train([_Arm("a", diary)], batches(), warmup=40, steps=5)
    assert most[0] <= 5
    assert [record.timed for record in history.records["a"]] == [False] * 40 + [True] * 5
    assert [batch for _, batch, trace in diary if trace] == [0, 39]


def test_a_wish_that_comes_with_the_last_step_interrupts_nothing():
    """The other arms do what is left of the turn, and all are compared: a run that has done its steps is done."""
    for asked_after, done in ((3, 2), (4, 3), (5, 3)):
        diary, compared = [], []
        arms = [_Arm(name, diary) for name in "ab"]
        history = train(arms, itertools.count(), warmup=1, steps=2,
                        asked=lambda diary=diary, asked_after=asked_after: len(diary) >= asked_after,
                        check=lambda history, compared=compared: compared.append(len(history.records["a"])))
        assert {name: len(records) for name, records in history.records.items()} == {"a": done, "b": done}
        assert history.interrupted == (done < 3)
        assert compared == ([1, 3] if done == 3 else [1])
