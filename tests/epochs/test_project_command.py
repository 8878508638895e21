"""`python -m pase_mtf.epochs`: wrong inputs end in one line and an exit code; a prediction from end to end."""

import dataclasses
import json
import subprocess
import sys

import pytest
from small_graphs import perceptron

from pase_mtf.epochs.predict import predict_steps, with_workers
from pase_mtf.epochs.step_times import StepTimes
from pase_mtf.errors import UsageError
from pase_mtf.graph.configurations import Configuration
from pase_mtf.launch.epochs import project_command
from pase_mtf.launch.epochs.command import main
from pase_mtf.machine.machine import Machine
from pase_mtf.strategy.find import find_strategy


@pytest.fixture
def curve(tmp_path):
    path = tmp_path / "curve.csv"
    path.write_text("batch,epochs\n16,2\n64,3\n")
    return path


def test_a_curve_of_one_batch_has_no_slope(tmp_path, capsys):
    (tmp_path / "curve.csv").write_text("batch,epochs\n16,2\n")
    (tmp_path / "steps.csv").write_text("workers,ways,seconds\n1,1,1\n")
    flags = ["project", f"--curve={tmp_path}/curve.csv", f"--steps={tmp_path}/steps.csv", "--worker_batch=16"]
    assert main([*flags, "--devices=1", "--extrapolate"]) == 2
    assert "a slope takes two" in capsys.readouterr().err
    assert main([*flags, "--devices=1"]) == 0


@pytest.mark.parametrize(("flags", "message"), [
    ([], "command"), (["measre"], "invalid choice"), (["project"], "--curve"),
    (["project", "--curve=none.csv", "--steps=s.csv"], "cannot read none.csv"),
    (["project", "--curve={curve}"], "--steps"), (["project", "--curve={curve}", "--devices=0"], "goes up from"),
    (["project", "--curve={curve}", "--devices=4-2"], "goes up from"),
    (["project", "--curve={curve}", "--devices=x"], "no number"),
    (["project", "--curve={curve}", f"--devices=1{400 * '0'}"], "goes up from"),
    (["project", "--curve={curve}", f"--worker_batch=1{400 * '0'}"], "is above"),
    (["project", "--curve={curve}", "--steps={curve}"], "--worker_batch"),
    (["project", "--curve={curve}", "--steps={curve}", "--worker_batch=8"], "workers,ways,seconds"),
    (["project", "--curve={curve}", "--model=alexnet", "--machine=h1000"], "h1000"),
    (["project", "--curve={curve}", "--model=alexnot"], "alexnot"),
    (["project", "--curve={curve}", "--model=alexnet", "--steps={curve}"], "leave one out"),
    (["project", "--curve={curve}", "--run=nowhere"], "--worker_batch"),
    (["project", "--curve={curve}", "--run=nowhere", "--worker_batch=8"], "nowhere"),
    (["project", "--curve={curve}", "--plot=x.gif"], "gif"),
    (["project", "--curve={curve}", "--run=", "--worker_batch=8"], "--run is empty; name a folder, or leave"),
    (["project", "--curve={curve}", "--model=alexnet", "--steps="], "--steps is empty"),
    (["project", "--curve={curve}", "--steps={curve}", "--model="], "--model is empty"),
    (["project", "--curve={curve}", "--model=alexnet", "--machine="], "--machine is empty; name one or a file, or"),
    (["project", "--curve={curve}", "--json=no/x.json"], "no folder"),
    (["project", "--curve={curve}", "--json={curve}"], "is read for --curve"),
    (["project", "--curve={curve}", "--batch=64"], "unrecognized arguments: --batch=64"),
    (["project", "--curve={curve}", "--batch_scale=-1"], "not above 0"),
    (["project", "--curve={curve}", "--batch_scale=1e308"], "factor"),
    (["measure", "--model=alexnet", "--output=x.csv"], "--target"),
    (["measure", "--model=alexnet", "--output=x.csv", "--target=1", "--seeds=a"], "whole numbers"),
    (["measure", "--model=alexnet", "--output=no/x.csv", "--target=1"], "no folder"),
    (["measure", "--model=alexnet", "--output=x.csv", "--target=1", "--data=nowhere"], "nowhere"),
    (["measure", "--model=alexnet", "--output=x.csv", "--target=1", "--rule=cubic"], "cubic")])
