"""python -m pase_mtf.calibration, and searches by what it saved; a clock that tells what it is asked to stands for the
machine's."""

import json
import subprocess
import sys
import time

import pytest

from pase_mtf.calibration.cache import kernels_path
from pase_mtf.launch import __main__ as launcher
from pase_mtf.launch import measuring
from pase_mtf.launch.measuring import main
from pase_mtf.machine.kernel_file import load_times
from pase_mtf.machine.kernel_table import load_tables, table_for
from pase_mtf.machine.references import REFERENCES
from pase_mtf.strategy import warm

_PROGRAM = '''
import mesh_tensorflow as mtf
import tensorflow.compat.v1 as tf

def build_graph():
    print("the program talks")
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    batch, io = mtf.Dimension("batch", 8), mtf.Dimension("io", 16)
    x = mtf.import_tf_tensor(mesh, tf.zeros([8, 16]), mtf.Shape([batch, io]))
    w = mtf.get_variable(mesh, "w", mtf.Shape([io, mtf.Dimension("hidden", 32)]))
    y = mtf.einsum([x, w], mtf.Shape([batch, mtf.Dimension("hidden", 32)]))
    return graph, [mtf.reduce_sum(y)]
'''


@pytest.fixture
def measured(cache_dir, timed_kernels, preset, tmp_path, capsys):
    """A file of the kernels of a model on two devices, and what was said of them."""
    path = tmp_path / "mine.json"
    assert main(["--model=alexnet", f"--preset={preset}", "--mesh=2", f"--save={path}"]) == 0
    return path, *capsys.readouterr()


def test_no_folder_of_runs_is_needed(cache_dir, timed_kernels, preset, tmp_path, monkeypatch):
    (tmp_path / "outputs").write_text("a file of that name")
    monkeypatch.chdir(tmp_path)
    assert main(["--model=alexnet", f"--preset={preset}", "--mesh=2", f"--save={tmp_path / 'mine.json'}"]) == 0


def test_measures_saves_and_goes_on(measured, timed_kernels, preset, capsys):
    path, out, err = measured
    assert "alexnet on 2 devices (1 of 1): round 1: " in err
    said = dict(line.removeprefix("alexnet on 2 devices: ").split(" ", 1) for line in out.splitlines()[:3])
    assert list(said) == ["search", "data_parallel", "expert"]
    assert "kernels of it measured" in said["search"]
    kept = load_times(kernels_path(2))
    assert len(kept) == len(set(timed_kernels)) > 40
    assert f"{len(kept)} kernels of 2 devices; search by them with --machine={path}" in out
    assert dict(table_for(path, 2).items()) == dict(kept.items())
    # Once more: the reference kernels, and nothing else.
    timed_kernels.clear()
    assert main(["--model=alexnet", f"--preset={preset}", "--mesh=2", "--list"]) == 0
    assert set(timed_kernels) == set(REFERENCES)
    out = capsys.readouterr().out
    assert "Conv2DBackpropFilter" in out
    assert "median, us" in out
    # For other devices they are others.
    assert main(["--mesh=2,4", f"--save={path}"]) == 0
    assert [times.on["devices"] for times in load_tables(path)] == [2]


def test_to_compile_is_not_of_its_seconds(cache_dir, timed_kernels, preset, monkeypatch, capsys):
    whole, late = time.monotonic, [0.0]

    def compile_kernels():
        assert not timed_kernels
        late[0] += 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: whole() + late[0])
    monkeypatch.setattr(warm, "_done", [])
    monkeypatch.setattr(warm, "compile_kernels", compile_kernels)
    assert main(["--model=alexnet", f"--preset={preset}", "--mesh=2", "--seconds=900"]) == 0
    assert "alexnet on 2 devices: search " in capsys.readouterr().out
    assert late == [1000.0]


