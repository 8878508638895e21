"""What is installed, and how: the wheel, its dependencies, and the Makefile's answers."""

import ast
import email
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest

_FOLDERS = {"pase_mtf": "pase_mtf", "models": "pase_mtf/models", "launch": "pase_mtf/launch",
            "configs": "pase_mtf/configs"}


@pytest.fixture(scope="module")
def wheel(repository, tmp_path_factory):
    """The wheel, built from a source distribution, which is built from a copy: setuptools leaves files of its own
    beside setup.py."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for folder in _FOLDERS:
        shutil.copytree(repository / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(repository / file, source)
    subprocess.run([sys.executable, "setup.py", "-q", "sdist", "--dist-dir", built], cwd=source, check=True,
                   capture_output=True, text=True)
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index",
                    "--wheel-dir", built, next(built.glob("*.tar.gz"))], check=True, capture_output=True, text=True)
    return next(built.glob("pase_mtf-*.whl"))


def test_wheel_holds_every_file_of_the_folders(repository, wheel):
    expected = {f"{package}/{file.relative_to(repository / folder).as_posix()}"
                for folder, package in _FOLDERS.items() for file in (repository / folder).rglob("*")
                if file.is_file() and file.suffix not in (".bazel", ".pth") and "__pycache__" not in file.parts}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"pase_mtf/cost/build.py", "pase_mtf/models/alexnet.py", "pase_mtf/configs/machines/h100.json"} <= expected
    assert expected - names == set()
    assert any(name.endswith("pase_mtf-mesh-tensorflow.pth") for name in names)
    assert any(name.endswith("LICENSE") for name in names)


@pytest.fixture(scope="module")
def requirements(wheel):
    """What the wheel says to need, extras included."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    return [Requirement(text) for text in metadata.get_all("Requires-Dist")]


def test_what_everybody_has_to_install_is_what_the_library_imports(repository, requirements):
    """What benchmarks, tests or the launcher alone want is in an extra."""
    needed = {canonicalize_name(requirement.name) for requirement in requirements if requirement.marker is None}
    imported = set()
    for file in (file for folder in _FOLDERS for file in (repository / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [name.name for name in node.names]
                imported |= {name.partition(".")[0] for name in names}
    by_module = importlib.metadata.packages_distributions()
    assert "numpy" in needed
    assert needed - {canonicalize_name(name) for module in imported for name in by_module.get(module, ())} == set()


def test_every_dependency_is_bounded_on_both_sides(requirements):
    found = requirements
    assert {"numpy", "numba", "scipy", "mesh-tensorflow", "tensorflow-cpu", "pytest", "mypy"} <= {
        requirement.name for requirement in found}
    bounds = {str(requirement): {specifier.operator for specifier in requirement.specifier} for requirement in found}
    assert [text for text, operators in bounds.items() if not {">=", "<"} <= operators] == []


def _light_modules(repository):
    """What the contract in pyproject.toml says to know no TensorFlow: these packages with all that is in them."""
    settings = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))
    contract, = (contract for contract in settings["tool"]["importlinter"]["contracts"]
                 if contract["name"] == "What a search needs knows no TensorFlow")
    for name in contract["source_modules"]:
        yield name
        folder = repository / name.replace(".", "/")
        yield from (f"{name}.{file.stem}" for file in folder.glob("*.py") if file.stem not in ("__init__", "__main__"))


def test_installed_wheel_runs_by_itself_and_its_search_without_tensorflow(repository, wheel, tmp_path):
    """Unpacked elsewhere, it is what is imported, and its folders are the packages they should be."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    light = list(_light_modules(repository))
    assert "pase_mtf.search.network" in light
    code = f"""
import importlib, json, sys
found = [importlib.import_module(name).__file__ for name in {["pase_mtf", *light]!r}]
tensorflow = "tensorflow" in sys.modules
found += [importlib.import_module(name).__file__ for name in ("pase_mtf.models", "pase_mtf.launch", "pase_mtf.configs")]
print(json.dumps([tensorflow, found]))
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path,
                            env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=True, capture_output=True, text=True)
    tensorflow, files = json.loads(result.stdout)
    assert not tensorflow
    assert [file for file in files if not file.startswith(f"{tmp_path}{os.sep}pase_mtf{os.sep}")] == []


@pytest.mark.parametrize("version", ["2.7.18", "3.9.2", "3.14.0"])
def test_make_refuses_another_python_in_one_line(repository, tmp_path, version):
    for file in ("Makefile", "setup.py"):
        shutil.copy(repository / file, tmp_path)
    python = tmp_path / "python"
    python.write_text(f"""#!/bin/sh
[ "$1" = --version ] && exec echo Python {version}
shift; exec "{sys.executable}" -c "import sys; sys.version_info = tuple(map(int, '{version}'.split('.'))); $*"
""")
    python.chmod(0o755)
    result = subprocess.run(["make", "launch", f"PYTHON={python}"], cwd=tmp_path, capture_output=True, text=True)
    lines = [line for line in result.stderr.splitlines() if not line.startswith("make")]
    assert result.returncode != 0
    assert lines == [f"pase_mtf needs Python 3.10 to 3.13, {python} is Python {version}; try make PYTHON=python3.11"]
    assert not (tmp_path / ".venv").exists()


