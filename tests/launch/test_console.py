import errno
import os

import pytest

from pase_mtf.errors import FormatError, InfeasibleError, MismatchError, OutOfMemoryError, UsageError
from pase_mtf.launch.console import exit_code_of, summarize_error


@pytest.mark.parametrize(("error", "code"), [
    (UsageError("x"), 2), (FormatError("x"), 2), (InfeasibleError("x"), 3), (OutOfMemoryError("x"), 4),
    (MismatchError("x"), 5), (MemoryError(), 4), (KeyboardInterrupt(), 130),
    (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/some/file"), 2),
])
def test_one_line_and_a_code(error, code, capsys):
    def run():
        raise error
    assert exit_code_of(run) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1


def test_what_no_user_causes_is_shown_in_full():
    def run():
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        exit_code_of(run)


def test_passes_the_code_on():
    assert exit_code_of(lambda: 6) == 6


@pytest.mark.parametrize(("text", "line"), [
    ("Graph execution error:\n\nDetected at node save\n/run/model.data; No space left on device\nmore",
     "/run/model.data; No space left on device"),
    ("Graph execution error:\n\nplain", "plain"),
    ("one line", "one line"),
    ("Graph execution error:", "Graph execution error:"),
    ("", "ValueError"),
])
def test_finds_the_informative_line(text, line):
    assert summarize_error(ValueError(text)) == line


def test_a_summary_is_short():
    assert len(summarize_error(ValueError("x" * 1000))) == 160
