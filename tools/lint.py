"""Runs the checkers that look at the whole package: imports within functions, import-linter's contracts, then mypy.

Both find packages by their folders, and setup.py installs models/ and launch/ under other names than they have in the
repository: a tree of links gives them those. What is checked stands in pyproject.toml.
"""

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_ROOT = Path(__file__).absolute().parents[1]
_FOLDERS = {"pase_mtf": "pase_mtf", "models": "pase_mtf/models", "launch": "pase_mtf/launch",
            "configs": "pase_mtf/configs"}


def _missing() -> list[str]:
    """The checkers that this Python cannot import."""
    checkers = {"importlinter": "import-linter", "mypy": "mypy"}
    return [package for module, package in checkers.items() if importlib.util.find_spec(module) is None]


def _unexplained(file: Path) -> list[str]:
    """Imports within functions without a comment that says why, beside the first of several or above it."""
    text = file.read_text(encoding="utf-8")
    lines = text.splitlines()
    told: set[int] = set()  # the last lines of imports that a comment explains
    found: dict[int, str] = {}
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for node in ast.walk(function):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                above = max((line for line in range(1, node.lineno) if lines[line - 1].strip()), default=0)
                if "#" in lines[node.lineno - 1] or lines[above - 1].lstrip().startswith("#") or above in told:
                    told.add(node.end_lineno or node.lineno)
                else:
                    found[node.lineno] = f"{file.relative_to(_ROOT)}:{node.lineno}: an import within a function; " \
                        "import at the top, or say beside it or above it why not"
    return [found[line] for line in sorted(found)]


def _imports() -> int:
    """Exit code 1 where an import within a function has no reason."""
    found = [problem for folder in (*_FOLDERS, "benchmarks", "tools") for file in sorted((_ROOT / folder).rglob("*.py"))
             for problem in _unexplained(file)]
    print(*found, sep="\n", end="\n" if found else "", file=sys.stderr)
    return int(bool(found))


def _command(command: list[str], folder: Path) -> int:
    """Runs a command in the tree; its output only where it fails."""
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False,
                           env={**os.environ, "PYTHONPATH": str(folder), "MYPY_CACHE_DIR": str(_ROOT / ".mypy_cache")})
    if found.returncode:
        text = found.stdout + found.stderr
        if found.returncode < 0:  # it could not say anything itself
            text += f"error: {' '.join(command[1:3])} ended by signal {-found.returncode}, as where memory runs out\n"
        for source, target in _FOLDERS.items():
            if source != target:  # the file as it lies in the repository
                text = text.replace(f"{target}/", f"{source}/")
        print(text, end="", file=sys.stderr)
    return found.returncode


def main() -> int:
    """Exit code 1 where a checker finds something, 2 where one is not installed."""
    if missing := _missing():
        print(f"error: {' and '.join(missing)} not installed for {sys.executable}; run make environment, or "
              "pip install '.[lint]'", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for source, target in _FOLDERS.items():
            shutil.copytree(_ROOT / source, folder / target, copy_function=os.symlink, dirs_exist_ok=True,
                            ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(_ROOT / "pyproject.toml", folder)
        imports = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()",
                   "--no-cache"]
        types = [sys.executable, "-m", "mypy", "-p", "pase_mtf"]
        # Any: of one that was killed the code is negative.
        return int(any([_imports(), *(_command(command, folder) for command in (imports, types))]))


if __name__ == "__main__":
    sys.exit(main())
