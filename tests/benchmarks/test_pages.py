"""The committed pages say what the committed measurements say."""

import json

import pytest
from markdown_cells import row_of, rows

from benchmarks import (
    accuracy,
    bfloat16,
    cluster,
    cluster_page,
    epochs,
    epochs_document,
    faults,
    first_launch,
    fuzz,
    gpu,
    house,
    layout_report,
    memory,
    paper_document,
    pipeline,
    ranks,
    search,
    search_devices,
    search_document,
    search_solvers,
    simulator,
    speedup,
)
from benchmarks.speedup_rows import Rows, compact_table, full_table


def _read(path):
    return json.loads(path.read_text(encoding="utf-8"))


_PAGES = [
    ("benchmarks/accuracy.md", "benchmarks/accuracy.json", lambda path: accuracy.document(_read(path))),
    ("benchmarks/batches.md", "benchmarks/batches.json", lambda path: compact_table(list(Rows(str(path))))),
    ("benchmarks/bfloat16.md", "benchmarks/bfloat16.json", lambda path: bfloat16.document(_read(path))),
    ("benchmarks/cluster.md", "benchmarks/cluster.json",
     lambda path: cluster_page.document(list(cluster.Rows(str(path.with_suffix("")))))),
    ("benchmarks/epochs.md", "benchmarks/epochs.json",
     lambda path: epochs_document.document(epochs.load(path))),
    ("benchmarks/faults.md", "benchmarks/faults.json", lambda path: faults.document(_read(path))),
    ("benchmarks/first_launch.md", "benchmarks/first_launch.json", lambda path: first_launch.document(_read(path))),
    ("benchmarks/fuzz.md", "benchmarks/fuzz.json", lambda path: fuzz.document(_read(path))),
    ("benchmarks/gpu.md", "benchmarks/gpu.json", lambda path: gpu.document(_read(path))),
    ("benchmarks/house.md", "benchmarks/house.json", lambda path: house.document(_read(path))),
    ("benchmarks/layout.md", "benchmarks/layout.json", lambda path: layout_report.document(_read(path))),
    ("benchmarks/memory.md", "benchmarks/memory.json", lambda path: memory.document(_read(path))),
    ("benchmarks/pipeline.md", "benchmarks/pipeline.json", lambda path: pipeline.document(_read(path))),
    ("benchmarks/ranks.md", "benchmarks/ranks.json", lambda path: ranks.document(_read(path))),
    ("benchmarks/search.md", "benchmarks/search.json", lambda path: search_document.document(search.load(path))),
    ("benchmarks/search_devices.md", "benchmarks/search_devices.json",
     lambda path: search_devices.document(_read(path))),
    ("benchmarks/simulator.md", "benchmarks/simulator.json", lambda path: simulator.document(_read(path))),
    ("benchmarks/solvers.md", "benchmarks/solvers.json", lambda path: search_solvers.document(_read(path))),
    ("benchmarks/speedup.md", "benchmarks/speedup.json", lambda path: full_table(list(Rows(str(path))))),
    ("paper.md", "paper.json", lambda path: paper_document.document(_read(path)))]


@pytest.mark.parametrize(("page", "measured", "document"), _PAGES)
def test_page_has_the_numbers_that_were_measured(repository, page, measured, document):
    found = rows((repository / "docs" / page).read_text(encoding="utf-8"))
    assert len(found) > 4
    assert found == rows(document(repository / "docs" / measured))


def test_no_page_is_left_out(repository):
    assert {path.name for path in (repository / "docs" / "benchmarks").glob("*.json")} <= {
        measured.rpartition("/")[2] for _, measured, _ in _PAGES}


