"""Step times of the launcher's own runs."""

import json
import re

import pytest

from pase_mtf.errors import FormatError, UsageError
from pase_mtf.launch.epochs.runs import steps_of_runs
from pase_mtf.launch.summary import summary_json


@pytest.fixture
def run(tmp_path):
    """Makes the folder of a run whose arms took so many ms."""
    def make(name, batch, devices, *, model="alexnet", preset="tiny", sizes=None, **arms):
        rows = {arm: {**dict.fromkeys((
            "predicted_ms", "measured_ms_spread", "examples_per_second", "speedup_over_data_parallel",
            "speedup_over_stock", "predicted_bytes", "measured_bytes", "final_loss", "measured_ms_quartiles",
            "same_as")), "measured_ms": ms, "measured_steps": 9} for arm, ms in arms.items()}
        folder = tmp_path / name
        folder.mkdir()
        (folder / "summary.json").write_text(summary_json({
            "status": "done", "model": model, "preset": preset, "batch": batch, "mesh": str(devices),
            "devices": devices, "first_step": 0, "arms": rows, "left_out": {}, "disagreement": None, "note": None,
            "search": None, "nodes": {}, "build_seconds": {}, "memory_method": "none", "facts": {}}))
        if sizes is not None:
            config = {**sizes, "preset": preset, "batch": batch, "seed": batch, "learning_rate": 0.01 * batch}
            (folder / "config.json").write_text(json.dumps(
                {"format": "pase_mtf.run", "version": 1, "options": {"preset": preset}, "model_config": config}))
        return str(folder)
    return make


def test_every_run_is_a_mix(run):
    steps = steps_of_runs([run("one", 8, 1, search=80.0), run("two", 16, 2, search=50.0, data_parallel=90.0),
                           run("ways", 8, 2, search=60.0, data_parallel=70.0), run("both", 16, 4, search=64.0)], 8)
    assert steps.seconds == {(1, 1): 0.08, (2, 1): 0.09, (1, 2): 0.06, (2, 2): 0.064}
    assert steps.worker_batch == 8


@pytest.mark.parametrize(("other", "name"), [
    ({"model": "gnmt"}, "gnmt, preset tiny"), ({"preset": "big"}, "alexnet, preset big")])
def test_runs_of_two_models_or_presets_are_told_apart(run, other, name):
    one, two = run("one", 8, 1, search=1.0), run("two", 16, 2, search=1.0, data_parallel=1.0, **other)
    with pytest.raises(UsageError) as caught:
        steps_of_runs([one, two], 8)
    assert str(caught.value) == (f"--run={two}: its steps are those of {name}, those of {one} of alexnet, preset "
                                 "tiny; leave one out")


def test_files_of_two_names_are_one_preset_where_their_sizes_are(run):
    """A file for every batch, or one under two spellings: what was trained stands in config.json."""
    sizes = {"image": 12, "fully_connected": [32, 16], "optimizer": "sgd"}
    one = run("one", 8, 1, search=80.0, preset="of8.json", sizes=sizes)
    assert set(steps_of_runs([one, run("two", 16, 2, search=1.0, data_parallel=90.0, preset="./of16.json", sizes=sizes),
                              run("ways", 8, 2, search=60.0, preset="of8.json")], 8).seconds) == {
        (1, 1), (2, 1), (1, 2)}  # the last without config.json: by the names
    nameless = run("nameless", 16, 4, search=1.0, preset="./of8.json")
    with pytest.raises(UsageError, match=r"alexnet, preset \./of8\.json"):
        steps_of_runs([one, nameless], 8)


@pytest.mark.parametrize(("changed", "names"), [
    ({"image": 24}, ("image 24", "image 12")), ({"dtype": "bfloat16"}, ("dtype 'bfloat16'", "dtype None"))])
def test_two_files_of_one_name_are_told_apart_by_what_they_held(run, tmp_path, changed, names):
    sizes = {"image": 12, "fully_connected": [32, 16]}
    one = run("one", 8, 1, search=1.0, preset="mine.json", sizes=sizes)
    two = run("two", 16, 2, search=1.0, data_parallel=1.0, preset="mine.json", sizes={**sizes, **changed})
    with pytest.raises(UsageError) as caught:
        steps_of_runs([one, two], 8)
    assert str(caught.value) == (f"--run={two}: its steps are those of alexnet with {names[0]}, those of {one} of "
                                 f"alexnet with {names[1]}; leave one out")
    (tmp_path / "two" / "config.json").write_text("{")
    with pytest.raises(FormatError, match=r"config\.json"):
        steps_of_runs([one, two], 8)


def test_runs_that_tell_no_step(run, tmp_path):
    for folder, message in ((run("odd", 12, 2, search=1.0), "batch of 12 on 2 devices"),
                            (run("small", 4, 2, search=1.0), "batch of 4 on 2 devices"),
                            (run("apart", 16, 3, search=1.0), "batch of 16 on 3 devices"),
                            (run("unmeasured", 8, 2, search=None), "arm 'search' was not measured"),
                            (run("without", 16, 2, search=1.0), "arm 'data_parallel' was not measured")):
        with pytest.raises(UsageError, match=re.escape(message)):
            steps_of_runs([folder], 8)
    for status in ("diverged", "losses disagree"):
        folder = run(status, 8, 1, search=1.0)
        path = tmp_path / status / "summary.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "status": status}))
        with pytest.raises(UsageError, match=f"ended with '{status}'; leave it out"):
            steps_of_runs([folder], 8)
    with pytest.raises(UsageError, match="measured by another run"):
        steps_of_runs([run("a", 8, 1, search=1.0), run("b", 8, 1, search=1.0)], 8)
    with pytest.raises(FormatError, match=r"summary\.json"):
        steps_of_runs([str(tmp_path)], 8)
    (tmp_path / "summary.json").write_text(json.dumps({}))
    with pytest.raises(FormatError):
        steps_of_runs([str(tmp_path)], 8)


def test_a_batch_of_nothing_is_told(run):
    with pytest.raises(UsageError, match="batch of 0 on 2 devices"):
        steps_of_runs([run("nothing", 0, 2, search=1.0)], 8)