def test_a_launcher_searches_by_the_file(measured, timed_kernels, launch):
    path, _, _ = measured
    arms = "--compare=data_parallel,expert,search,mcmc,mcmc_expert"
    code, local, _, _ = launch("--machine=local", "--prices=measured", "--search_only", arms, output="local")
    assert code == 0
    data = json.loads(path.read_text(encoding="utf-8"))
    data["tables"][0]["on"].update(processor="another processor", host="elsewhere")
    path.write_text(json.dumps(data), encoding="utf-8")
    timed_kernels.clear()
    code, folder, out, err = launch(f"--machine={path}", "--search_only", arms)
    assert code == 0
    assert not timed_kernels
    assert f"kernels: {len(table_for(path, 2))} are known, from {path}; none is measured here" in err
    assert "of another processor" in out
    assert "NOT the devices of this run" in out
    found, expected = (json.loads((run / "summary.json").read_text(encoding="utf-8")) for run in (folder, local))
    for name in ("search", "data_parallel", "expert"):  # what is kept has four digits
        assert found["arms"][name]["predicted_ms"] == pytest.approx(expected["arms"][name]["predicted_ms"], rel=1e-3)
    assert found["arms"]["mcmc"]["predicted_ms"] <= found["arms"]["data_parallel"]["predicted_ms"] * (1 + 1e-9)
    assert found["arms"]["mcmc_expert"]["predicted_ms"] <= found["arms"]["expert"]["predicted_ms"] * (1 + 1e-9)
    assert expected["search"]["kernels"]["rounds"] == 0
    assert "kernels of it measured" in (folder / "report.html").read_text(encoding="utf-8")


def test_what_the_file_does_not_tell_is_estimated_and_said(measured, launch):
    path, _, _ = measured
    data = json.loads(path.read_text(encoding="utf-8"))
    kernels = data["tables"][0]["kernels"]
    data["tables"][0]["kernels"] = [entry for number, entry in enumerate(kernels) if number % 3]
    path.write_text(json.dumps(data), encoding="utf-8")
    code, folder, out, _ = launch(f"--machine={path}", "--search_only")
    assert code == 0
    report = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["search"]["kernels"]
    assert 0 < report["measured_of_strategy"] < report["of_strategy"]
    assert (f"prices: {report['measured_of_strategy']} of {report['of_strategy']} kernels of it measured, the others "
            "estimated") in out
    assert "above the optimum" in out


def test_a_file_of_other_devices(measured, launch, preset):
    path, _, _ = measured
    code, _, out, err = launch(f"--machine={path}", "--mesh=4", "--search_only")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "holds kernels of 2 devices, not of 4" in err
    # The command that it names does that, with a name, and the file has both then.
    told = err[err.index("python -m pase_mtf.calibration ") + 31:err.index("; --graph=MODULE:FUNCTION")].split()
    assert main([flag.replace("NAME", "alexnet") for flag in told] + [f"--preset={preset}"]) == 0
    assert [times.on["devices"] for times in load_tables(path)] == [2, 4]


def _interrupted(whole):
    """Times one batch of kernels; those that tell how fast the machine is are one."""
    def time(self, wanted, seconds, progress):
        for number, batch in enumerate(whole(self, wanted, seconds, progress)):
            if number:
                raise KeyboardInterrupt
            yield batch
    return time


def test_interrupted_it_keeps_what_was_measured(cache_dir, timed_kernels, preset, tmp_path, monkeypatch, capsys):
    from pase_mtf.calibration import kernels
    whole = kernels.KernelTimer.time
    monkeypatch.setattr(kernels.KernelTimer, "time", _interrupted(whole))
    flags = ["--model=alexnet", f"--preset={preset}", "--mesh=2"]
    assert main([*flags, f"--save={tmp_path / 'mine.json'}"]) == 130
    assert "interrupted; what was measured is kept" in capsys.readouterr().err
    before = set(dict(load_times(kernels_path(2)).items()))
    assert len(before) == len(REFERENCES) + 24
    assert set(dict(table_for(tmp_path / "mine.json", 2).items())) == before
    monkeypatch.setattr(kernels.KernelTimer, "time", whole)
    timed_kernels.clear()
    assert main(flags) == 0
    assert not before.intersection(timed_kernels) - set(REFERENCES)