def test_wrong_inputs_are_one_line(curve, tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert main([flag.format(curve=curve) for flag in flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_help_loads_neither_tensorflow_nor_matplotlib():
    code = ("import sys\nfrom pase_mtf.launch.epochs.command import main\n"
            "try:\n    main(['project', '--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
            "assert not {'tensorflow', 'matplotlib', 'numba'} & set(sys.modules)")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "--curve" in run.stdout


def test_workers_repeat_the_strategy_of_one():
    graph = perceptron((8, 8), batch=32)
    with_batch = next(layer for layer in graph.layers if "batch" in layer.splittable and len(layer.splittable) > 1)
    other = next(name for name in with_batch.splittable if name != "batch")
    for axes, expected in (((("batch", 2),), (("batch", 8),)), (((other, 2),), (("batch", 4), (other, 2))),
                           (((other, 2), ("batch", 2)), (("batch", 8), (other, 2))), ((), (("batch", 4),))):
        one = [Configuration(axes if layer is with_batch else ()) for layer in graph.layers]
        many = dict(zip([layer.name for layer in graph.layers], with_workers(graph, one, 4), strict=True))
        assert many[with_batch.name].axes == expected
        assert with_workers(graph, one, 1) == tuple(one)
    for layer in graph.layers:
        assert many[layer.name].axes == ((("batch" if "batch" in layer.splittable else ""), 4),)


def test_predicted_steps_are_those_of_whole_strategies():
    machine = Machine.load("h100")
    mixes = [(1, 1), (4, 1), (1, 2), (2, 2)]
    steps = predict_steps(lambda batch: perceptron((64, 64), batch=batch), 16, mixes, machine)
    alone = find_strategy(perceptron((64, 64), batch=64), 4, machine, method="data_parallel")
    assert steps.seconds[4, 1] == pytest.approx(alone.seconds)
    assert steps.seconds[1, 2] == pytest.approx(
        find_strategy(perceptron((64, 64), batch=16), 2, machine, simulate=0).seconds)
    assert set(steps.seconds) == set(mixes)
    with pytest.raises(UsageError, match="devices"):
        predict_steps(lambda batch: perceptron((64, 64), batch=batch), 16, [(1 << 30, 1)], machine)


def test_a_model_is_priced_on_a_machine(curve, tmp_path, capsys):
    preset, kept = tmp_path / "micro.json", tmp_path / "steps.json"
    preset.write_text(json.dumps({
        "preset": "tiny", "image": 12, "fully_connected": [32], "batch": 16,
        "convolutions": [{"channels": 8, "kernel": 3, "stride": 2, "pool": 2}]}))
    flags = ["project", f"--curve={curve}", "--devices=1,2,4", "--ways=2", "--machine=h100"]
    assert main([*flags, "--model=alexnet", f"--preset={preset}", f"--save_steps={kept}", "--examples=60000"]) == 0
    out = capsys.readouterr().out
    assert "predicted for h100, 16 examples to a worker" in out
    assert "hours on" in out
    assert StepTimes.load(kept).worker_batch == 16
    assert main([*flags, f"--steps={kept}"]) == 0  # the same, from the file
    assert capsys.readouterr().out.splitlines()[2:6] == out.splitlines()[2:6]


@pytest.mark.parametrize(("flags", "says"), [
    (["--json={curve}"], "is read for --curve"), (["--save_steps={steps}"], "is read for --steps"),
    (["--json=same.svg", "--plot=same.svg"], "--plot=same.svg is the file of --json as well"),
    (["--json=same.json", "--save_steps=./same.json"], "is the file of --json as well"), (["--json=."], "is a folder"),
    (["--json={run}/summary.json", "--run={run}"], "is read for --run")])
def test_what_is_read_is_never_replaced(curve, tmp_path, monkeypatch, capsys, flags, says):
    """Nor does one of two outputs get lost, whatever may be overwritten."""
    monkeypatch.chdir(tmp_path)
    steps, run = tmp_path / "steps.csv", tmp_path / "run"
    steps.write_text("workers,ways,seconds\n1,1,1\n2,1,1\n4,1,1\n")
    run.mkdir()
    (run / "summary.json").write_text("{}")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    given = [flag.format(curve=curve, steps=steps, run=run) for flag in flags]
    assert main(["project", f"--curve={curve}", f"--steps={steps}", "--worker_batch=8", "--overwrite", *given]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_what_was_found_is_printed_though_it_cannot_be_written(curve, tmp_path, monkeypatch, capsys):
    def write(path, data):
        raise UsageError(f"cannot write {path}: No space left on device; free space or choose another place")
    monkeypatch.setattr(project_command, "write_atomically", write)
    steps = tmp_path / "steps.csv"
    steps.write_text("workers,ways,seconds\n1,1,1\n2,1,1\n4,1,1\n")
    assert main(["project", f"--curve={curve}", f"--steps={steps}", "--worker_batch=16", "--devices=1,2,4",
                 f"--json={tmp_path / 'mixes.json'}"]) == 2
    out, err = capsys.readouterr()
    assert "16 examples to a worker" in out
    assert "No space left on device" in err
    assert err.count("\n") == 1


def test_a_machine_of_fewer_devices_is_told_before_anything_is_priced(curve, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(project_command, "graph_exporter", lambda *_: pytest.fail("prices the smaller ones"))
    machine = Machine.load("h100")
    dataclasses.replace(machine, links=machine.links[:1]).save(tmp_path / "mine.json")
    assert main(["project", f"--curve={curve}", "--model=alexnet", f"--machine={tmp_path}/mine.json"]) == 2
    assert "64 devices: machine 'h100' links at most 8" in capsys.readouterr().err


def test_a_home_folder_is_found_behind_an_equals_sign(curve, tmp_path, monkeypatch):
    (tmp_path / "steps.csv").write_text("workers,ways,seconds\n1,1,1\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    flags = ["project", "--curve=~/curve.csv", "--steps=~/steps.csv", "--worker_batch=16", "--devices=1"]
    assert main([*flags, "--json=~/mixes.json"]) == 0
    assert json.loads((tmp_path / "mixes.json").read_text())["format"] == "pase_mtf.projection"


@pytest.mark.parametrize(("epochs", "seconds"), [("1e-320", "1e-3"), ("1e300", "1e300"), ("2", "1e-320")])
def test_amounts_whose_products_are_no_numbers(tmp_path, capsys, epochs, seconds):
    curve, steps = tmp_path / "curve.csv", tmp_path / "steps.csv"
    curve.write_text(f"batch,epochs\n16,{epochs}\n32,{epochs}\n")
    steps.write_text("workers,ways,seconds\n" + "".join(f"{mix},{seconds}\n" for mix in ("1,1", "2,1", "1,2")))
    assert main(["project", f"--curve={curve}", f"--steps={steps}", "--worker_batch=16", "--devices=1,2",
                 "--ways=1,2"]) == 2
    error = capsys.readouterr().err
    assert "line 2" in error
    assert error.count("\n") == 1
