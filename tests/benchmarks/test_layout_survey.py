"""The survey of all programs: what becomes of a program that hangs, what the page says, a real one."""

import argparse
import signal
import subprocess

import pytest
from markdown_cells import row_of, rows

from benchmarks import layout, layout_report, layout_survey, survey_report


def _cost(seconds, size=1e9, problem=""):
    return {"mesh_shape": "rows:8", "rules": "batch:rows", "seconds": seconds, "bytes": size, "problem": problem}


def _full(ours, own=None, cpu=2.0, **more):
    return {"operations": 1234, "builds": 2, "cpu_seconds": cpu, "parts": {"building": 0.5, "export": 0.25},
            "ours": ours, "own": own, "data_parallel": _cost(0.5), "limit": 8e10, "optimal": True, "gap": 0.0,
            "notes": [], **more}


def _tiny(stock, per_layer=0.0, **more):
    return {"mesh_shape": "rows:8", "rules": "batch:rows", "one_device": [1.5, 1.25], "beside": ";", "devices": 4,
            "stock": stock,
            "per_layer": {"losses": [1.5, 1.25], "difference": per_layer}, **more}


def _page(**entries):
    return survey_report.document({"survey": {"host": "Chip (2 cores)", "versions": "TensorFlow 9", "machine": "h100",
                                              "load": 3.2, "known": 65},
                                   "programs": {name: {"survey": entry} for name, entry in entries.items()}})


def test_a_program_without_an_answer_does_not_stop_the_others():
    found = layout_survey.run("one_name", ["full_8", "tiny"], "h100", 0.2)
    assert found == {piece: {"problem": "no answer after 0 s"} for piece in ("full_8", "tiny")}


@pytest.mark.parametrize(("again", "made"), [(False, ["auto_8"]), (True, ["full_8", "auto_8"])])
def test_what_is_surveyed_again_takes_nothing_else_away(monkeypatch, again, made):
    asked = []
    monkeypatch.setattr(layout_survey, "run", lambda name, pieces, machine, *limits: asked.extend(pieces) or {
        piece: {"problem": "new"} for piece in pieces})
    flags = argparse.Namespace(again=again, pieces="full_8,auto_8", machine="h100", process_limit=1.0, limit=1.0)
    known = {"survey": {"full_8": {"problem": "old"}, "tiny": {"problem": "old"}}}
    found = layout.survey("toy", known, flags)
    assert asked == made
    assert {piece: entry["problem"] for piece, entry in found.items()} == {
        "tiny": "old", "full_8": "new" if again else "old", "auto_8": "new"}


def test_pieces_say_where_they_were_answered(monkeypatch, tmp_path):
    """A run that finds all of them answered says nothing of its machine; one that makes some says it of these alone."""
    def answered(name, pieces, machine, *limits):
        return {piece: _full(_cost(0.01)) if piece.startswith("full") else _cost(0.02) for piece in pieces}

    monkeypatch.setattr(layout_survey, "run", answered)
    monkeypatch.setattr(layout, "_known", lambda section: ["one_name"])
    flags = ["--sections=survey", f"--output={tmp_path}"]

    def run(host, load, *more):
        monkeypatch.setattr(layout, "describe_host", lambda: host)
        monkeypatch.setattr(layout.os, "getloadavg", lambda: (load,) * 3)
        assert layout.main([*flags, *more]) == 0
        return (tmp_path / "layout.json").read_text(encoding="utf-8"), (tmp_path / "layout.md").read_text(
            encoding="utf-8")

    first, page = run("Chip", 2.0, "--pieces=full_8")
    assert "--sections=survey`; Chip; " in page
    assert run("Other", 9.0, "--pieces=full_8", "--machine=a100")[0] == first
    _, page = run("Third", 4.0, "--pieces=full_8,auto_8", "--machine=a100")
    for words in ("Chip; ", " / Third; ", "up to 4 processes", "machine a100 / h100"):
        assert words in page
    assert "Other" not in page


def test_pieces_of_earlier_versions_were_answered_where_the_survey_says():
    page = _page(old={"full_8": _full(_cost(0.01))}, new={"full_8": _full(
        _cost(0.01), where="New; Python 10", load=1.0, machine="a100")})
    for words in ("Chip (2 cores); TensorFlow 9 / New; Python 10", "up to 3 processes", "machine a100 / h100"):
        assert words in page