@pytest.fixture
def many_devices(timed_kernels, monkeypatch):
    """Reference kernels take long: three of them within the seconds that they are given, of those that are looked at
    again, and of those that are not known."""
    from pase_mtf.calibration import kernels
    whole, given = kernels.KernelTimer.time, []

    def time(self, wanted, seconds, progress):
        if not set(wanted) <= set(REFERENCES):
            yield from whole(self, wanted, seconds, progress)
        else:
            if not set(wanted) & set(timed_kernels):
                given.append(seconds)
            yield from whole(self, wanted[:3], seconds, progress)
    monkeypatch.setattr(kernels.KernelTimer, "time", time)
    return given


def test_reference_kernels_that_take_long_keep_to_the_seconds(cache_dir, many_devices, timed_kernels, preset, capsys):
    flags = ["--model=alexnet", f"--preset={preset}", "--mesh=2"]
    for count in (3, 6, 9):
        assert main([*flags, "--seconds=1e-9"]) == 0
        out = capsys.readouterr().out
        assert (f"alexnet on 2 devices: not searched, as the time was over when {count} kernels were timed, and not "
                "all reference kernels; give more --seconds, or take fewer devices\n") in out
        assert "search " not in out
        assert len(load_times(kernels_path(2))) == count
    assert len(set(timed_kernels)) == 9
    assert len(timed_kernels) > 9  # what tells how fast the machine is was looked at again
    assert len(many_devices) == 3
    assert all(5.0 <= seconds <= 10.0 for seconds in many_devices)
    assert main([*flags, "--seconds=600"]) == 0
    assert "alexnet on 2 devices: search " in capsys.readouterr().out


def test_interrupted_among_reference_kernels_it_says_what_is_kept(cache_dir, timed_kernels, preset, monkeypatch,
                                                                  capsys):
    from pase_mtf.calibration import kernels
    whole, flags = kernels.KernelTimer.time, ["--model=alexnet", f"--preset={preset}", "--mesh=2"]

    def after_three(self, wanted, seconds, progress):
        yield from whole(self, wanted[:3], seconds, progress)
        raise KeyboardInterrupt

    def interrupted_again(self, wanted, seconds, progress):
        known = set(wanted) <= set(timed_kernels)
        yield from whole(self, wanted, seconds, progress) if known else after_three(self, wanted, seconds, progress)
    monkeypatch.setattr(kernels.KernelTimer, "time", interrupted_again)
    for count in (3, 6, 9):
        assert main(flags) == 130
        assert "interrupted; what was measured is kept, and the same command goes on" in capsys.readouterr().err
        assert len(load_times(kernels_path(2))) == count

    def at_once(self, wanted, seconds, progress):
        raise KeyboardInterrupt
    monkeypatch.setattr(kernels.KernelTimer, "time", at_once)
    assert main(flags) == 130
    assert "interrupted before anything was measured\n" in capsys.readouterr().err

    def nothing(self, wanted, seconds, progress):
        yield from ()
    monkeypatch.setattr(kernels.KernelTimer, "time", nothing)
    assert main([*flags[:-1], "--mesh=4", "--seconds=1"]) == 0
    assert capsys.readouterr().out.endswith("\nno kernels of 4 devices are known\n")


@pytest.fixture
def no_cache(tmp_path, monkeypatch):
    """A place for kernel times that cannot be written to."""
    (tmp_path / "cache").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_what_cannot_be_kept_is_said_and_saved(no_cache, timed_kernels, preset, tmp_path, capsys):
    path = tmp_path / "mine.json"
    assert main(["--model=alexnet", f"--preset={preset}", "--mesh=2", f"--save={path}"]) == 0
    out, err = capsys.readouterr()
    count = len(set(timed_kernels))
    assert err.count("note: what is measured is not kept: cannot write ") == 1
    assert "are kept" not in out
    assert f"{count} kernels of 2 devices are known, {count} of them not kept\n" in out
    assert {kernel for kernel, _ in table_for(path, 2).items()} == set(timed_kernels)


