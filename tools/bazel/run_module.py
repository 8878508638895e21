"""Runs a module under Bazel, with the folders of this repository under the names that setup.py installs them by.

Usage: run_module.py MODULE ARGUMENT..., as `python -m MODULE ARGUMENT...`. Bazel lays sources out as they are in the
repository, so a copy of it is put together from links, for this process and for those that it starts.
"""

import os
import runpy
import shutil
import sys
import tempfile
from pathlib import Path

_FOLDERS = ("configs", "launch", "models")
_NO_TESTS = 5  # pytest.ExitCode.NO_TESTS_COLLECTED


def _link(sources: Path, target: Path) -> None:
    """Makes `target` the repository with, inside pase_mtf, also the folders that setup.py maps into it."""
    shutil.copytree(sources, target, copy_function=os.symlink)
    for folder in _FOLDERS:
        if (sources / folder).exists():
            shutil.copytree(sources / folder, target / "pase_mtf" / folder, copy_function=os.symlink)


def main() -> None:
    """Replaces this program by the module."""
    sources = Path(__file__).absolute().parents[2]
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder) / "repository"
        _link(sources, repository)
        sys.path[:] = [str(repository), *(path for path in sys.path if path != str(sources))]
        os.environ["PYTHONPATH"] = str(repository)
        # `bazel run` starts in a folder of Bazel's own; what is written belongs where the user stands.
        os.chdir(os.environ.get("BUILD_WORKING_DIRECTORY", repository))
        sys.argv = sys.argv[1:]
        try:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        except SystemExit as end:
            # A file may hold nothing but tests that a mark leaves out.
            if sys.argv[0] != "pytest" or end.code != _NO_TESTS:
                raise


if __name__ == "__main__":
    main()
