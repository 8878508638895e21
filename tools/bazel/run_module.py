"""Runs a module under Bazel, with the folders of this repository under the names that setup.py installs them by.

Usage: run_module.py MODULE ARGUMENT..., as `python -m MODULE ARGUMENT...`. Bazel lays sources out as they are in the
repository, so the packages are put together from links, for this process and for those that it starts.
"""

import os
import runpy
import sys
import tempfile
from pathlib import Path

_FOLDERS = ("configs", "launch", "models")


def _link_packages(sources: Path, site: Path) -> None:
    """Makes `site`/pase_mtf from the library's own files and, beside them, the folders that setup.py maps into it."""
    package = site / "pase_mtf"
    package.mkdir()
    for path in [*(sources / "pase_mtf").iterdir(), *(sources / folder for folder in _FOLDERS)]:
        if path.exists():
            (package / path.name).symlink_to(path)


def main() -> None:
    """Replaces this program by the module."""
    sources = Path(__file__).absolute().parents[2]
    with tempfile.TemporaryDirectory() as site:
        _link_packages(sources, Path(site))
        sys.path[:] = [site, *(path for path in sys.path if path != str(sources))]
        os.environ["PYTHONPATH"] = site
        # `bazel run` starts in a folder of Bazel's own; what is written belongs where the user stands.
        os.chdir(os.environ.get("BUILD_WORKING_DIRECTORY", os.getcwd()))
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