def test_what_cannot_be_kept_is_saved_when_interrupted(no_cache, timed_kernels, preset, tmp_path, monkeypatch, capsys):
    from pase_mtf.calibration import kernels
    path = tmp_path / "mine.json"
    monkeypatch.setattr(kernels.KernelTimer, "time", _interrupted(kernels.KernelTimer.time))
    assert main(["--model=alexnet", f"--preset={preset}", "--mesh=2", f"--save={path}"]) == 130
    count = len(REFERENCES) + 24
    assert len(table_for(path, 2)) == count
    assert f"interrupted; {count} kernels that were measured are not kept\n" in capsys.readouterr().err


def test_interrupted_anew_twice_it_loses_nothing_of_before(cache_dir, timed_kernels, preset, tmp_path, monkeypatch,
                                                           capsys):
    from pase_mtf.calibration import kernels
    flags = ["--model=alexnet", f"--preset={preset}", "--mesh=2", f"--save={tmp_path / 'mine.json'}"]
    assert main(flags) == 0
    whole, saved = kernels_path(2).read_bytes(), (tmp_path / "mine.json").read_bytes()
    monkeypatch.setattr(kernels.KernelTimer, "time", _interrupted(kernels.KernelTimer.time))
    for _ in range(2):
        assert main([*flags, "--recalibrate"]) == 130
        err = capsys.readouterr().err
        assert "the same command without --recalibrate goes on" in err
        assert "mine.json: left as it is, as not all was measured again" in err
        assert (tmp_path / "mine.json").read_bytes() == saved
    assert len(kernels_path(2).read_bytes()) < len(whole)
    assert kernels_path(2).with_name(kernels_path(2).name + ".old").read_bytes() == whole


def test_meshes_of_as_many_devices_are_measured_anew_once(cache_dir, timed_kernels, preset, tmp_path, capsys):
    flags = ["--model=alexnet", f"--preset={preset}", "--mesh=2,rows:2", f"--save={tmp_path / 'mine.json'}"]
    assert main(flags) == 0
    whole = kernels_path(2).read_bytes()
    timed_kernels.clear()
    assert main([*flags, "--recalibrate"]) == 0
    assert kernels_path(2).with_name(kernels_path(2).name + ".old").read_bytes() == whole
    assert len(timed_kernels) == len(set(timed_kernels)) == len(load_times(kernels_path(2)))
    told = f"{len(timed_kernels)} kernels of 2 devices"
    assert f"saved in {tmp_path / 'mine.json'}: {told}; search by them" in capsys.readouterr().out


def test_measured_anew_within_seconds_it_loses_nothing_that_was_saved(measured, timed_kernels, preset, capsys):
    path, _, _ = measured
    saved = path.read_bytes()
    lost = len(table_for(path, 2)) - len(REFERENCES)
    flags = ["--model=alexnet", f"--preset={preset}", "--mesh=2", f"--save={path}", "--seconds=1e-9"]
    # Neither anew, nor where that goes on, as it is told to.
    for more, again, without in ((["--recalibrate"], " again", " without --recalibrate"), ([], "", "")):
        assert main([*flags, *more]) == 0
        out, err = capsys.readouterr()
        assert (f"mine.json: left as it is, as not all was measured{again}, and it holds {lost} kernels of 2 devices "
                f"that were not; the same command{without} goes on from there\n") in err
        assert "saved in" not in out
        assert path.read_bytes() == saved
    assert main(flags[:-1]) == 0
    # How many kernels a search looks at depends on how far it comes: on a machine that does other things, some less.
    assert len(table_for(path, 2)) >= len(REFERENCES) + 0.8 * lost


def test_within_seconds_what_loses_nothing_is_saved(measured, preset, capsys):
    path, _, _ = measured
    flags = ["--model=alexnet", f"--preset={preset}", "--mesh=2", "--seconds=1e-9"]
    for file in (path, path.with_name("new.json")):
        assert main([*flags, f"--save={file}"]) == 0
        assert f"saved in {file}: " in capsys.readouterr().out
        assert dict(table_for(file, 2).items()) == dict(load_times(kernels_path(2)).items())


