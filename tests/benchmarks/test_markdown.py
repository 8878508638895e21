from markdown_cells import row_of, rows

from benchmarks import markdown


def test_cells_are_shown_as_they_are():
    text = markdown.table(["name", "number"], [["a|b", "007"], ["", 1.50], ["wide enough", "1e3"]])
    assert rows(text) == [["name", "number"], ["a|b", "007"], ["", "1.5"], ["wide enough", "1e3"]]
    assert row_of(text, "wide enough") == ["wide enough", "1e3"]


def test_columns_are_aligned_as_asked():
    rule = markdown.table(["a", "b", "c"], [["1", "2", "3"]], left=(0, 2)).splitlines()[1]
    assert [(cell[0], cell[-1]) for cell in rule.strip("|").split("|")] == [(":", "-"), ("-", ":"), (":", "-")]


def test_a_table_without_rows_is_its_head():
    assert rows(markdown.table(["a", "b"], [])) == [["a", "b"]]