def test_make_help_names_every_target(repository):
    result = subprocess.run(["make", "--no-print-directory", "help"], cwd=repository, check=True, capture_output=True,
                            text=True)
    targets = {line.split()[1] for line in result.stdout.splitlines() if line.startswith("make ")}
    phony = re.search(r"^\.PHONY: (.*)$", (repository / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {"help", *targets} == set(phony[1].split())
    subprocess.run(["make", "--dry-run", *targets], cwd=repository, check=True, capture_output=True)


def test_make_compiles_the_kernels_again_once_their_file_changed(repository, tmp_path):
    shutil.copy(repository / "Makefile", tmp_path)
    kernel, other = tmp_path / "pase_mtf" / "kernel.py", tmp_path / "pase_mtf" / "other.py"
    for path, text in ((tmp_path / "setup.py", ""), (kernel, "from numba import njit\n"), (other, "import math\n"),
                       (tmp_path / ".venv" / ".installed-cpu", ""), (tmp_path / ".venv" / ".compiled", "")):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    def commands():
        return subprocess.run(["make", "--no-print-directory", "--dry-run", "environment", "TENSORFLOW=cpu"],
                              cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    compiled_at = (tmp_path / ".venv" / ".compiled").stat().st_mtime
    os.utime(other, (compiled_at + 10, compiled_at + 10))
    assert "strategy.compile" not in commands()
    os.utime(kernel, (compiled_at + 10, compiled_at + 10))
    assert "strategy.compile" in commands()
    assert "pip" not in commands()


@pytest.mark.skipif("TEST_SRCDIR" in os.environ, reason="Bazel lays out only the files that a target names")
def test_links_of_the_documents_lead_somewhere(repository):
    pages = [*repository.glob("*.md"), *(repository / "docs").rglob("*.md")]
    links = [(page, link) for page in pages
             for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text(encoding="utf-8"))]
    assert repository / "README.md" in {page for page, _ in links}
    assert [f"{page}: {link}" for page, link in links if not (page.parent / link).exists()] == []


def test_make_makes_an_environment_anew_that_was_interrupted(repository, tmp_path):
    """It has a Python, and no pip yet."""
    for file in ("Makefile", "setup.py"):
        shutil.copy(repository / file, tmp_path)
    half, python = tmp_path / ".venv" / "bin" / "python", tmp_path / "python"
    half.parent.mkdir(parents=True)
    half.write_text('#!/bin/sh\necho "No module named pip" >&2; exit 1\n')
    python.write_text('#!/bin/sh\n[ "$1" = -c ]\n')  # the right version; its venv fails, which is told
    for path in (half, python):
        path.chmod(0o755)
    result = subprocess.run(["make", "environment", f"PYTHON={python}", "TENSORFLOW=cpu"], cwd=tmp_path,
                            capture_output=True, text=True, check=False)
    assert f"{python} cannot make an environment" in result.stderr
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize(("asked", "anew"), [("3.12", True), ("3.11", False)])
def test_make_with_another_python_makes_the_environment_anew(repository, tmp_path, asked, anew):
    """It went on with the one that was there, and said nothing."""
    shutil.copy(repository / "Makefile", tmp_path)
    (tmp_path / "setup.py").write_text("")
    there, python = tmp_path / ".venv" / "bin" / "python", tmp_path / "python"
    there.parent.mkdir(parents=True)
    for path, version in ((there, "3.11"), (python, asked)):
        path.write_text(f"#!/bin/sh\necho {version}\n")
        path.chmod(0o755)
    for name in (".installed-cpu", ".compiled"):
        (tmp_path / ".venv" / name).write_text("")
    said = subprocess.run(["make", "--no-print-directory", "--dry-run", "environment", f"PYTHON={python}",
                           "TENSORFLOW=cpu"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert ("removing .venv, which has Python 3.11" in said) == anew


def test_whoever_installs_the_launcher_gets_a_tensorflow(repository):
    for path in (repository / "README.md", *(repository / "docs").glob("*.md")):
        for extras in re.findall(r"pip install '\.\[([^\]]*launch[^\]]*)\]'", path.read_text(encoding="utf-8")):
            assert {"cpu", "gpu"} & set(extras.split(",")), (path, extras)


@pytest.mark.parametrize("build", ["cuda", "2.21", ""])
def test_make_refuses_a_build_of_tensorflow_that_there_is_not(repository, tmp_path, build):
    """It removed the one that was there, and installed none."""
    shutil.copy(repository / "Makefile", tmp_path)
    (tmp_path / "setup.py").write_text("")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".installed-cpu").write_text("")
    result = subprocess.run(["make", "--no-print-directory", "--dry-run", "environment", f"TENSORFLOW={build}"],
                            cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert f"TENSORFLOW={build}: unknown; take cpu or gpu" in result.stderr
    assert result.stdout == ""
