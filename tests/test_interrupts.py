"""Ctrl-C and SIGTERM, wherever they strike."""

import ctypes
import signal
import subprocess
import sys
import threading
import time

import pytest

from pase_mtf import _early_signals
from pase_mtf.interrupts import Interrupts

# Python drops what is raised in either.
_CALLBACK = ctypes.CFUNCTYPE(None)


def _in_a_callback(number):
    _CALLBACK(lambda: signal.raise_signal(number))()


def _in_a_destructor(number):
    class Dying:
        def __del__(self):
            signal.raise_signal(number)
    Dying()


def _struck(strike, number, *then):
    """Strikes, and does what is interrupted when that is raised again, a hundredth of a second later. All of it within
    pytest.raises: on a busy machine it may come before the next line, where it would end the whole run of pytest."""
    strike(number)
    for one in then:
        one()


@pytest.mark.parametrize("strike", [_in_a_callback, _in_a_destructor])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_one_that_is_dropped_is_raised_again(strike, number, code, capsys):
    hook = sys.unraisablehook
    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt):
            _struck(strike, number, lambda: time.sleep(60))
        assert (interrupts.exit_code, interrupts.wishes) == (code, 1)
        assert capsys.readouterr().err == ""
    assert sys.unraisablehook is hook


def test_again_and_again():
    """Python code that runs within callbacks alone."""
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        _struck(_in_a_callback, signal.SIGINT, _CALLBACK(lambda: time.sleep(0.3)), lambda: time.sleep(60))
    assert interrupts.wishes == 1


def test_one_that_was_dropped_is_remembered_where_only_that_is_wanted():
    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt):
            _struck(_in_a_callback, signal.SIGTERM, interrupts.hold)
        time.sleep(0.3)  # nothing is raised while the first is answered
        assert interrupts.wishes == 1


def test_what_else_python_drops_is_shown_as_before(monkeypatch):
    shown = []
    monkeypatch.setattr(sys, "unraisablehook", shown.append)

    def fail():
        raise ValueError

    with Interrupts():
        _CALLBACK(fail)()
    assert [dropped.exc_type for dropped in shown] == [ValueError]


def test_what_fails_in_consequence_is_not_shown(monkeypatch):
    """Of what is half made when a signal strikes the destructor fails."""
    shown = []
    monkeypatch.setattr(sys, "unraisablehook", shown.append)

    def fail():
        raise AttributeError

    with Interrupts():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        _CALLBACK(fail)()
    assert not shown


def test_elsewhere_than_in_the_main_thread_nothing_is_taken():
    before = [signal.getsignal(signal.SIGINT), sys.unraisablehook]

    def enter():
        with Interrupts():
            found.extend([signal.getsignal(signal.SIGINT), sys.unraisablehook])
    found = []
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == before


@pytest.mark.parametrize("words", [["-m", "pase_mtf.launch"], ["-um", "pase_mtf.launch"], ["-mpase_mtf.launch"],
                                   ["-umpase_mtf.launch"]])
def test_signals_are_taken_while_a_program_is_imported(words):
    code = ("import signal, sys; sys.argv, sys.orig_argv = ['-m'], ['python', *sys.argv[1:]]; "
            f"exec(open({_early_signals.__file__!r}).read()); print(signal.getsignal(signal.SIGTERM))")
    told = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True).stdout
    assert "_end" in told


def test_under_nohup_a_terminal_that_was_closed_on_another_host_ends_a_run(monkeypatch):
    monkeypatch.setattr("pase_mtf.interrupts.SIGNALS", (signal.SIGINT, signal.SIGTERM))
    interrupts = Interrupts()
    interrupts.take(signal.SIGUSR1)
    assert not interrupts.asked
    interrupts.take(signal.SIGHUP)
    assert (interrupts.wishes, interrupts.exit_code) == (1, 143)
