"""Where something was measured: machine, versions of what runs on it, and the commit of the program."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

from benchmarks.launching import commit
from pase_mtf.runtime import describe_host

__all__ = ["facts", "facts_text", "of_rows"]

_PACKAGES = ("numpy", "numba", "scipy", "pytoulbar2")


def facts(*packages: str) -> dict[str, str]:
    """The machine, the versions of what runs on it (of these packages besides the usual ones), and the commit."""
    versions = [f"Python {platform.python_version()}"]
    for package in (*_PACKAGES, *packages):
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            versions.append(f"{package} not installed")
    return {"machine": describe_host(), "versions": ", ".join(versions), "commit": commit() or "unknown"}


def of_rows(rows: Iterable[Mapping[str, Any]], earlier: Mapping[str, str] | None = None) -> list[Mapping[str, str]]:
    """The facts of rows that keep theirs; `earlier` are those of rows that do not, which were kept for a whole file."""
    return [row.get("facts", earlier) for row in rows if row.get("facts", earlier)]


def facts_text(found: Iterable[Mapping[str, str]]) -> str:
    """What a page says of where its rows were measured: every machine once, with the commits that it measured.

    Args:
      found: of every row (`facts`).
    """
    commits: dict[str, list[str]] = {}
    for one in found:
        commits.setdefault(f"{one['machine']}; {one['versions']}", []).append(one["commit"])
    return " / ".join(f"{where}; commit{'s' if len(set(of_it)) > 1 else ''} {', '.join(sorted(set(of_it)))}"
                      for where, of_it in commits.items())
