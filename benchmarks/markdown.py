"""Tables of the pages that the benchmarks write."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from tabulate import tabulate

__all__ = ["table"]


def table(head: Sequence[str], rows: Iterable[Sequence[object]], left: Collection[int] = (0,)) -> str:
    """A table in GitHub's Markdown.

    Args:
      head: titles of the columns.
      rows: cells, shown as they are; a vertical bar within one is escaped.
      left: the columns that are aligned left; the others, numbers as a rule, are aligned right.
    """
    body = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    alignment = ["left" if column in left else "right" for column in range(len(head))]
    return tabulate(body, head, tablefmt="pipe", disable_numparse=True, colalign=alignment)
