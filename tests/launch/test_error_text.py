import pytest

from pase_mtf.launch.error_text import what_happened


@pytest.mark.parametrize(("text", "line"), [
    ("Graph execution error:\n\nDetected at node save\n/run/model.data; No space left on device\nmore",
     "/run/model.data; No space left on device"),
    ("Graph execution error:\n\nplain", "plain"),
    ("one line", "one line"),
    ("Graph execution error:", "Graph execution error:"),
    ("", "ValueError"),
])
def test_finds_the_telling_line(text, line):
    assert what_happened(ValueError(text)) == line


def test_is_short():
    assert len(what_happened(ValueError("x" * 1000))) == 160
