"""How commands end: one line and a code, whatever becomes of their output."""

import errno
import io
import os
import signal
import subprocess
import sys

import pytest

from pase_mtf.errors import FormatError, InfeasibleError, MismatchError, OutOfMemoryError, UsageError
from pase_mtf.exit_codes import HelpRequested, Output, exit_code_of
from pase_mtf.interrupts import Interrupts


@pytest.mark.parametrize(("error", "code"), [
    (UsageError("x"), 2), (FormatError("x"), 2), (InfeasibleError("x"), 3), (OutOfMemoryError("x"), 4),
    (MismatchError("x"), 5), (MemoryError(), 4), (KeyboardInterrupt(), 130),
    (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/some/file"), 2),
])
def test_one_line_and_a_code(error, code, capsys):
    def run():
        raise error
    assert exit_code_of(run, smaller="take less") == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1


def test_what_no_user_causes_is_shown_in_full():
    def run():
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        exit_code_of(run, smaller="take less")


@pytest.mark.parametrize(("number", "code", "line"), [
    (errno.EPIPE, 141, ""), (errno.ENOSPC, 2, "error: disk full (while writing); free space or choose another place\n"),
    (errno.EIO, 2, "error: what it prints cannot be written (Input/output error); see to where its output goes\n")])
def test_an_output_that_goes_away_is_told_once_the_command_has_ended(tmp_path, capsys, number, code, line):
    class Gone(io.TextIOWrapper):
        def write(self, text):
            raise OSError(number, os.strerror(number))

    def run():
        for _ in range(2):
            assert output.write("text") == 4
            output.flush()
        raise output.lost
    with open(tmp_path / "log", "wb") as file:
        output = Output(Gone(file))
        assert exit_code_of(run, smaller="take less") == code
    assert capsys.readouterr() == ("", line)


def test_passes_the_code_on():
    assert exit_code_of(lambda: 6, smaller="take less") == 6


def test_what_to_do_is_in_the_words_of_the_command(capsys):
    for error, line in ((MemoryError(), "error: out of memory; take less"), (KeyboardInterrupt(), "stopped early")):
        def run(error=error):
            raise error
        exit_code_of(run, smaller="take less", interrupted="stopped early")
        assert capsys.readouterr().err == line + "\n"


def test_help_is_no_error(capsys):
    def run():
        raise HelpRequested("the flags")
    assert exit_code_of(run, smaller="take less") == 0
    assert capsys.readouterr() == ("the flags\n", "")


def test_an_interruption_that_a_library_takes_for_its_own_failure(capsys):
    """As one written in C does, whose import is interrupted."""
    def run():
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            raise ImportError("initialization failed") from None
    with Interrupts() as interrupts:
        assert exit_code_of(run, interrupts, smaller="take less", interrupted="stopped") == 143
    assert capsys.readouterr().err == "stopped\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_before_the_command_begins_is_answered_like_one_within(number, code, capsys):
    with Interrupts(at_once=False) as interrupts:
        signal.raise_signal(number)
        assert exit_code_of(lambda: 0, interrupts, smaller="take less", interrupted="stopped") == code
    assert capsys.readouterr().err == "stopped\n"


def test_a_signal_once_the_command_has_ended_changes_nothing(capsys):
    with Interrupts(at_once=False) as interrupts:
        assert exit_code_of(lambda: print("done") or 5, interrupts, smaller="take less") == 5
        signal.raise_signal(signal.SIGTERM)
    assert capsys.readouterr() == ("done\n", "")


def test_an_error_after_a_signal_that_is_only_remembered_is_told(capsys):
    def run():
        interrupts.hold()
        signal.raise_signal(signal.SIGTERM)
        raise UsageError("x")
    with Interrupts() as interrupts:
        assert exit_code_of(run, interrupts, smaller="take less", interrupted="stopped") == 2
    assert capsys.readouterr().err == "error: x\n"


def test_an_interruption_within_code_made_at_run_time(tmp_path):
    """`python -m` takes a KeyboardInterrupt that left an `exec` (numba's, say) for one that nobody caught, and ends by
    SIGINT in place of the exit code."""
    (tmp_path / "made.py").write_text(
        "import sys\nfrom pase_mtf.exit_codes import exit_code_of\n"
        "sys.exit(exit_code_of(lambda: exec('raise KeyboardInterrupt'), smaller='', interrupted='stopped'))")
    ended = subprocess.run([sys.executable, "-m", "made"], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "stopped\n")


# What a command prints comes to the pipe or file at once, or late: when Python ends, with a traceback of its own.
_PRINTS = {
    "at its end": "sys.exit(exit_code_of(lambda: print('x') or 0, smaller=''))",
    "as its help": "def run(): raise HelpRequested('x')\nsys.exit(exit_code_of(run, smaller=''))",
    "as argparse's help": ("import argparse\n"
                           "sys.exit(exit_code_of(lambda: argparse.ArgumentParser().parse_args(['-h']), smaller=''))"),
    "before an error": "def run(): print('x'); raise PaseError('y')\nsys.exit(exit_code_of(run, smaller=''))",
}


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("printed", _PRINTS)
def test_output_that_nobody_takes(printed, unbuffered):
    script = ("import sys\nfrom pase_mtf.errors import PaseError\n"
              f"from pase_mtf.exit_codes import HelpRequested, exit_code_of\n{_PRINTS[printed]}")

    def run(output):
        ended = subprocess.run([sys.executable, "-c", script], stdout=output, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "PYTHONUNBUFFERED": unbuffered}, check=False)
        return ended.returncode, ended.stderr
    full, gone = (2, "error: disk full (while writing); free space or choose another place\n"), (141, "")
    if printed == "before an error" and not unbuffered:
        full = gone = (2, "error: y\n")
    if printed == "as argparse's help" and unbuffered:
        pytest.skip("argparse itself drops what it cannot write, of late")
    with open("/dev/full", "w") as output:
        assert run(output) == full
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as output:
        assert run(output) == gone


