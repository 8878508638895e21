import json

import pytest

from benchmarks.accuracy import agreement, points
from benchmarks.launching import replace_block, run_launcher
from benchmarks.speedup import document, with_earlier


def _row(measured, predicted, same_as=None, **more):
    return {"measured_ms": measured, "measured_ms_spread": 1.4, "predicted_ms": predicted, "same_as": same_as,
            "measured_steps": 30, **more}


@pytest.fixture
def summary():
    return {"model": "alexnet", "preset": "tiny", "batch": 64, "devices": 8, "search": {"seconds": 0.123},
            "facts": {"devices": "8 virtual CPU devices on Chip (2 cores)", "versions": "TensorFlow 9"},
            "arms": {"search": _row(100, 90, speedup_over_stock=5.0, speedup_over_data_parallel=3.5),
                     "stock_data_parallel": _row(500, None), "data_parallel": _row(350, 360),
                     "expert": _row(100, 90, same_as="search")}}


def test_table(summary):
    text = document([{"summary": summary, "data": "pictures"}])
    assert ("| alexnet (tiny, batch 64) | 8 | 500 ± 1 ms | 350 ± 1 ms | 100 ± 1 ms (same) | 100 ± 1 ms | 5.00× | 3.50× "
            "| 4.00× | 0.12 s |") in text
    for word in ("median of 30 steps", "Chip (2 cores)", "TensorFlow 9", "alexnet: pictures"):
        assert word in text


def test_rows_of_an_earlier_run_stay_where_they_are_not_measured_anew(summary, tmp_path):
    def entry(devices, batch, data):
        return {"summary": {**summary, "devices": devices, "batch": batch}, "data": data}

    path = tmp_path / "rows.json"
    path.write_text(json.dumps([entry(16, 64, "old"), entry(8, 32, "old"), entry(8, 64, "old")]))
    rows = with_earlier(str(path), [entry(8, 64, "new")])
    assert [(row["summary"]["devices"], row["summary"]["batch"], row["data"]) for row in rows] == [
        (8, 32, "old"), (8, 64, "new"), (16, 64, "old")]
    assert len(with_earlier(str(tmp_path / "none.json"), rows)) == 3


def test_agreement():
    error, correlation = agreement([1.1, 2.0, 2.4], [1.0, 2.0, 3.0])
    assert error == pytest.approx(0.1)
    assert correlation == pytest.approx(1)
    assert agreement([3, 2, 1], [1, 2, 3])[1] == pytest.approx(-1)


def test_points_leave_out_what_was_not_measured_on_its_own(summary):
    assert points(summary) == {"search": (90, 100), "data_parallel": (360, 350)}


def test_replace_block(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("before\n<!-- speedup -->\nold\n<!-- /speedup -->\nafter\n")
    replace_block(str(path), "speedup", "new\n")
    assert path.read_text() == "before\n<!-- speedup -->\nnew\n<!-- /speedup -->\nafter\n"
    with pytest.raises(ValueError, match="put these two lines"):
        replace_block(str(path), "other", "new")


def test_a_failed_run_says_why():
    with pytest.raises(RuntimeError, match=r"exited with 2: error: --mesh=0"):
        run_launcher(["--model=alexnet", "--mesh=0"])
