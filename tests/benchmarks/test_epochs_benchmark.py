"""The page on time to a trained model: curves as they were measured, projections, pictures."""

import json

import pytest
from markdown_cells import rows

from benchmarks import epochs, epochs_document, epochs_plot
from pase_mtf.errors import FormatError

_SETTINGS = {"data": "made up", "sizes": {"preset": "micro.json", "optimizer": "sgd"}, "examples": 64, "held_out": 16,
             "target": 1.0, "rate": 0.1, "rate_batch": 8, "rule": "sqrt", "warmup": 0.5, "cap": 9.0, "piece": 8}


@pytest.fixture
def results():
    """As of a benchmark whose workers cost each other nothing, and whose epochs double with every batch."""
    seconds = [[workers, ways, 0.1 / (1.0 if ways == 1 else 0.75 * ways)] for workers, ways in epochs_document.MIXES]
    runs = [[batch, seed, 2.0 * batch / 16 + 0.5 * seed, 1] for batch in (16, 32, 64) for seed in (0, 1, 2)]
    facts = {"machine": "Chip", "versions": "Python", "commit": "abc"}
    curve = {"settings": _SETTINGS, "runs": runs, "facts": facts}
    return {"facts": facts, "curves": dict.fromkeys(epochs_document.CURVES, curve),
            "steps": [{"model": "gnmt", "machine": "h100", "worker_batch": 8, "fits": True, "seconds": seconds}]}


def test_the_page_has_curves_and_projections(results):
    text = epochs_document.document(results)
    table = rows(text)
    assert ["16", "2.50", "2.00 to 3.00", "1.00", "1.000", "3 of 3"] in table
    assert ["64", "8.50", "8.00 to 9.00", "3.40", "0.850", "3 of 3"] in table
    # The curve's batch 16 becomes that of 1 worker (8 examples), or of 8: on so few devices nothing is known then.
    projection = epochs_document.projection_of(results, results["steps"][0], 1)
    assert projection.curve.batches == (8, 16, 32)
    first, second = projection.points[:2]
    assert first.data_parallel.epochs.median == 2.5
    assert second.gain.value == pytest.approx(1.5 * 4.5 / 2.5 / 2)
    beyond = epochs_document.projection_of(results, results["steps"][0], 8)
    assert beyond.points[0].best is None
    assert f"ahead from {projection.hybrid_from} devices on" in text
    assert f"and from {beyond.hybrid_from} where it is that of eight" in text


def test_curves_keep_where_they_were_measured(tmp_path):
    paths = {name: tmp_path / f"{name}.csv" for name in ("alexnet", "transformer")}
    for path in paths.values():
        path.write_text(f"# {json.dumps(_SETTINGS)}\nbatch,seed,epochs,reached\n16,0,2.0,1\n")
    first = epochs_document.curves_of(paths, {}, {"commit": "first"})
    assert [curve["facts"]["commit"] for curve in first.values()] == ["first", "first"]
    with paths["transformer"].open("a") as file:
        file.write("32,0,3.0,1\n")
    second = epochs_document.curves_of(paths, json.loads(json.dumps(first)), {"commit": "second"})
    assert [curve["facts"]["commit"] for curve in second.values()] == ["first", "second"]


def test_workers_that_cost_nothing(results):
    results["steps"][0]["seconds"] = [[workers, ways, seconds * workers] for workers, ways, seconds
                                      in results["steps"][0]["seconds"]]
    free = epochs_document.projection_of(results, results["steps"][0], 1, free=True)
    assert {mix.step.seconds for point in free.points for mix in point.mixes if mix.ways == 1} == {0.1}


def test_pictures_are_drawn(results, tmp_path):
    epochs_plot.draw_page(results, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epochs-gnmt.svg", "epochs.svg"]


def test_files_of_the_benchmark(results, tmp_path):
    path = tmp_path / "epochs.json"
    assert epochs.load(path)["steps"] == []
    path.write_text(json.dumps({"format": epochs.FORMAT, "version": epochs.VERSION, **results}))
    assert epochs.load(path)["steps"] == results["steps"]
    path.write_text("{}")
    with pytest.raises(FormatError):
        epochs.load(path)
