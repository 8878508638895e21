"""Wrong input is answered in one line with the remedy, before TensorFlow is loaded."""

import dataclasses
import json
import shutil
import subprocess
import sys

import pytest

from pase_mtf import models
from pase_mtf.calibration.cache import fingerprint_of_kernels
from pase_mtf.errors import FormatError, MismatchError, UsageError
from pase_mtf.exit_codes import HelpRequested
from pase_mtf.launch.__main__ import main
from pase_mtf.launch.command_line import parse_command_line
from pase_mtf.launch.options import Options
from pase_mtf.launch.plan import resolve
from pase_mtf.launch.strategies import trying
from pase_mtf.machine.kernel_table import save_tables
from pase_mtf.machine.kernel_times import KernelTimes
from pase_mtf.machine.kernels import TINY, Timing

_MODEL = "--model=alexnet"
_TINY = models.load_config("alexnet", "tiny")


def test_a_seed_among_the_sizes(tmp_path):
    """It would be that of the flag, silently. Calibration has no such flag, and says the same."""
    path = tmp_path / "sizes.json"
    path.write_text('{"preset": "tiny", "seed": 7}')
    given = Options(model="alexnet", preset=str(path), devices="cpu", machine="h100")
    with pytest.raises(UsageError, match="seed 7 there, 0 here; leave it out there, and give the launcher --seed=7"):
        resolve(given)
    assert resolve(dataclasses.replace(given, seed=7)).config.seed == 7


def test_the_help_says_how_long_trial_steps_take():
    with pytest.raises(HelpRequested) as told:
        parse_command_line(["--help"])
    assert f"no further one once {100 * trying._SHARE:.0f} % are over" in " ".join(str(told.value).split())


