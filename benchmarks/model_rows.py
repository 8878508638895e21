"""Benchmarks that measure a row for every model and number of devices, and keep the rows that they do not measure anew.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.facts import facts
from benchmarks.search import FOLDER
from benchmarks.search_networks import ROOT
from pase_mtf import models
from pase_mtf.errors import UsageError
from pase_mtf.files import write_atomically

__all__ = ["ModelRows", "flag_parser"]


def flag_parser(description: str, devices: Sequence[int], machine: str) -> argparse.ArgumentParser:
    """The flags that all of these benchmarks have.

    Args:
      description: of the benchmark, a line.
      devices: numbers of them, the default.
      machine: whose numbers count by default.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--models", default=",".join(models.names()), help="of these (default: %(default)s)")
    parser.add_argument("--devices", default=",".join(map(str, devices)), help="default: %(default)s")
    parser.add_argument("--machine", default=machine, help="whose numbers count (default: %(default)s)")
    parser.add_argument("--output", default=str(FOLDER), help="folder of the results")
    parser.add_argument("--work", default=str(ROOT / "build" / "search"), help="folder of the graphs")
    return parser


class ModelRows:
    """The rows of a benchmark, in a file of JSON and on a page.

    Attributes:
      rows: by model and number of devices: those that were measured before, until they are replaced. Every row knows
        where it was measured (`facts`).
    """

    def __init__(self, stem: pathlib.Path, machine: str, document: Callable[[Mapping[str, Any]], str]) -> None:
        """Reads what has been measured.

        Args:
          stem: path of the files, without ".json" and ".md".
          machine: whose numbers count.
          document: makes the page of the results (`machine`, and `rows` in order).

        Raises:
          UsageError: the page is of another machine.
        """
        self._stem, self._machine, self._document, self._here = stem, machine, document, facts()
        self.rows: dict[tuple[str, int], dict[str, Any]] = {}
        if stem.with_suffix(".json").exists():
            results = json.loads(stem.with_suffix(".json").read_text(encoding="utf-8"))
            if results["machine"] != machine:
                raise UsageError(f"--machine={machine}: the rows of {stem.with_suffix('.json')} are for "
                                 f"{results['machine']}; choose another --output")
            self.rows = {(row["model"], row["devices"]): {"facts": results.get("facts"), **row}
                         for row in results["rows"]}

    def write(self) -> None:
        """Writes both files; rows without `facts` are new."""
        for row in self.rows.values():
            if row.get("facts") is None:
                row["facts"] = self._here
        results = {"machine": self._machine, "rows": [self.rows[key] for key in sorted(self.rows)]}
        page = self._document(results)
        self._stem.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._stem.with_suffix(".json"), json.dumps(results, indent=1) + "\n")
        write_atomically(self._stem.with_suffix(".md"), page)
