import argparse
import dataclasses
import json

import pytest
from small_graphs import perceptron

from benchmarks import paper, paper_document, paper_numbers, paper_plot, paper_strategies
from benchmarks.paper_numbers import Row
from pase_mtf.errors import UsageError
from pase_mtf.graph.computation_graph import ComputationGraph, Layer, LayerOperation, Operand, Variable
from pase_mtf.graph.configurations import Configuration


def _layer(name, kind="matmul", **dims):
    return Layer(name, kind, dims, tuple(dims), (), ())


def _convolution(name, out, in_):
    x, w, y = Operand(("batch", in_), (128, 64)), Operand((in_, out), (64, 32)), Operand(("batch", out), (128, 32))
    operation = LayerOperation(0, name, "Conv2dOperation", "forward", "convolution", 1.0, ("batch", out, in_), (x, w),
                               (y,), (in_,))
    return Layer(name, "convolution", {"batch": 128, out: 32, in_: 64}, ("batch", out, in_), (operation,),
                 (Variable("w", w, True),))


@pytest.mark.parametrize(("model", "layers", "rows"), [
    ("alexnet",
     [_layer("conv1/conv", batch=128, conv1=96), _layer("conv5/conv", batch=128, conv5=256, conv4=384),
      _layer("fc2/product", batch=128, fc2=4096, fc1=4096), _layer("loss/chosen", batch=128, classes=1000)],
     [Row("conv 1-4", (("batch", 32),)), Row("conv 5", (("batch", 16), ("conv4", 2))),
      Row("fc 2", (("fc2", 8), ("fc1", 4))), Row("softmax", (("classes", 4),))]),
    ("inception_v3",
     [_convolution("stem1/conv", "stem1", "image_channels"), _convolution("mixed9/one_1/conv", "inner1", "mixed"),
      _convolution("mixed10/one_1/conv", "branch", "mixed"), _layer("mixed10/concat", "pointwise", batch=128),
      _layer("mixed1/one_1/norm/reduce", "normalize", batch=128), _layer("classifier/product", batch=128, classes=9)],
     [Row("modules A-D", (("batch", 32),)), Row("modules A-D", (("batch", 32),)),
      Row("module E", (("batch", 16), ("branch", 2))), Row(), Row(), Row("fc", (("classes", 2), ("mixed", 16)))]),
    ("rnnlm",
     [_layer("embedding/einsum", batch=64, vocab=512), _layer("lstm/gates", layers=2, batch=64, units=8, inputs=8),
      _layer("output/logits", batch=64, vocab=512), _layer("loss/chosen", batch=64, vocab=512)],
     [Row("embedding", (("vocab", 32),)), Row("LSTM", (("layers", 2), ("batch", 4), ("units", 2), ("inputs", 2))),
      Row("fc", (("vocab", 32),)), Row()]),
    ("transformer",
     [_layer("source_embedding/einsum", batch=64, vocab=512), _layer("encoder1/attention/q", batch=64, heads=8),
      _layer("encoder1/feed_forward/in", batch=64, d_ff=64), _layer("encoder_norm/reduce", batch=64, d_model=64),
      _layer("output/logits", batch=64, vocab=512)],
     [Row("embedding", (("vocab", 16),)), Row("attention", (("batch", 16), ("heads", 2))),
      Row("feed forward", (("batch", 16), ("d_ff", 2))), Row(), Row("fc", (("vocab", 16),))])])
def test_the_papers_rows_in_our_dims(model, layers, rows):
    found = paper_numbers.paper_rows(model, ComputationGraph(model, tuple(layers), (), 4))
    assert list(found) == rows
    # The splits are the numbers of the table, whatever the dims are called; the parts of 1 are left out.
    for row in found:
        if row.name:
            printed = paper_numbers.TABLE_2[model][row.name][1].split(",")
            assert sorted(parts for _, parts in row.splits) == sorted(int(parts) for parts in printed if parts != "1")


def test_no_row_for_other_models():
    with pytest.raises(UsageError, match="'gnmt'; take one of alexnet"):
        paper_numbers.paper_rows("gnmt", perceptron())


def test_orders_of_axes_idle_or_with_copies():
    found = paper_strategies.orders((("batch", 4), ("width", 2)), 32)
    assert len(found) == 2 + 6
    assert {configuration.devices for configuration in found} == {8, 32}
    assert {tuple(sorted(configuration.splits.items())) for configuration in found} == {(("batch", 4), ("width", 2))}
    assert paper_strategies.orders((("batch", 32),), 32) == (Configuration((("batch", 32),)),)


def _rows(model, graph):
    """Data parallelism for the first layer, nothing about the others."""
    return (Row("first", (("batch", 32),)), *(Row() for _ in graph.layers[1:]))


def test_ours_is_never_dearer_and_every_difference_is_priced(monkeypatch):
    monkeypatch.setattr(paper_numbers, "paper_rows", _rows)
    graph = perceptron([64, 256, 64, 256])
    found = paper_strategies.compare("net", graph)
    assert found["optimal"]
    assert found["ours"] <= found["theirs"]
    assert sum(found["ours_parts"].values()) == pytest.approx(found["ours"])
    row, = found["rows"]
    # All that the paper says is in this one row: taking it makes the paper's strategy.
    assert found["ours"] + row["price"] == pytest.approx(found["theirs"])
    assert sum(row["parts"].values()) == pytest.approx(row["price"])
    assert (row["same"] == 1) == (row["ours"][0][0] == "batch:32")
    assert found["seconds"]["best"] <= min(found["seconds"]["ours"], found["seconds"]["theirs"])
    assert all(ratio >= 1 - 1e-12 for ratio in found["ratios"].values())


