"""CONTRIBUTING.md is followed word for word: its worked examples are carried out in a copy of the repository."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow,
              pytest.mark.skipif("TEST_SRCDIR" in os.environ, reason="Bazel lays out only the files a target names")]

_FOLDERS = ("pase_mtf", "models", "launch", "configs", "tests", "tools", "examples", "docs")
_FENCED = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _sections(page: str) -> dict[str, list[tuple[str, str, str]]]:
    """Worked example -> its blocks in order: (language, file name or "", text)."""
    _, _, examples = page.partition("\n## Worked examples\n")
    parts = re.split(r"^### (.+)$", examples, flags=re.MULTILINE)
    return {title: _FENCED.findall(text) for title, text in zip(parts[1::2], parts[2::2], strict=True)}


_PAGE = pathlib.Path(__file__).absolute().parents[1] / "CONTRIBUTING.md"
_SECTIONS = _sections(_PAGE.read_text(encoding="utf-8")) if _PAGE.exists() else {}


@pytest.fixture(scope="module")
def clone(repository, tmp_path_factory):
    """A copy of the repository whose folders have the names that setup.py gives them, compiled code included."""
    root = tmp_path_factory.mktemp("contributing") / "repository"
    for folder in _FOLDERS:
        shutil.copytree(repository / folder, root / folder)
    for file in ("pyproject.toml", "ruff.toml"):
        shutil.copy(repository / file, root)
    for folder in ("models", "launch", "configs"):
        (root / "pase_mtf" / folder).symlink_to(root / folder, target_is_directory=True)
    return root


def _apply(change: str, path: pathlib.Path) -> None:
    """Applies a diff without line numbers: its context and what it removes stand in the file exactly once."""
    lines = change.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] in " -")
    after = "".join(line[1:] for line in lines if line[0] in " +")
    text = path.read_text(encoding="utf-8")
    assert text.count(before) == 1, f"{path.name} does not hold, once:\n{before}"
    path.write_text(text.replace(before, after), encoding="utf-8")


def test_there_are_four_examples():
    assert list(_SECTIONS) == ["A new model", "A new search method", "An operation of your own", "A new machine"]


@pytest.mark.parametrize("title", _SECTIONS)
def test_example_works_as_written(title, clone):
    blocks = _SECTIONS[title]
    commands = {"PYTHONPATH": str(clone),
                "PATH": f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for language, name, text in blocks:
        if language == "sh":
            _run(["bash", "-euo", "pipefail", "-c", text], cwd=clone, env={**os.environ, **commands})
        elif language == "diff":
            _apply(text, clone / name)
        else:
            assert not (clone / name).exists(), f"{name} is there already"
            (clone / name).write_text(text, encoding="utf-8")
    assert "sh" in {language for language, _, _ in blocks}
    if written := {name for _, name, _ in blocks if name.endswith(".py")}:
        _run([sys.executable, "-m", "ruff", "check", *written], cwd=clone)
    if not any("tests/test_architecture.py" in text for _, _, text in blocks):
        _run([sys.executable, "-m", "pytest", "-n0", "tests/test_architecture.py"], cwd=clone,
             env={**os.environ, **commands})


def _run(command, **options):
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{command[-1]}\n{done.stdout}\n{done.stderr}"