@pytest.mark.parametrize(("arguments", "says"), [
    ([], "--model is missing"),
    (["--model=alexnett"], "did you mean 'alexnet'?"),
    (["--model=transfomer"], "did you mean 'transformer'?"),
    (["--resume="], "error: --resume is empty; name a folder, or leave the flag out\n"),
    ([_MODEL, "--resume="], "--resume is empty"), ([_MODEL, "--resume= "], "--resume= : no such folder"),
    ([_MODEL, "--preset="], "--preset is empty; name a preset or a file, or leave the flag out"),
    ([_MODEL, "--preset= "], "--preset is empty"), ([_MODEL, "--data="], "--data is empty"),
    ([_MODEL, "--machine="], "--machine is empty; name one or a file, or leave the flag out"),
    ([_MODEL, "--output_dir="], "--output_dir is empty"),
    ([_MODEL, "--preset=tinny"], "did you mean 'tiny'?"),
    ([_MODEL, "--preset=/no/such.json"], "cannot read /no/such.json"),
    ([_MODEL, "--mesh=0"], "fewer than one device"),
    ([_MODEL, "--mesh=rows:2;rows:2"], "twice"),
    ([_MODEL, "--mesh=2x4"], "mesh shape"),
    ([_MODEL, "--machine=a1000"], "did you mean 'a100'?"),
    ([_MODEL, "--machine=/no/such.json"], "cannot read /no/such.json"),
    ([_MODEL, "--prices=mesured"], "did you mean 'measured'?"),
    ([_MODEL, "--prices=measured", "--machine=h100"], "leave out --machine=h100"),
    ([_MODEL, "--recalibrate", "--machine=h100"], "--recalibrate is for the machine at hand"),
    ([_MODEL, "--measure_seconds=0"], "--measure_seconds=0: must be at least 1"),
    ([_MODEL, "--optimizer=adan"], "did you mean 'adam'?"),
    ([_MODEL, "--strategy=serach"], "did you mean 'search'?"),
    ([_MODEL, "--compare=search,exprt"], "did you mean 'expert'?"),
    ([_MODEL, "--strategy=/no/such.json"], "cannot read /no/such.json"),
    ([_MODEL, "--devices=tpu"], "did you mean"),
    ([_MODEL, "--devices=gpu", "--mesh=512"], "more GPUs than there are"),
    ([_MODEL, "--batch=64", "--mesh=7", "--strategy=data_parallel", "--compare=none"],
     "--batch=64 does not split over 7 devices; take --batch=63, --mesh=4, or --strategy=search"),
    ([_MODEL, "--batch=8", "--mesh=6", "--strategy=zero", "--sharded_updates", "--microbatches=2", "--compare=none"],
     "--strategy=zero: --batch=8 in 2 microbatches does not split over 6 devices; take --batch=12, --mesh=4, or "),
    ([_MODEL, "--batch=8", "--mesh=6", "--strategy=data_parallel", "--cluster=local:3"], "take --batch=6, or --strat"),
    (["--model=resnet101", "--microbatches=2", "--cluster=local:2"],
     "--microbatches=2: resnet101 normalises over the batch, so that pieces of it are another model; leave it out"),
    (["--model=resnet101", "--strategy=pipeline"], "--strategy=pipeline: resnet101 normalises over the batch, so"),
    ([_MODEL, "--strategy=pipeline", "--recompute=all"], "it computes no block again; leave out --recompute=all"),
    ([_MODEL, "--strategy=pipeline", "--microbatches=auto"], "leave out --microbatches=auto, or give a number"),
    ([_MODEL, "--memory_limit=11gigs"], "--memory_limit=11gigs: give bytes"),
    ([_MODEL, "--memory_limit=0"], "--memory_limit=0: give bytes"),
    ([_MODEL, "--memory_limit=-5"], "--memory_limit=-5: give bytes"),
    ([_MODEL, "--checkpoint_every=5", "--nocheckpoint"], "with --nocheckpoint there are none"),
    ([_MODEL, "--batch=0"], "--batch=0: must be at least 1"),
    ([_MODEL, "--steps=0"], "must be at least 1"),
    ([_MODEL, "--steps=many"], "error: --steps=many: give a whole number; --help"),
    ([_MODEL, "--learning_rate=a: b"], "error: --learning_rate=a: b: give a number; --help"),
    ([_MODEL, "--trial=maybe"], "error: --trial=maybe: give true or false; --help"),
    ([_MODEL, "--warmup=0"], "must be at least 1"),
    ([_MODEL, "--learning_rate=-1"], "positive"),
    ([_MODEL, "--learning_rate=nan"], "positive"),
    ([_MODEL, "--seed=-1"], "must be at least 0"),
    ([_MODEL, "--resume=/no/such"], "no such folder"),
    ([_MODEL, "--output_dir=/"], "never overwritten"),
    ([_MODEL, "--stpes=3"], "Did you mean: steps"),
    ([_MODEL, "--batch"], "Missing value"),
    ([_MODEL, "more"], "'more' is no flag"),
    ([_MODEL, "--flagfile=/no/such"], "/no/such"),
    *(([_MODEL, *given], f"error: --flagfile={sys.executable}: is no text; give a file with a flag on every line\n")
      for given in ([f"--flagfile={sys.executable}"], ["--flagfile", sys.executable])),
    ([_MODEL, "--microbatches=01" + "0" * 5000], "give a number that divides the batch, or auto"),
    ([_MODEL, "--nocheckpoint=true"], "error: --nocheckpoint=true does not take an argument; leave it out\n"),
])
def test_bad_usage(arguments, says, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_a_pipeline_with_dropout(tmp_path):
    sizes = tmp_path / "sizes.json"
    sizes.write_text('{"preset": "tiny", "dropout": 0.1}')
    given = Options(model="transformer", preset=str(sizes), devices="cpu", machine="h100", strategy="pipeline")
    with pytest.raises(UsageError, match="--strategy=pipeline: every microbatch draws a dropout mask of its own"):
        resolve(given)
    assert resolve(dataclasses.replace(given, microbatches="2")).microbatches == 2
    assert resolve(dataclasses.replace(given, strategy="search", compare="pipeline")).microbatches == 1


def test_kernel_times_have_no_rates(tmp_path, capsys):
    path = tmp_path / "mine.json"
    save_tables(path, [KernelTimes(fingerprint_of_kernels(8), {TINY: Timing(1e-5)})])
    flags = [_MODEL, "--devices=cpu", f"--machine={path}", "--print_config"]
    assert main([*flags, "--prices=roofline"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: --prices=roofline: --machine={path} holds the times of kernels, and no rates; leave")
    assert err.count("\n") == 1
    for more in ([], ["--prices=measured"]):
        assert main([*flags, *more]) == 0
        assert json.loads(capsys.readouterr().out)["options"]["prices"] == "measured"


@pytest.mark.parametrize("flag", ["strategy", "machine", "compare"])
@pytest.mark.parametrize(("text", "says"), [
    ('{"format": "pase_mtf.', "truncated"), ('{"format": "something.else", "version": 1}', "foreign"),
    ("", "truncated"), ("[1, 2]", "foreign"), ("\x00\xff", "truncated"),
])
def test_truncated_and_foreign_files(flag, text, says, tmp_path, capsys):
    path = tmp_path / "file.json"
    path.write_bytes(text.encode("latin-1"))
    assert main([_MODEL, f"--{flag}={path}"]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert str(path) in err
    assert err.count("\n") == 1


def test_answers_before_tensorflow_is_loaded():
    """What words and files can answer is answered at once: wrong flags, a missing package, wrong data."""
    code = ("import sys, types\n"
            "from pase_mtf.launch.__main__ import main\n"
            "codes = [main(['--model=alexnet', *more]) for more in "
            "(['--mesh=0'], ['--preset=x'], ['--batch=3', '--strategy=data_parallel'], ['--machine=x'],"
            " ['--strategy=pipeline', '--recompute=all'], ['--data=/no/such/images'],"
            " ['--devices=gpu', '--mesh=99'], ['--compare=x'], ['--output_dir=/'], ['--print_config'])]\n"
            "codes.append(main(['--help']))\n"
            "heavy = {'tensorflow', 'matplotlib', 'numba', 'scipy', 'PIL', 'tokenizers', 'jinja2'} & set(sys.modules)\n"
            "assert not heavy, heavy\n"
            "sys.modules['matplotlib'] = None\n"
            "codes.append(main(['--model=alexnet']))\n"
            "from pase_mtf.launch.data import open_data; from pase_mtf.models import load_config\n"
            "open_data(None, types.SimpleNamespace(data_kind='images'), load_config('alexnet', 'tiny'), 4, 0)\n"
            "assert 'tensorflow' not in sys.modules\nprint(codes)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False,
                          env={"CUDA_VISIBLE_DEVICES": "", "PATH": ""})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str([2] * 9 + [0, 0, 2])
    assert len(done.stderr.splitlines()) == 10


@pytest.mark.parametrize(("module", "package"), [
    ("matplotlib", "matplotlib"), ("PIL", "pillow"), ("tokenizers", "tokenizers"), ("jinja2", "jinja2")])
def test_a_missing_package_is_named_at_once(module, package, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)  # what Python takes for "cannot be imported"
    assert main([_MODEL, "--devices=cpu", "--machine=a100"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"error: the launcher needs {package}; pip install 'pase_mtf[launch]'\n"
    assert list(tmp_path.iterdir()) == []
    assert main([_MODEL, "--devices=cpu", "--machine=a100", "--print_config"]) == 0


def test_help(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for flag in ("--model", "--mesh", "--compare", "--resume", "--[no]search_only", "Exit codes"):
        assert flag in out


def test_print_config(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["--model=transformer", "--mesh=rows:2;cols:2", "--devices=cpu", "--print_config", "--optimizer=sgd",
                 "--seed=5"]) == 0
    config = json.loads(capsys.readouterr().out)
    options = config["options"]
    assert options["preset"] == "tiny"
    assert options["optimizer"] == "sgd"
    assert options["learning_rate"] > 0
    assert options["batch"] == config["model_config"]["batch"]
    assert config["model_config"]["seed"] == 5
    assert len(config["devices"]) == 4
    assert options["output_dir"].startswith("outputs/transformer-rows2-cols2-")
    assert list(tmp_path.iterdir()) == []


def test_default_folders_do_not_collide(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "now")
    first = Options(model="alexnet").resolved(_TINY, "tiny").output_dir
    (tmp_path / first).mkdir(parents=True)
    assert Options(model="alexnet").resolved(_TINY, "tiny").output_dir == f"{first}-2"


def test_default_folders_of_runs_that_start_at_once_differ(tmp_path, monkeypatch):
    """A folder is made seconds after its name is chosen."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "now")
    names = set()
    for process in (101, 102):
        monkeypatch.setattr("os.getpid", lambda process=process: process)
        names.add(Options(model="alexnet").resolved(_TINY, "tiny").output_dir)
    assert len(names) == 2


def test_adafactor_keeps_its_own_schedule():
    assert Options(model="alexnet", optimizer="adafactor").resolved(_TINY, "tiny").learning_rate is None
    assert Options(model="alexnet").resolved(_TINY, "tiny").learning_rate == _TINY.learning_rate
    given = Options(model="alexnet", optimizer="adafactor", learning_rate=0.5).resolved(_TINY, "tiny")
    assert given.learning_rate == 0.5


def test_a_batch_that_does_not_divide_is_fine_without_data_parallelism():
    assert Options(model="alexnet", batch=6, mesh="4", compare="search").resolved(_TINY, "tiny").batch == 6


@pytest.mark.parametrize("flag", ["--seed=18446744073709551616", "--seed=99999999999999999999999", "--batch=2147483648",
                                  "--steps=2147483648"])
def test_numbers_beyond_32_bits(flag):
    with pytest.raises(UsageError, match="at most 2147483647"):
        parse_command_line(["--model=alexnet", flag])


@pytest.mark.parametrize(("left", "expected"), [(5, (3, 2)), (4, (3, 1)), (3, (2, 1)), (2, (1, 1)), (1, (1, 0)),
                                                (0, (1, 0)), (-1, (1, 0))])
def test_what_is_left_of_a_run(left, expected):
    """Not a step more, but for the one without which there is no summary."""
    options = Options(model="alexnet", warmup=3).going_on("run", left)
    assert (options.warmup, options.steps) == expected
    options.check_values()


def test_output_dir_is_looked_at_first(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "run", tmp_path / "file" / "a" / "b"):
        with pytest.raises(UsageError, match="is not a folder"):
            parse_command_line(["--model=alexnet", f"--output_dir={place}"])
    with pytest.raises(UsageError, match="empty"):
        parse_command_line(["--model=alexnet", "--output_dir= "])
    parse_command_line(["--model=alexnet", f"--output_dir={tmp_path}/a/b/c"])


def test_a_resumed_run_is_what_the_one_before_was(tmp_path):
    before = parse_command_line(["--model=alexnet", "--notrial", "--sharded_updates", "--memory_limit=1GB"])
    config = {"format": "pase_mtf.run", "version": 1, "options": {**before.to_json(), "dtype": "float64"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    resumed = parse_command_line([f"--resume={tmp_path}"])
    assert not resumed.trial
    assert resumed.sharded_updates
    assert (resumed.dtype, resumed.memory_limit) == ("float64", "1GB")
    assert parse_command_line([f"--resume={tmp_path}", "--trial"]).trial
    with pytest.raises(UsageError, match=r"--dtype=float32: the run in .* was trained with float64"):
        parse_command_line([f"--resume={tmp_path}", "--dtype=float32"])


def test_a_run_of_an_earlier_version_is_resumed_with_what_holds_by_default(tmp_path):
    options = parse_command_line(["--model=alexnet"]).to_json()
    for name in ("checkpoint_every", "dtype", "measure_seconds", "memory_limit", "microbatches", "sharded_updates",
                 "trial"):
        del options[name]
    (tmp_path / "config.json").write_text(json.dumps({"format": "pase_mtf.run", "version": 1, "options": options}))
    resumed = parse_command_line([f"--resume={tmp_path}", "--dtype=float32"])
    assert resumed.dtype == "float32"
    assert resumed.trial
    assert resumed.memory_limit == "device"


@pytest.mark.parametrize("flag", ["strategy", "compare"])
def test_a_strategy_for_others_does_not_wait_for_tensorflow(finished, tmp_path, flag):
    path, damaged = finished / "strategy.json", tmp_path / "damaged.json"
    damaged.write_text(json.dumps({**json.loads(path.read_text()), "devices": "2"}))
    for file, error, says in ((path, MismatchError, "for 2 devices, --mesh=4 has 4; use --mesh=2, or search anew"),
                              (damaged, FormatError, "devices is '2'")):
        with pytest.raises(error, match=says):
            resolve(parse_command_line(["--model=alexnet", "--mesh=4", "--devices=cpu", "--machine=a100",
                                        f"--{flag}={file}"]))


def test_ranks_find_checkpoints_by_their_whole_path(tmp_path, monkeypatch):
    """They took that of a working folder for a pattern, and could not go on."""
    (tmp_path / "lr[0.1]").mkdir()
    monkeypatch.chdir(tmp_path / "lr[0.1]")
    flags = [_MODEL, "--mesh=2", "--cluster=local:2"]
    for more in ([], ["--output_dir=run"]):
        assert parse_command_line([*flags, *more]).clients == "one"
        with pytest.raises(UsageError, match=r"lr\[0\.1\].* for a pattern"):
            parse_command_line([*flags, "--clients=ranks", *more])


@pytest.mark.parametrize("more", [["--nocheckpoint"], ["--search_only", "--recalibrate"]])
def test_ranks_without_a_checkpoint_work_in_any_folder(more, tmp_path, monkeypatch):
    (tmp_path / "lr[0.1]").mkdir()
    monkeypatch.chdir(tmp_path / "lr[0.1]")
    flags = [_MODEL, "--mesh=2", "--cluster=local:2", "--clients=ranks", *more]
    assert parse_command_line(flags).clients == "ranks"


def test_a_tilde_is_the_home_in_every_path(tmp_path, monkeypatch):
    """Shells leave it as it is behind --output_dir=, and a folder of that name was made."""
    monkeypatch.setenv("HOME", str(tmp_path))
    options = parse_command_line([_MODEL, "--output_dir=~/runs/a", "--preset=~/sizes.json", "--machine=~/mine.json",
                                  "--strategy=~/one.json", "--compare=expert,~/two.json"])
    assert (options.output_dir, options.preset) == (f"{tmp_path}/runs/a", f"{tmp_path}/sizes.json")
    assert (options.machine, options.strategy) == (f"{tmp_path}/mine.json", f"{tmp_path}/one.json")
    assert options.compare == f"expert,{tmp_path}/two.json"
    options = parse_command_line([_MODEL, "--compare=expert, ~/two.json"])
    assert options.compare == f"expert,{tmp_path}/two.json"
    with pytest.raises(FormatError, match=f"--resume={tmp_path}/none: no such folder"):
        parse_command_line([_MODEL, "--resume=~/none"])


def test_a_flag_is_no_folder():
    """As behind `--output_dir $OUT` where OUT is not set."""
    with pytest.raises(UsageError, match="--output_dir=--steps=5: is a flag, and the folder is missing before it"):
        parse_command_line([_MODEL, "--output_dir", "--steps=5"])


def test_a_folder_is_the_same_by_a_link_to_it(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "latest").symlink_to("run")
    for resume, output in (("latest", "run"), ("run", "latest")):
        assert Options(resume=str(tmp_path / resume), output_dir=str(tmp_path / output)).in_place
    assert not Options(resume=str(tmp_path / "latest"), output_dir=str(tmp_path / "other")).in_place


def test_an_order_of_no_pipeline_is_refused_where_a_run_may_be_taken_up(tmp_path):
    """Which hands no order on: it is the command's own, and would do nothing."""
    flags = ["--model=alexnet", "--compare=none", "--resume=auto", f"--output_dir={tmp_path / 'run'}"]
    assert parse_command_line(flags).schedule == "1f1b"
    with pytest.raises(UsageError, match="--schedule=gpipe: is for a pipeline that is searched"):
        parse_command_line([*flags, "--schedule=gpipe"])
    assert parse_command_line([*flags, "--schedule=gpipe", "--compare=pipeline"]).schedule == "gpipe"


def test_a_run_in_its_own_folder_replaces_no_file_that_it_compares_with(finished, tmp_path):
    """The next start would have measured the strategy that was found in its stead."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    compare = f"--compare={run / 'strategy.json'}"
    for flags in ([f"--resume={run}"], ["--resume=auto"]):
        with pytest.raises(UsageError, match=r"strategy\.json: this run replaces it"):
            parse_command_line([*flags, f"--output_dir={run}", compare])
    assert parse_command_line([f"--resume={run}", f"--output_dir={tmp_path / 'other'}", compare]).arms[1].name


def test_a_run_in_its_own_folder_replaces_no_pipeline_that_it_trains(finished, tmp_path):
    """What is searched beside it is kept under the name that the file has."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    path = run / "searched_pipeline.json"
    path.write_text(json.dumps({"format": "pase_mtf.pipeline", "version": 1}))
    flags = [f"--resume={run}", f"--output_dir={run}", f"--strategy={path}"]
    with pytest.raises(UsageError, match=r"--strategy=.*searched_pipeline\.json: this run replaces it"):
        parse_command_line([*flags, "--compare=pipeline"])
    assert parse_command_line([*flags, "--compare=none"]).arms[0].name == "searched_pipeline"
