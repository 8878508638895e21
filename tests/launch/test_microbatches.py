"""Runs whose batch is computed in microbatches."""

import collections
import json

import pytest

from pase_mtf.errors import UsageError
from pase_mtf.launch import execution
from pase_mtf.machine.references import REFERENCES


def _summary(folder):
    return json.loads((folder / "summary.json").read_text())


def test_a_run_in_microbatches_has_the_losses_of_one_without(launch):
    losses = []
    for count, folder in ((1, "whole"), (4, "pieces")):
        code, folder, out, err = launch(f"--microbatches={count}", "--compare=data_parallel", "--steps=2",
                                        output=folder)
        assert code == 0, err
        losses.append([json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()
                       if json.loads(line)["arm"] == "search"])
    assert "in 4 microbatches" in out
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.slow
def test_a_run_is_resumed_in_other_microbatches(launch, finished):
    code, folder, _, err = launch(f"--resume={finished}", "--microbatches=2", "--compare=none", "--steps=1")
    assert code == 0, err
    code, _, _, err = launch(f"--resume={folder}", "--microbatches=8", "--compare=none", "--steps=1", output="again")
    assert code == 0, err


@pytest.mark.slow
def test_dropout_draws_other_masks_in_other_microbatches(launch, tmp_path):
    """So that losses are others, too, and say nothing of the data."""
    sizes = tmp_path / "sizes.json"
    sizes.write_text(json.dumps({"preset": "tiny", "dropout": 0.5, "fully_connected": [64, 32], "batch": 16}))
    code, folder, _, err = launch(f"--preset={sizes}", "--batch=16", "--compare=none", "--steps=2", "--warmup=1",
                                  output="first")
    assert code == 0, err
    code, _, _, err = launch(f"--resume={folder}", "--microbatches=2", "--compare=none", "--steps=2", output="second")
    assert code == 0, err


@pytest.mark.slow
def test_auto_takes_as_few_as_fit(launch):
    flags = ("--search_only", "--compare=none", "--batch=64", "--mesh=1")  # of one strategy each
    need = []
    for count in (1, 2, 4):
        code, folder, _, err = launch(*flags, f"--microbatches={count}", output=f"run{count}")
        assert code == 0, err
        need.append(json.loads((folder / "strategy.json").read_text())["memory"])
    need = [sum(parts.values()) for parts in need]
    limit = (need[1] + need[2]) / 2
    assert need[2] < limit < need[1] < need[0]
    code, folder, _, err = launch(*flags, "--microbatches=auto", f"--memory_limit={int(limit)}", output="auto")
    assert code == 0, err
    chosen = int(json.loads((folder / "config.json").read_text())["options"]["microbatches"])
    assert chosen == 4
    code, _, _, err = launch("--search_only", "--compare=none", "--batch=8", "--mesh=4", "--strategy=data_parallel",
                             "--microbatches=auto", "--memory_limit=1kB", output="parallel")
    assert code == 3
    assert "in up to 2 microbatches" in err.splitlines()[-1]
    code, _, _, err = launch(*flags, "--microbatches=auto", "--memory_limit=1kB", output="none")
    assert code == 3
    assert "--microbatches=auto: no strategy keeps to" in err.splitlines()[-1]


def test_of_a_pipeline_the_number_is_found_where_none_is_given(launch):
    """`auto`, which the others take, would be refused as well."""
    for value, message in (("3", "does not split so; take --microbatches=2, or leave it out"),
                           ("x", "give a number that divides the batch, or leave it out")):
        code, _, _, err = launch("--strategy=pipeline", f"--microbatches={value}", "--print_config")
        assert code == 2
        assert err.splitlines()[-1].endswith(message)
    assert launch("--strategy=pipeline", "--print_config")[0] == 0


@pytest.mark.parametrize(("value", "message"), [
    ("0", "--microbatches=0: give a number that divides the batch, or auto"), ("two", "--microbatches=two: give"),
    ("3", "--microbatches=3: a batch of 8 does not split so; take --microbatches=2, or auto"),
    ("2147483647", "a batch of 8 does not split so; take --microbatches=8")])
def test_what_does_not_split_is_refused(launch, value, message):
    """Before TensorFlow is loaded, or processes are started."""
    code, folder, _, err = launch(f"--microbatches={value}", "--print_config")
    assert code == 2
    assert message in err.splitlines()[-1]
    assert not folder.exists()


def test_reference_kernels_are_timed_once_whatever_the_memory_decides(launch, cache_dir, timed_kernels, monkeypatch):
    """In other microbatches it is another program, of the same devices."""
    def enough(*_):
        raise UsageError("that was asked for")

    monkeypatch.setattr(execution, "_within_memory", lambda plan, machine: (plan.in_microbatches(2), None))
    monkeypatch.setattr(execution, "check_files", enough)  # which is called when all is priced
    code, _, _, err = launch("--machine=local", "--prices=measured", "--recalibrate", "--microbatches=auto",
                             "--compare=none", "--search_only")
    assert code == 2
    assert err.splitlines()[-1] == "error: that was asked for"
    assert sorted(collections.Counter(timed_kernels).values()) == [1] * len(REFERENCES)
