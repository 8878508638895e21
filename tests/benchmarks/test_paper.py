import pytest
from small_graphs import perceptron

from benchmarks import paper, paper_document, paper_numbers
from pase_mtf.configurations import Configuration
from pase_mtf.errors import UsageError
from pase_mtf.graph import ComputationGraph, Layer


def _layer(name, **dims):
    return Layer(name, "matmul", dims, tuple(dims), (), ())


def test_the_papers_rows_in_our_dims():
    alexnet = ComputationGraph("alexnet", (
        _layer("conv1/conv", batch=128, conv1=96), _layer("conv5/conv", batch=128, conv5=256, conv4=384),
        _layer("fc2/product", batch=128, fc2=4096, fc1=4096), _layer("loss/chosen", batch=128, classes=1000)), (), 4)
    assert paper_numbers.paper_strategy("alexnet", alexnet) == (
        Configuration((("batch", 32),)), Configuration((("batch", 16), ("conv4", 2))),
        Configuration((("fc2", 8), ("fc1", 4))), Configuration((("classes", 4),)))
    transformer = ComputationGraph("transformer", (
        _layer("embedding", batch=64, vocab=512), _layer("q", batch=64, heads=8), _layer("in", batch=64, d_ff=64),
        _layer("norm", batch=64, d_model=64)), (), 4)
    assert [str(chosen) for chosen in paper_numbers.paper_strategy("transformer", transformer)] == [
        "vocab:16", "batch:16 heads:2", "batch:16 d_ff:2", "batch:16"]
    with pytest.raises(UsageError, match="'rnnlm'; take alexnet"):
        paper_numbers.paper_strategy("rnnlm", transformer)


def test_sections_and_document(monkeypatch, tmp_path):
    graph = perceptron()
    monkeypatch.setattr(paper, "DEVICES", (4, 8))
    monkeypatch.setattr(paper_document, "DEVICES", (4, 8))
    monkeypatch.setattr(paper, "_PROPOSALS", 20000)
    monkeypatch.setattr(paper_numbers, "paper_strategy",
                        lambda model, graph: (Configuration((("batch", 32),)),) * len(graph.layers))
    found = {"facts": {"processor": "Chip", "python": "3"}, "times": {"net": paper.times(graph, "net", 60)},
             "strategies": {"net": paper.strategies(graph, "net", 60)},
             "speedups": {"net": paper.speedups(graph, "net", 60)},
             "scale": {"net": {"32": paper._speedups(graph, "h100", 32)}}}
    for row in found["times"]["net"].values():
        # The paper's own search finds the same optimum.
        assert row["optimal"]
        assert row["pase"]["cost"] == pytest.approx(row["cost"])
    strategies = found["strategies"]["net"]
    assert strategies["ours"] <= strategies["theirs"]
    assert strategies["best_seconds"] <= min(strategies["ours_seconds"], strategies["theirs_seconds"])
    for by_devices in found["speedups"]["net"].values():
        for row in by_devices.values():
            assert row["ours"]["speedup"] >= max(row[arm]["speedup"] for arm in ("data parallel", "expert", "FlexFlow"))
    text = paper_document.document(found)
    for heading in ("Table I", "Table II", "Figure 6", "At scale"):
        assert heading in text
    paper_document.plot_speedups(found["speedups"], "1080ti", str(tmp_path / "plot.svg"))
    assert (tmp_path / "plot.svg").stat().st_size > 1000