def test_what_is_not_asked_at_sixteen_devices_was_found_at_eight(monkeypatch):
    monkeypatch.setattr(layout_survey, "run", None)
    flags = argparse.Namespace(again=False, pieces="auto_8,auto_16", machine="h100", process_limit=1.0, limit=1.0)
    silent = {"problem": "no answer after 60 s of processor time", "commit": "abc1234", "where": "Chip; Python 9"}
    found = layout.survey("toy", {"survey": {"auto_8": silent}}, flags)
    assert found["auto_16"] == {**silent, "problem": "not asked: no answer at p = 8"}


@pytest.mark.slow
def test_an_unknown_program_is_told():
    found = layout_survey.run("no_such_program", ["tiny"], "h100", 300)
    assert found["tiny"]["problem"] == "KeyError: 'no_such_program'"


def test_what_the_page_says_of_good_answers():
    page = _page(good={"full_8": _full(_cost(0.01), _cost(0.02), commit="abc1234"),
                       "tiny": _tiny({"losses": [], "difference": 1e-7}), "auto_8": _cost(0.04)})
    times = page[:page.index("### Predicted")]
    assert row_of(times, "good")[1:] == ["1,234", "8", "2", "0.5", "0.2", "1.2", "", "2.0", "proven", "abc1234"]
    for words in ("1 of 65 programs, 1 searches: 1 answered, 0 refused in words; no answer at all: none",
                  "verification: none", "up to 3 processes",
                  "Beyond the device's memory: none", "Costlier than an own layout that lowers and fits: none",
                  "did not lower or run: none", "one device's: none", "20.00 ms, 1.0 GB", "40.00 ms, 1.0 GB",
                  "Chip (2 cores); TensorFlow 9", "1.5, 1.25"):
        assert words in page


def test_what_the_page_says_of_others():
    page = _page(
        hangs={"full_8": {"problem": "no answer after 600 s"}},
        refuses={"full_8": {"operations": 9, "cpu_seconds": 1.0, "limit": 8e10, "problem": "nothing fits"}},
        dear={"full_8": _full(_cost(0.03), _cost(0.02), cpu=20.0)},
        dear_but_own_does_not_fit={"full_8": _full(_cost(0.03), _cost(0.02, 9e10))},
        large={"full_8": _full(_cost(0.03, 9e10))},
        fails={"tiny": _tiny({"problem": "ValueError: no"})},
        noisy={"tiny": _tiny({"losses": [], "difference": 0.1}, other_noise=0.2)},
        wrong={"tiny": _tiny({"losses": [], "difference": 0.1}, other_noise=0.0)})
    for words in ("1 refused in words (refuses at p = 8)", "no answer at all: 1 (hangs at p = 8)",
                  "verification: 1 (dear at p = 8: 20 s)", "memory: 1 (large at p = 8: 90.0 GB)",
                  "lowers and fits: 1 (dear at p = 8: 1.50×)", "did not lower or run: 1 (fails (stock))",
                  "one device's: 2 (noisy, wrong)", "other noise: 1 (noisy)"):
        assert words in page


@pytest.mark.slow
def test_a_program_is_surveyed():
    found = layout_survey.run("one_name", ["full_8", "tiny"], "h100", 600)
    assert found["full_8"]["ours"]["seconds"] <= found["full_8"]["data_parallel"]["seconds"]
    assert set(found["full_8"]["parts"]) == {"building", "export", "verification"}
    assert found["tiny"]["rules"]
    assert max(found["tiny"][arm]["difference"] for arm in ("stock", "per_layer")) <= 1e-5


