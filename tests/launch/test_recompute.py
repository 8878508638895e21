"""Runs some of whose blocks are computed again in the backward pass."""

import json
import math

import pytest

from pase_mtf.launch.summary import read_summary

_FLAGS = ("--search_only", "--compare=none", "--batch=64", "--mesh=1")  # of one strategy each


def _losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _need(folder):
    return sum(json.loads((folder / "strategy.json").read_text())["memory"].values())


@pytest.mark.slow
def test_losses_are_those_without_and_a_run_is_resumed_with_another_choice(launch):
    runs = {}
    for value in ("none", "conv1"):
        code, runs[value], out, err = launch(f"--recompute={value}", "--compare=none", "--steps=2", output=value)
        assert code == 0, err
    assert "in the backward pass: conv1" in out
    assert _losses(runs["conv1"]) == pytest.approx(_losses(runs["none"]), rel=1e-5)
    for folder, value in ((runs["none"], "all"), (runs["conv1"], "none")):
        code, _, _, err = launch(f"--resume={folder}", f"--recompute={value}", "--compare=none", "--steps=1",
                                 output=f"resumed-{value}")
        assert code == 0, err
    code, folder, _, err = launch(f"--resume={runs['conv1']}", "--compare=none", "--steps=1", output="inherited")
    assert code == 0, err
    assert json.loads((folder / "config.json").read_text())["options"]["recompute"] == "conv1"


@pytest.mark.slow
def test_auto_computes_again_what_the_limit_asks_for_and_nothing_otherwise(launch):
    need = {}
    for value in ("none", "all"):
        code, folder, _, err = launch(*_FLAGS, f"--recompute={value}", output=value)
        assert code == 0, err
        need[value] = _need(folder)
    assert need["all"] < need["none"]
    for limit, blocks in ((need["none"], []), ((need["none"] + need["all"]) / 2, ["conv1"])):
        code, folder, out, err = launch(*_FLAGS, "--recompute=auto", f"--memory_limit={math.ceil(limit)}",
                                        output=f"auto{len(blocks)}")
        assert code == 0, err
        assert "computed again: " in out
        found = read_summary(folder / "summary.json")["fitting"]
        assert (found["blocks"], found["of"], found["gap"]) == (blocks, 1, 0.0)
        assert json.loads((folder / "config.json").read_text())["options"]["recompute"] == (",".join(blocks) or "none")
        assert _need(folder) <= math.ceil(limit)
        assert "proven to be the fastest" in (folder / "report.html").read_text()
    code, _, _, err = launch(*_FLAGS, "--recompute=auto", "--memory_limit=1kB", output="nothing")
    assert code == 3
    assert "--recompute=auto: no strategy keeps to" in err.splitlines()[-1]


def test_auto_of_both_takes_fewer_microbatches(launch):
    code, folder, _, err = launch(*_FLAGS, "--recompute=all", output="all")
    assert code == 0, err
    limit = f"--memory_limit={math.ceil(_need(folder))}"
    counts = []
    for value in ("auto", "none"):
        code, folder, _, err = launch(*_FLAGS, limit, "--microbatches=auto", f"--recompute={value}", output=value)
        assert code == 0, err
        counts.append(int(json.loads((folder / "config.json").read_text())["options"]["microbatches"]))
    assert counts[0] == 1 < counts[1]


def test_a_strategy_is_refused_with_the_flag_that_is_missing(launch):
    code, folder, _, err = launch("--search_only", "--compare=none", "--recompute=conv1")
    assert code == 0, err
    code, _, _, err = launch("--search_only", "--compare=none", f"--strategy={folder}/strategy.json", output="other")
    assert code == 5
    assert "is for a run with --recompute=all" in err.splitlines()[-1]


@pytest.mark.parametrize(("value", "message"), [
    ("", "--recompute=: give none, all, auto, or names of blocks"),
    ("conv1,auto", "--recompute=conv1,auto: give none, all, auto, or names")])
def test_what_cannot_be_meant_is_refused_before_anything_is_loaded(launch, value, message):
    code, folder, _, err = launch(f"--recompute={value}", "--print_config")
    assert code == 2
    assert message in err.splitlines()[-1]
    assert not folder.exists()


def test_a_block_that_is_not_there_is_refused(launch):
    code, _, _, err = launch("--search_only", "--compare=none", "--recompute=conv9")
    assert code == 2
    assert "recompute=conv9: alexnet has no such block; did you mean 'conv1'?" in err.splitlines()[-1]
