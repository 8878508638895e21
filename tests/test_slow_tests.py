"""On a machine that is several times as slow as others slow tests are left out once their time is over, and counted."""

import os
import shutil
import subprocess
import sys

import pytest

_TESTS = """
import pytest

@pytest.mark.slow
def test_slow():
    pass

def test_quick():
    pass
"""


@pytest.mark.parametrize(("until", "said", "left_out"), [
    (None, "4 passed", False), ("0", "2 passed, 2 skipped", True), ("1e12", "4 passed", False)])
def test_slow_tests_after_their_time_are_left_out(repository, tmp_path, until, said, left_out):
    shutil.copy(repository / "tests" / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: those that take long\n", encoding="utf-8")
    for name in ("first", "second"):
        (tmp_path / f"test_{name}.py").write_text(_TESTS, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items()
                   if name not in ("PASE_MTF_SLOW_TESTS_UNTIL", "PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS")}
    if until is not None:
        environment["PASE_MTF_SLOW_TESTS_UNTIL"] = until
    done = subprocess.run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-c",
                           str(tmp_path / "pytest.ini"), str(tmp_path)], env=environment, capture_output=True,
                          text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout
    assert said in done.stdout
    assert ("2 slow tests were left out: no time is left" in done.stdout) == left_out