@pytest.mark.parametrize(("run", "code"), [("raise PaseError('y')", 2), ("raise KeyboardInterrupt", 130),
                                           ("print('x', file=sys.stderr, flush=True); return 7", 7)])
def test_an_error_that_nobody_reads(run, code):
    """As where the reader of `2>&1 | tee log` is gone: the exit code is what it would have been."""
    script = ("import sys\nfrom pase_mtf.errors import PaseError\nfrom pase_mtf.exit_codes import exit_code_of\n"
              f"def run(): {run}\nsys.exit(exit_code_of(run, smaller=''))")
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as gone:
        assert subprocess.run([sys.executable, "-c", script], stdout=gone, stderr=gone, check=False).returncode == code


@pytest.mark.parametrize("closed", [(1,), (2,), (1, 2)])
def test_a_command_without_a_standard_stream(closed):
    """As with `2>&-`: progress bars and errors go nowhere, above all not to the standard output."""
    script = ("import sys\nfrom tqdm import tqdm\nfrom pase_mtf.errors import PaseError\n"
              "from pase_mtf.exit_codes import exit_code_of\n"
              "def run():\n    with tqdm(total=1, leave=False, file=sys.stderr) as bar: bar.update()\n"
              "    tqdm.write('x', file=sys.stdout)\n    sys.stdout.flush()\n    raise PaseError('y')\n"
              "sys.exit(exit_code_of(run, smaller=''))")

    def close():
        for descriptor in closed:
            os.close(descriptor)
    ended = subprocess.run([sys.executable, "-c", script], check=False, preexec_fn=close, capture_output=True,
                           text=True)
    assert (ended.returncode, ended.stdout) == (2, "" if 1 in closed else "x\n")
    assert ended.stderr.endswith("" if 2 in closed else "error: y\n")
    assert (ended.stderr == "") == (2 in closed)


def test_a_path_that_is_no_text_is_printed():
    script = ("import sys\nfrom pase_mtf.errors import PaseError\nfrom pase_mtf.exit_codes import exit_code_of\n"
              "def run():\n    print('m\\udcfcller.csv')\n    raise PaseError('m\\udcfcller.csv')\n"
              "sys.exit(exit_code_of(run, smaller=''))")
    ended = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True,
                           env={**os.environ, "PYTHONIOENCODING": "utf-8"})
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "m\\udcfcller.csv\n", "error: m\\udcfcller.csv\n")
