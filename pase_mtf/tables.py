"""Tables for the terminal."""

from collections.abc import Collection, Sequence

__all__ = ["format_table"]


def format_table(head: Sequence[str], body: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Columns as wide as their widest cell, a rule under the head, no trailing blanks.

    Args:
      head: titles of the columns.
      body: rows of cells.
      right: the columns to align right.
    """
    widths = [max(len(row[column]) for row in (head, *body)) for column in range(len(head))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(cell.rjust(width) if column in right else cell.ljust(width)
                         for column, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()

    return "\n".join([line(head), "  ".join("-" * width for width in widths), *map(line, body)])