@pytest.mark.slow
def test_sections_and_document(monkeypatch, tmp_path):
    graph = perceptron()
    monkeypatch.setattr(paper, "DEVICES", (4, 8))
    monkeypatch.setattr(paper_document, "DEVICES", (4, 8))
    monkeypatch.setattr(paper, "MANY_DEVICES", (32,))
    monkeypatch.setattr(paper, "_PROPOSALS", 20000)
    monkeypatch.setattr(paper_numbers, "paper_rows", _rows)
    table = {"first": ("b n c", "32,1,1")}
    monkeypatch.setitem(paper_numbers.TABLE_2, "alexnet", table)
    found = {"facts": {"processor": "Chip", "python": "3"},
             **{section: {"alexnet": make(graph, "alexnet", 60)} for section, make in paper.SECTIONS.items()
                if section != "workers"},
             "workers": {"gnmt": paper.workers(graph, "gnmt", 60)}}
    for row in found["times"]["alexnet"].values():
        for race in (row, row["paper_space"], row.get("instance", row)):
            # The paper's own search finds the same optimum.
            assert race["optimal"]
            assert race["pase"]["cost"] == pytest.approx(race["cost"])
        # The paper's networks come in one order of axes, and may leave devices idle.
        assert row["paper_space"]["most"] < row["most"]
    assert found["times"]["alexnet"]["8"]["instance"]["cost"] == pytest.approx(97098296512)
    for by_devices in (*found["speedups"]["alexnet"].values(), *found["scale"]["alexnet"].values()):
        for row in by_devices.values():
            assert row["ours"]["speedup"] >= max(row[arm]["speedup"] for arm in ("data parallel", "expert", "FlexFlow"))
    assert found["workers"]["gnmt"]["1"]["speedup"] == 1
    text = paper_document.document(json.loads(json.dumps(found)))
    for heading in ("Table I", "Table II", "Figure 6", "At scale", "Hybrid"):
        assert heading in text
    assert "behind another strategy in 0" in text
    for section, machine in (("speedups", "1080ti"), ("scale", "h100")):
        paper_plot.plot_speedups(found[section], machine, str(tmp_path / f"{machine}.svg"))
        assert (tmp_path / f"{machine}.svg").stat().st_size > 1000


def test_a_strategy_that_does_not_fit_is_marked():
    row = {"ours": {"speedup": 2.0, "seconds": 0.5, "fits": False}, "expert": {"speedup": 1.5, "seconds": 0.7}}
    assert paper_document._speedup(row, "ours") == "2.00†"
    assert paper_document._speedup(row, "expert") == "1.50"
    assert paper_document._speedup(row, "FlexFlow") == "–"


@pytest.mark.slow
def test_what_is_known_is_kept(monkeypatch, tmp_path, capsys):
    calls = []

    def section(graph, model, limit):
        calls.append(model)
        return {"1": {"seconds": 1.0, "speedup": 1.0, "optimal": True}}

    graph = dataclasses.replace(perceptron(), name="net")
    for model in ("gnmt", "biglstm"):
        graph.save(tmp_path / f"{model}-big-64.json")
    monkeypatch.setattr(paper, "SECTIONS", {"workers": section})
    flags = [f"--graphs={tmp_path}", f"--output={tmp_path}", "--missing"]
    assert paper.main(["--models=biglstm", *flags]) == 0
    assert paper.main(["--models=gnmt,biglstm", *flags]) == 0
    assert calls == ["biglstm", "gnmt"]
    assert list(json.loads((tmp_path / "paper.json").read_text())["workers"]) == ["gnmt", "biglstm"]
    with pytest.raises(SystemExit):
        paper.main(["--models=vgg", *flags])
    assert "unknown 'vgg'; choose from alexnet" in capsys.readouterr().err


def test_models_that_are_timed_elsewhere_say_nothing_of_the_others(monkeypatch, tmp_path):
    monkeypatch.setattr(paper, "Workshop", lambda folder: argparse.Namespace(graph=lambda *given: ""))
    monkeypatch.setattr(paper, "ComputationGraph", argparse.Namespace(load=lambda path: None))
    monkeypatch.setattr(paper, "SECTIONS", {"times": lambda graph, model, limit: {}})
    monkeypatch.setitem(paper.document.__globals__, "_times", lambda found: "")
    for machine, model in (("Old", "alexnet"), ("New", "gnmt")):
        monkeypatch.setattr(paper, "describe_host", lambda machine=machine: machine)
        assert paper.main([f"--models={model}", "--missing", f"--output={tmp_path}"]) == 0
    page = (tmp_path / "paper.md").read_text(encoding="utf-8")
    told = page.partition("Table I was timed on ")[2].partition("; all else")[0]
    assert [part[:3] for part in told.split(" / ")] == ["Old", "New"]
    assert "(alexnet)" in told
    assert told.endswith("(gnmt)")