def test_a_program_ends_where_the_survey_is_interrupted(monkeypatch):
    """Ctrl-C does not reach its session, nor does anybody else know how long it may take."""
    made = []

    class Interrupted(subprocess.Popen):
        def communicate(self, *given, **named):
            made.append(self)
            raise KeyboardInterrupt

    monkeypatch.setattr(layout_survey.subprocess, "Popen", Interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            layout_survey.run("one_name", ["tiny"], "h100", 60.0)
        assert made[0].returncode == -signal.SIGKILL
    finally:
        made[0].kill()
        made[0].wait()


def test_sixteen_devices_are_asked_where_eight_are_asked_anew(monkeypatch):
    """With more time eight answered, and of sixteen the page went on saying that eight had not."""
    monkeypatch.setattr(layout_survey, "run", lambda name, pieces, machine, *limits: {
        piece: _cost(0.02) for piece in pieces})
    flags = argparse.Namespace(again=True, pieces="auto_8,auto_16", machine="h100", process_limit=1.0, limit=600.0)
    silent = {"problem": "no answer after 60 s of processor time"}
    found = layout.survey("toy", {"survey": {"auto_8": silent}}, flags)
    assert [found[piece]["problem"] for piece in ("auto_8", "auto_16")] == ["", ""]


def test_the_median_of_an_even_number_is_between_the_middle_two():
    rows = [{"layout": name, "seconds": 1e-3, "measured_ms": ms} for name, ms in (("pase_mtf", 1.0), ("auto_mtf", 2.0))]
    assert "median 0.75, from 0.50 to 1.00." in layout_report._spread({"toy": {"rows": rows}})


@pytest.mark.parametrize("losses", [[1.5, float("nan")], [float("nan"), 1.25]])
def test_losses_that_are_no_numbers_differ(losses):
    """Of two steps the second was passed over: the page said that nan was the loss of one device."""
    difference = layout_survey._difference(losses, [1.5, 1.25])
    page = _page(wrong={"full_8": _full(_cost(0.01)),
                        "tiny": _tiny({"losses": losses, "difference": difference}, other_noise=0.0)})
    assert "one device's: 1 (wrong)" in page


def test_a_layout_of_ours_that_does_not_run_is_told(tmp_path):
    """It stood in the file, and every page from then on was a KeyError."""
    took = {"measured_ms": 2.0, "measured_spread_ms": 0.1, "measured_bytes": 1e6, "measured_loss": 1.0,
            "one_device_loss": 1.0}

    def entry(ours):
        rows = [{"layout": name, "mesh_shape": "rows:8", "rules": "batch:rows", "seconds": 1e-3, "bytes": 1e6, **more}
                for name, more in (("pase_mtf", ours), ("data parallel", took))]
        return {"measured": {"machine": "local", "rows": rows}}

    data = {"programs": {"toy": entry({"fails": "ValueError: no"}), "digits": entry(took)}}
    page = layout_report.document(data)
    assert "Our layout did not run here: toy. In no program" in page
    assert ["toy", "pase_mtf", "does not lower: ValueError: no"] in [[*row[:2], *row[5:6]] for row in rows(page)]
    layout_report.plot(data, str(tmp_path / "layout.svg"))
    assert (tmp_path / "layout.svg").exists()


def test_the_machine_beside_auto_mtf_is_that_of_the_predictions():
    search = {"forward": 1, "operations": 2, "parameters": 1e6, "export_seconds": 0.1, "once_seconds": 0.2,
              "find_seconds": 0.3, "optimal": True, "auto_mtf": {"failure": "not installed", "seconds": 0.0}}
    rows = [{"layout": name, "mesh_shape": "rows:8", "rules": "batch:rows", "seconds": 1e-3, "bytes": 1e6}
            for name in ("pase_mtf", "data parallel")]
    page = layout_report.document({"programs": {"toy": {"search": search, "predicted": {
        "machine": "a100", "rows": rows}}}})
    assert "predictions (machine a100)" in page
    assert "h100" not in page


def test_a_page_on_which_no_layout_ran():
    rows = [{"layout": name, "mesh_shape": "rows:8", "rules": "batch:rows", "seconds": 1e-3, "bytes": 1e6,
             "fails": "ValueError: no"} for name in ("pase_mtf", "data parallel")]
    page = layout_report.document({"programs": {"toy": {"measured": {"machine": "local", "rows": rows}}}})
    assert "Our layout did not run here: toy." in page
    assert "No layout ran here" in page


def test_a_page_on_which_no_layout_but_ours_lowers():
    rows = [{"layout": "pase_mtf", "mesh_shape": "rows:8", "rules": "batch:rows", "seconds": 1e-3, "bytes": 1e6},
            {"layout": "data parallel", "mesh_shape": "all:8", "rules": "batch:all", "problem": "a batch of 4"}]
    page = layout_report.document({"programs": {"toy": {"predicted": {"machine": "h100", "rows": rows}}}})
    assert "In no program is a layout written by hand" in page
    assert "does not lower: a batch of 4" in page