def test_seconds_are_a_budget(cache_dir, timed_kernels, preset, capsys):
    assert main(["--model=alexnet", f"--preset={preset}", "--mesh=2", "--seconds=1e-9"]) == 0
    assert set(timed_kernels) == set(REFERENCES)
    assert "the others estimated" in capsys.readouterr().out


def test_programs_of_ones_own(cache_dir, timed_kernels, tmp_path, capsys):
    program = tmp_path / "measured_program.py"
    program.write_text(_PROGRAM)
    assert main([f"--graph={program}:build_graph", "--mesh=2"]) == 0
    out = capsys.readouterr().out
    assert "build_graph on 2 devices: search " in out
    assert "the program talks" not in out
    assert len(timed_kernels) > len(REFERENCES)
    assert main([f"--graph={program}:no_graph", "--mesh=2"]) == 2
    assert "has no 'no_graph'" in capsys.readouterr().err


def test_measures_the_program_that_a_run_with_such_flags_has(cache_dir, timed_kernels, preset, capsys):
    flags = ["--dtype=bfloat16", "--microbatches=2", "--sharded_updates"]
    assert main(["--model=alexnet", f"--preset={preset}", "--mesh=2", *flags]) == 0
    assert "alexnet on 2 devices: zero " in capsys.readouterr().out
    assert any(block.dtype == "bfloat16" for kernel in timed_kernels for block in kernel.inputs)


@pytest.mark.parametrize(("flags", "says"), [
    ([], "nothing to measure"), (["--model=alexnett"], "did you mean 'alexnet'?"), (["--modle=alexnet"], "model"),
    (["--model=alexnet", "--mesh=0"], "fewer than one device"), (["--model=alexnet", "--seconds=-1"], "--seconds=-1"),
    (["--model=alexnet", "--seconds=nan"], "--seconds=nan"), (["--recalibrate", "--list"], "names nothing to measure"),
    (["--list", "--seconds=3"], "--seconds: names nothing to measure; add --model or --graph"),
    (["--list", "--mesh=5", "--prove"], "--prove: names nothing to measure"),
    (["--save=mine.json", "--batch=7"], "--batch: names nothing to measure"),
    (["--graph=no.py:build", "--preset=tiny"], "--preset is of models"),
    (["--graph=no.py:build", "--sharded_updates"], "--sharded_updates is of models"),
    (["--model=alexnet", "--recompute=auto"], "--recompute=auto: is for a run; give what it chose"),
    (["--model=alexnet", "--microbatches=auto"], "--microbatches=auto: is for a run; give what it chose"),
    (["--model=alexnet", "--preset=tinny"], "did you mean 'tiny'?"), (["more"], "'more' is no flag"),
    (["--model=alexnet", "--batch=0"], "must be at least 1"), (["--graph=nonsense"], "not module:function"),
    (["--model=alexnet", "--noprove=1"], "--noprove=1 does not take an argument"),
    (["--model=alex\nnet"], "error: --model=alex net: give names or numbers separated by commas, on one line; --help"),
    (["--model=alexnet", "--mesh=rows:2,cols:4"], "a comma begins another mesh; write 'rows:2;cols:4' for one"),
    (["--model=alexnet", "--mesh=\"8"], "--mesh=\"8: give names or numbers separated by commas"),
    (["--model=alexnet", "--mesh="], "--mesh is empty; name some, or leave the flag out"),
    (["--model=", "--list"], "--model is empty"), (["--model=alexnet", "--save="], "--save is empty; name a file"),
    (["--model=alexnet", "--preset="], "--preset is empty"),
    (["--save=mine.json"], "no kernels are kept of this machine"),
    (["--save=/no/such/mine.json"], "there is no folder /no/such; make it first"),
    (["--save=/dev/null"], "--save=/dev/null is a device or a pipe; name a file")])
