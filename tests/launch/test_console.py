"""The line of an error that says most."""

import pytest

from pase_mtf.launch.console import summarize_error


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
