"""Functions of other modules that are replaced for one thread."""

import threading
import types

import pytest

from pase_mtf.replaced import replaced


def _holder():
    return types.SimpleNamespace(tell=lambda: "as it is")


def _saying(text):
    return lambda original: lambda: f"{text}, {original()}"


def test_blocks_nest_and_the_function_is_put_back():
    holder = _holder()
    before = holder.tell
    with replaced(holder, "tell", _saying("one")):
        with replaced(holder, "tell", _saying("two")):
            assert holder.tell() == "two, one, as it is"
            with replaced(holder, "tell", None), replaced(holder, "tell", None):
                assert holder.tell() == "as it is"
                with replaced(holder, "tell", _saying("three")):
                    assert holder.tell() == "three, as it is"
            assert holder.tell() == "two, one, as it is"
        with pytest.raises(KeyError), replaced(holder, "tell", _saying("two")):
            raise KeyError
        assert holder.tell() == "one, as it is"
    assert holder.tell is before


def test_threads_leave_in_any_order():
    holder = _holder()
    before, said, steps = holder.tell, {}, [threading.Event() for _ in range(4)]

    def work(name, enters, entered, leaves, left):
        enters.wait(60)
        with replaced(holder, "tell", _saying(name)):
            entered.set()
            leaves.wait(60)
            said[name] = holder.tell()
        said[f"{name} after"] = holder.tell()
        left.set()

    # The first enters first and leaves first: each would put back what the other one has there.
    first, second, left, end = steps
    started = threading.Event()
    started.set()
    threads = [threading.Thread(target=work, args=("first", started, first, second, left)),
               threading.Thread(target=work, args=("second", first, second, left, end))]
    for thread in threads:
        thread.start()
    assert first.wait(60)
    assert holder.tell() == "as it is"
    for thread in threads:
        thread.join(60)
    assert said == {"first": "first, as it is", "second": "second, as it is", "first after": "as it is",
                    "second after": "as it is"}
    assert holder.tell is before


def test_what_others_replace_meanwhile_stays():
    holder = _holder()
    with replaced(holder, "tell", _saying("one")):
        ours = holder.tell
        holder.tell = lambda: f"theirs, {ours()}"
        assert holder.tell() == "theirs, one, as it is"
        theirs = holder.tell
        with replaced(holder, "tell", _saying("two")):
            assert holder.tell() == "two, theirs, one, as it is"
        assert holder.tell is theirs
    assert holder.tell is theirs
    assert holder.tell() == "theirs, as it is"


def test_blocks_that_are_left_open_end_with_whoever_holds_them():
    holder = _holder()
    before, block = holder.tell, replaced(holder, "tell", _saying("one"))
    block.__enter__()
    other = replaced(holder, "tell", _saying("two"))
    other.__enter__()
    del block
    assert holder.tell().startswith("two")
    del other
    assert holder.tell is before
