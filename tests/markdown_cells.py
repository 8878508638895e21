"""What a Markdown table says, whatever its columns' widths."""

import re


def rows(text: str) -> list[list[str]]:
    """The cells of all rows of all tables in a text; heads are rows, too."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not re.fullmatch(r"[|:\- ]+", line)]
    return [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def row_of(text: str, first: str) -> list[str]:
    """The one row that begins with a cell."""
    found, = (row for row in rows(text) if row[0] == first)
    return found
