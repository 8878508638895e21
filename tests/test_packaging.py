"""What is installed, and how: the wheel, the Makefile's answers, and who imports TensorFlow."""

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

_FOLDERS = {"pase_mtf": "pase_mtf", "models": "pase_mtf/models", "launch": "pase_mtf/launch",
            "configs": "pase_mtf/configs"}


@pytest.fixture(scope="module")
def wheel(repository, tmp_path_factory):
    """The wheel, built from a copy: setuptools leaves files of its own beside setup.py."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for folder in _FOLDERS:
        shutil.copytree(repository / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repository / file, source)
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index",
                    "--wheel-dir", built, source], check=True, capture_output=True, text=True)
    return next(built.glob("pase_mtf-*.whl"))


def test_wheel_holds_every_module_and_configuration(repository, wheel):
    expected = {f"{package}/{file.relative_to(repository / folder).as_posix()}"
                for folder, package in _FOLDERS.items() for file in (repository / folder).rglob("*")
                if file.suffix in {".py", ".json"}}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert len(expected) > 10
    assert expected - names == set()
    assert any(name.endswith("LICENSE") for name in names)


def test_installed_wheel_runs_by_itself(wheel, tmp_path):
    """Unpacked elsewhere, it is what is imported, and its folders are the packages they should be."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = ("import pase_mtf, pase_mtf.models, pase_mtf.launch, pase_mtf.configs\n"
            "print(*(m.__file__ for m in (pase_mtf, pase_mtf.models, pase_mtf.launch, pase_mtf.configs)), sep='\\n')")
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)},
                            check=True, capture_output=True, text=True)
    assert result.stdout.split() == [str(tmp_path / package / "__init__.py") for package in _FOLDERS.values()]


def _imports(file):
    """The top packages that a module names in an import statement."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.partition(".")[0]


def test_only_compat_imports_tensorflow(repository):
    guilty = [str(file.relative_to(repository)) for folder in _FOLDERS
              for file in (repository / folder).rglob("*.py")
              if {"tensorflow", "mesh_tensorflow"} & set(_imports(file))]
    assert sorted(guilty) == ["pase_mtf/_tensorflow.py", "pase_mtf/compat.py"]


def test_search_side_starts_without_tensorflow(repository):
    folder = repository / "pase_mtf"
    light = ["errors", "files", "graph", "configurations", "machine", "network", "cost", "search", "strategy"]
    modules = [f"pase_mtf.{name}" for name in light if (folder / f"{name}.py").exists() or (folder / name).is_dir()]
    modules += [f"pase_mtf.{inner}.{file.stem}" for inner in ("cost", "search")
                for file in (folder / inner).glob("*.py") if file.stem != "__init__"]
    code = f"import sys, pase_mtf, {', '.join(modules)}; print('tensorflow' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert result.stdout == "False\n"


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
    assert {"launch", "test", "lint", "benchmark"} <= targets
    for target in targets:
        subprocess.run(["make", "--dry-run", target], cwd=repository, check=True, capture_output=True)


@pytest.mark.skipif("TEST_SRCDIR" in os.environ, reason="Bazel lays out only the files that a target names")
def test_links_of_the_readme_lead_somewhere(repository):
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", (repository / "README.md").read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not (repository / link).exists()] == []