def test_what_is_said_of_the_papers_figure_are_numbers_of_the_table(repository):
    said = paper_document._explained(_read(repository / "docs" / "paper.json")["speedups"]).strip()
    assert said
    assert said in (repository / "docs" / "paper.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("model", ["inception_v3", "resnet101", "densenet121"])
def test_speedups_on_the_page_of_the_convolutional_models_are_those_of_the_papers_figure(repository, model):
    found = _read(repository / "docs" / "paper.json")["speedups"][model]["1080ti"]
    row = row_of((repository / "docs" / "convolutional_models.md").read_text(encoding="utf-8").partition(
        "## Strategies of the published sizes")[2], f"`{model}`")
    for devices, cell in (("8", row[4]), ("64", row[6])):
        ours, expert = (found[devices][arm]["speedup"] for arm in ("ours", "expert"))
        assert cell == f"{ours:.2f}×, {ours / expert:.2f}×"


def test_table_of_the_readme_is_that_of_eight_devices(repository):
    text = (repository / "README.md").read_text(encoding="utf-8")
    shown = speedup._of_one_processor([
        row for row in Rows(str(repository / "docs" / "benchmarks" / "speedup.json")) if row.key[1] == 8])
    table = text.partition("<!-- speedup -->")[2].partition("<!-- /speedup -->")[0]
    assert rows(table) == rows(compact_table(shown))


def test_the_gate_that_is_kept_says_where_it_was_timed(repository, tmp_path, monkeypatch):
    """Its minutes stood beside the machine of the run that kept them."""
    known = _read(repository / "docs" / "benchmarks" / "house.json")
    for name, found in (("shape", known["after"]), ("moved", known["moved"]), ("same_numbers", known["same"]),
                        ("prices", [[1, 2]] * 3), ("computed", known["defects"][0]), ("_git", b"abc1234"),
                        ("_gate", {"minutes": 4.5, "said": "= 9 passed =", "load": 1.0})):
        monkeypatch.setattr(house, name, lambda *given, found=found: found)
    for machine, flags in (("Chip", ["--gate"]), ("Other", [])):
        monkeypatch.setattr(house, "facts", lambda machine=machine: {"machine": machine, "versions": "Python 9",
                                                                     "commit": "abc"})
        assert house.main([*flags, "--before=HEAD", f"--output={tmp_path}"]) == 0
    page = (tmp_path / "house.md").read_text(encoding="utf-8")
    assert "whose environment is there (9 passed; Chip; Python 9; commit abc)." in page
    assert "Other; Python 9. Reproduce" in page
    earlier = {**known, "gate": {"commit": "abc1234", "minutes": 4.5, "said": "= 8 passed =", "load": 1.0}}
    assert "whose environment is there (8 passed)." in house.document(earlier)


def test_the_memory_page_tells_of_all_that_holds_more_than_predicted(repository):
    results = _read(repository / "docs" / "benchmarks" / "memory.json")
    for row in results["rows"]:
        for entry in [*row["arms"].values(), *row["frontier"], *(entry for pair in row["again"].values()
                                                                 for entry in pair)]:
            entry["predicted"] = entry["measured"] = entry["measured"] + 1.0
    assert "did not" not in memory.document(results)
    row = results["rows"][-1]
    row["again"]["search"][1]["measured"] *= 1.25
    page = memory.document(results)
    assert f"{row['model']}, {row['devices']} devices, search, computed again (25.0 % more) did not." in page


def test_pages_name_all_that_their_benchmarks_try(repository, tmp_path):
    told = _read(repository / "docs" / "benchmarks" / "faults.json")
    assert {fault.name for fault in faults._faults(faults._Runs(tmp_path), 20)} <= {
        *told["faults"], *(row["fault"] for row in told["rows"])}
    rows = _read(repository / "docs" / "benchmarks" / "fuzz.json")["rows"]
    assert [row[0] for row in rows] == list(fuzz.TARGETS)


def test_the_readme_says_of_flexflows_search_what_the_page_says(repository):
    shown = list(Rows(str(repository / "docs" / "benchmarks" / "speedup.json")))
    pairs = [(row, [arm for arm in ("mcmc", "mcmc_expert") if row.milliseconds(arm)]) for row in shown]
    ratios = [min(map(row.milliseconds, arms)) / row.milliseconds("search") for row, arms in pairs if arms]
    spread = max(row.summary["arms"][arm]["measured_ms_spread"] / row.milliseconds(arm)
                 for row, arms in pairs for arm in ("search", *arms))
    text = " ".join((repository / "README.md").read_text(encoding="utf-8").split())
    said = text.partition("FlexFlow's search, given our costs")[2].partition("Not every promise")[0]
    assert f"{min(ratios):.2f}" in said
    assert f"{max(ratios):.2f} times our time" in said
    assert f"at a spread of up to {100 * spread:.0f} %" in said


def test_the_memory_page_says_how_long_was_searched_and_counts_five_percent(repository):
    results = _read(repository / "docs" / "benchmarks" / "memory.json")
    for row in results["rows"]:
        for arm in row["arms"].values():
            arm["predicted"] = arm["measured"]
    arm["predicted"], arm["measured"] = 95.1e6, 100e6  # 5.15 % more
    page = memory.document(results)
    count = sum(len(row["arms"]) for row in results["rows"])
    assert f"{count - 1} held at most 5 % more" in page
    assert "found in 2 s of search each, proven or not" in page


def test_the_page_of_pipelines_says_how_much_more_is_predicted_of_recurrent_layers(repository):
    text = (repository / "docs" / "pipelines.md").read_text(encoding="utf-8")
    most = max(float(row[-1]) for row in rows(text) if row[0] in ("gnmt", "rnnlm") and len(row) == 7)
    assert f"Of recurrent layers up to {100 * (most - 1):.0f} % more is predicted" in " ".join(text.split())


def test_graphs_that_were_fuzzed_were_not_all_refused(repository):
    rows = {row[0]: row for row in _read(repository / "docs" / "benchmarks" / "fuzz.json")["rows"]}
    assert rows["graph"][3] > 20  # taken and used