def test_bad_usage(cache_dir, tmp_path, monkeypatch, flags, says, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(flags) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert says in err
    assert not list(tmp_path.glob("mine.json"))


def test_a_file_that_is_something_else_is_told_before_measuring(cache_dir, timed_kernels, tmp_path, capsys):
    path = tmp_path / "precious.json"
    path.write_text("precious")
    assert main(["--model=alexnet", "--mesh=2", f"--save={path}"]) == 2
    assert "choose another name" in capsys.readouterr().err
    assert path.read_text() == "precious"
    assert not timed_kernels


def test_what_is_kept_of_other_circumstances(measured, monkeypatch, capsys):
    monkeypatch.setattr("pase_mtf.calibration.cache.tensorflow_version", lambda: "0.0")
    assert main(["--list"]) == 0
    assert "measured under other circumstances" in capsys.readouterr().out


def test_no_kernels(cache_dir, capsys):
    assert main(["--list"]) == 0
    assert capsys.readouterr().out == "no kernel times are kept\n"
    assert main(["--list", "--mesh=11,rows:11"]) == 0
    assert capsys.readouterr().out == "no kernel times of 11 devices are kept\n"


def test_the_command(capsys):
    ended = subprocess.run([sys.executable, "-m", "pase_mtf.calibration", "--modle=alexnet"], capture_output=True,
                           text=True, timeout=600, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ")
    assert launcher.main(["--help"]) == main(["--help"]) == 0
    ends = " ".join(capsys.readouterr().out.rpartition("Exit codes: ")[2].partition("\n\n")[0].split())
    assert "4 out of memory; 130 (Ctrl-C), 143 (SIGTERM), 129 (SIGHUP) and 141 (nobody reads the output)" in ends


def test_a_table_of_devices_without_end_is_not_of_today(cache_dir, capsys):
    path = kernels_path(2).with_name("kernels-cpu-9-x.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('{"on": {"devices": 1' + "0" * 400 + ', "kind": "cpu"}}\n')
    assert main(["--list"]) == 0
    assert "not read here" in capsys.readouterr().out


def test_interrupted_before_anything_is_known_nothing_is_saved(cache_dir, preset, tmp_path, monkeypatch, capsys):
    def at_once(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr(measuring, "_references", at_once)
    path = tmp_path / "mine.json"
    assert main(["--model=alexnet", f"--preset={preset}", "--mesh=2", f"--save={path}"]) == 130
    assert capsys.readouterr().err.endswith("interrupted before anything was measured\n")
    assert not path.exists()


def test_what_only_the_file_holds_is_not_lost(no_cache, timed_kernels, preset, tmp_path, capsys):
    path, program = tmp_path / "mine.json", tmp_path / "program.py"
    program.write_text(_PROGRAM)
    assert main(["--model=alexnet", f"--preset={preset}", "--mesh=2", f"--save={path}"]) == 0
    before = path.read_bytes()
    assert main([f"--graph={program}:build_graph", "--mesh=2", f"--save={path}"]) == 0
    assert path.read_bytes() == before
    err = capsys.readouterr().err
    assert "mine.json: left as it is, as it holds " in err
    assert "what was measured now could be kept nowhere; choose another name" in err


@pytest.mark.parametrize("graph", ["nonsense", "no.py:build", ""])
def test_a_program_that_is_not_there_does_not_wait_for_compiling(cache_dir, monkeypatch, capsys, graph):
    monkeypatch.setattr(warm, "ready", lambda tell: pytest.fail("compiles first"))
    assert main([f"--graph={graph}"]) == 2
    assert "--graph" in capsys.readouterr().err


def test_files_in_the_home_folder(monkeypatch, tmp_path):
    """As the launcher takes them: no shell knows "~" behind "="."""
    monkeypatch.setenv("HOME", str(tmp_path))
    request = measuring.parse(["--model=alexnet", "--preset=~/sizes.json", "--save=~/mine.json"])
    assert request.save == str(tmp_path / "mine.json")
    assert request.program["preset"] == str(tmp_path / "sizes.json")


def test_a_program_in_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert measuring.parse(["--graph=~/program.py:build_graph"]).graphs == (f"{tmp_path}/program.py:build_graph",)
