"""python -m pase_mtf.layout: what it prints where, and what it says to mistakes."""

import importlib
import json
import os
import subprocess
import sys

import gin
import pytest

from benchmarks.programs.stand_ins import TRAINING, stand_in
from pase_mtf.calibration.cache import fingerprint_of_kernels
from pase_mtf.compat import mtf
from pase_mtf.errors import UsageError
from pase_mtf.layout import __main__ as layout_command
from pase_mtf.machine.kernel_table import save_tables
from pase_mtf.machine.kernel_times import KernelTimes

_PROGRAM = '''
import sys
import mesh_tensorflow as mtf
import tensorflow.compat.v1 as tf

def build_graph():
    print("the program talks")
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    batch, io, hidden = mtf.Dimension("batch", 64), mtf.Dimension("io", 512), mtf.Dimension("hidden", 1024)
    x = mtf.import_tf_tensor(mesh, tf.zeros([64, 512]), mtf.Shape([batch, io]))
    w = mtf.get_variable(mesh, "w", mtf.Shape([io, hidden]))
    v = mtf.get_variable(mesh, "v", mtf.Shape([hidden, io]))
    y = mtf.einsum([mtf.relu(mtf.einsum([x, w], mtf.Shape([batch, hidden]))), v], mtf.Shape([batch, io]))
    loss = mtf.reduce_mean(mtf.square(y - x))
    mtf.optimize.SgdOptimizer(0.1).apply_grads(mtf.gradients([loss], [w, v]), [w.operation, v.operation])
    return graph, [loss]

def broken():
    raise KeyError("hidden_size")

NUMBER = 3
'''


@pytest.fixture
def program(tmp_path, monkeypatch):
    (tmp_path / "their_program.py").write_text(_PROGRAM)
    monkeypatch.chdir(tmp_path)
    # Not syspath_prepend: it asks pkg_resources, which Mesh-TF's programs may have got a stand-in for in this process.
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    importlib.invalidate_caches()
    sys.modules.pop("their_program", None)
    return "their_program:build_graph"


@pytest.fixture(autouse=True)
def no_measuring(monkeypatch):
    """None of these commands may come to measure a machine: it takes minutes."""
    monkeypatch.setattr("pase_mtf.calibration.calibrate.calibrate", lambda *_, **__: pytest.fail("measures a machine"))


def run(capsys, *flags):
    code = layout_command.main(["layout", *flags])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_the_first_example_of_the_readme_says_what_is_printed(repository, capsys):
    section = (repository / "README.md").read_text(encoding="utf-8").partition("### Layout rules for a program")[2]
    command, printed = (block.strip("\n") for block in section.split("```")[1:4:2])
    words = command.split()
    assert words[:3] == ["python", "-m", "pase_mtf.layout"]
    graph, *flags = words[3:]
    path = graph.removeprefix("--graph=")
    code, out, err = run(capsys, f"--graph={repository / path}", *flags)
    assert code == 0
    lines = (err + out).splitlines()
    assert [line for line in printed.splitlines() if line != "..." and line not in lines] == []
    assert out.strip() == printed.splitlines()[-1]
    assert "--layout=''" not in out  # there is something to gain


def test_json_is_all_there_is_on_the_standard_output(program, capsys):
    code, out, err = run(capsys, f"--graph={program}", "--mesh=8", "--machine=h100", "--format=json",
                         "--compare=a:2;b:4;batch:a;hidden:b", "--explain=hidden")
    assert code == 0
    found = json.loads(out)
    assert mtf.convert_to_shape(found["mesh_shape"]).size == 8
    mtf.convert_to_layout_rules(found["layout"])
    for text in ("the program talks", "data parallel", "given 1", "proven optimal", "hidden (size 1024)"):
        assert text in err


def test_gin_is_what_the_transformer_takes(program, capsys):
    code, out, _ = run(capsys, f"--graph={program}", "--mesh=8", "--machine=h100", "--format=gin", "--fix=batch:rows")
    assert code == 0
    names = [line.split(" = ")[0] for line in out.splitlines()]
    assert names == ["utils.run.mesh_shape", "utils.run.layout_rules"]
    for module in TRAINING:
        stand_in(module)
    importlib.import_module("mesh_tensorflow.transformer.utils")  # registers utils.run with gin
    gin.parse_config(out)
    try:
        assert "batch:rows" in gin.query_parameter("utils.run.layout_rules")
    finally:
        gin.clear_config()


def test_the_page_names_every_flag(repository):
    page = (repository / "docs" / "layout.md").read_text(encoding="utf-8")
    assert [name for name in layout_command._FLAGS if f"--{name}" not in page] == []


def test_help_lists_the_flags_and_starts_lightly():
    code = "import sys; from pase_mtf.layout.__main__ import main; main(['layout', '--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    for flag in ("--graph", "--mesh_shape", "--compare", "--fix", "--memory_limit", "--format", "--output"):
        assert flag in done.stdout
    assert "pase_mtf.layout.__main__" in done.stdout
    assert "tensorflow" not in done.stdout.splitlines()[-1].split()


@pytest.mark.slow
def test_tensorflow_says_nothing_where_the_program_imports_it_first(tmp_path):
    first, second = "import mesh_tensorflow as mtf\n", "import tensorflow.compat.v1 as tf\n"
    (tmp_path / "alone.py").write_text(_PROGRAM.replace(first + second, second + first))
    done = subprocess.run([sys.executable, "-m", "pase_mtf.layout", "--graph=alone.py:build_graph", "--mesh=6",
                           "--machine=h100"], cwd=tmp_path, capture_output=True, text=True, timeout=300,
                          env={name: value for name, value in os.environ.items() if not name.startswith("TF_")})
    assert done.returncode == 0
    assert not [line for line in done.stderr.splitlines() if "oneDNN" in line or "InitializeLog" in line]


def test_flags_and_files(program, capsys, tmp_path):
    output = tmp_path / "layout.txt"
    arguments = [f"--graph={program}", "--mesh_shape=rows:2;cols:4", "--machine=h100", f"--output={output}"]
    code, out, _ = run(capsys, *arguments)
    assert (code, out) == (0, "")
    assert output.read_text().startswith("--mesh_shape='rows:2;cols:4' --layout='")
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert "exists" in err
    assert run(capsys, *arguments, "--overwrite")[0] == 0


def test_an_answer_that_cannot_be_written_is_printed(program, capsys, tmp_path, monkeypatch):
    def write(path, data):
        raise UsageError(f"cannot write {path}: No space left on device; free space or choose another place")
    monkeypatch.setattr(layout_command, "write_atomically", write)
    code, out, err = run(capsys, f"--graph={program}", "--mesh_shape=rows:2;cols:4", "--machine=h100",
                         f"--output={tmp_path / 'layout.txt'}")
    assert (code, out.startswith("--mesh_shape='rows:2;cols:4' --layout='")) == (2, True)
    assert "ms a step" in err
    assert "No space left on device" in err.splitlines()[-1]


def test_an_answer_that_nobody_reads(program, monkeypatch, capsys):
    flags = ("--graph=their_program:build_graph", "--mesh=4", "--machine=h100")
    with open("/dev/full", "w") as full, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", full)
        code, _, err = run(capsys, *flags)
    assert (code, err.splitlines()[-1]) == (
        2, "error: disk full (while writing); free space or choose another place")
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as gone, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", gone)
        code, _, err = run(capsys, *flags)
    assert (code, "Traceback" in err) == (141, False)


def test_the_program_sees_its_own_command_line(program, capsys, tmp_path):
    """At import and when it is called; what is ours it sees nothing of."""
    parsing = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--mesh_shape", default="none")
parser.add_argument("--seen", default="default")
GIVEN = parser.parse_args()

def built():
    assert vars(parser.parse_args()) == vars(GIVEN)
    print("seen", GIVEN.seen, "and", GIVEN.mesh_shape, file=sys.stderr)
    return build_graph()
"""
    (tmp_path / "their_program.py").write_text(_PROGRAM + parsing)
    before = list(sys.argv)
    code, out, err = run(capsys, "--graph=their_program.py:built", "--mesh_shape=all:8", "--machine=h100")
    assert (code, "seen default and none" in err) == (0, True), err
    sys.modules.pop("their_program")
    code, out, err = run(capsys, "--graph=their_program:built", "--mesh_shape=all:8", "--machine=h100", "--",
                         "--seen=theirs", "--mesh_shape=a")
    assert (code, "seen theirs and a" in err) == (0, True), err
    assert out.startswith("--mesh_shape='all:8'")
    assert sys.argv == before


def test_help_behind_the_dashes_is_the_programs(program, capsys):
    code, out, err = run(capsys, f"--graph={program}", "--mesh_shape=all:8", "--machine=h100", "--", "-h")
    assert (code, out.startswith("--mesh_shape='all:8'")) == (0, True), err


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "hidden"), [((), 1024), (("--", "--hidden=512", "--unknown=1"), 512)])
def test_flags_of_absl_that_nobody_has_parsed(tmp_path, arguments, hidden):
    flags = "from absl import flags\nflags.DEFINE_integer('hidden', 1024, '')\nflags.DEFINE_string('name', None, '')\n"
    flags += "flags.mark_flag_as_required('name')\n" if not arguments else ""
    (tmp_path / "their_program.py").write_text(
        flags + _PROGRAM.replace("1024", "flags.FLAGS.hidden").replace('"the program talks"', "flags.FLAGS.hidden"))
    done = subprocess.run([sys.executable, "-m", "pase_mtf.layout", "--graph=their_program:build_graph", "--mesh=8",
                           "--machine=h100", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert str(hidden) in done.stderr.splitlines()


def test_a_decorator_that_hides_what_the_function_takes(program, capsys, tmp_path):
    (tmp_path / "their_program.py").write_text(_PROGRAM + """
def logged(function):
    def inner(*args, **kwargs):
        return function(*args, **kwargs)
    return inner

hidden = logged(build_graph)

@logged
def taking_more(a_thing):
    return build_graph()
""")
    code, out, err = run(capsys, "--graph=their_program:hidden", "--mesh=8", "--machine=h100")
    assert code == 0, err
    assert out.startswith("--mesh_shape=")
    code, out, err = run(capsys, "--graph=their_program:taking_more", "--mesh=8", "--machine=h100")
    assert (code, out) == (2, "")
    assert "missing 1 required positional argument" in err


def test_what_is_to_be_explained_is_looked_at_before_the_search(program, capsys, monkeypatch):
    monkeypatch.setattr("pase_mtf.layout.find.load_machine", lambda *_: pytest.fail("goes on to search"))
    code, out, err = run(capsys, f"--graph={program}", "--mesh=8", "--machine=h100", "--explain=hidden",
                         "--explain=hiden")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: unknown dim 'hiden'; did you mean 'hidden'")


def test_a_mistake_beside_the_answer_does_not_cost_it(program, tmp_path, capsys):
    """Of a graph that depends on its layout nobody knows the dims before the layout."""
    (tmp_path / "their_program.py").write_text(_PROGRAM + """
def depending(layout):
    return build_graph()
""")
    code, out, err = run(capsys, "--graph=their_program:depending", "--mesh=8", "--machine=h100", "--explain=hiden")
    assert code == 2
    assert out.startswith("--mesh_shape=")
    assert "did you mean 'hidden'" in err


@pytest.mark.parametrize(("flags", "message", "code"), [
    (["--mesh=8", "--graph={}", "--output=nowhere/layout.txt"], "no folder nowhere", 2),
    (["--mesh=8", "--graph=their_program.py:build_graph", "--output=their_program.py", "--overwrite"],
     "is read for --graph", 2),
    ([], "--mesh is missing", 2),
    (["--mesh=8"], "--graph is missing", 2),
    (["--mesh_shape=", "--graph={}"], "--mesh_shape is empty; give one, such as rows:2;cols:4, or leave", 2),
    (["--mesh=8", "--graph={}", "--machine="], "--machine is empty; name one or a file, or leave the flag out", 2),
    (["--mesh=x", "--graph={}"], "--mesh=x: not a number", 2),
    (["--mesh=-8", "--graph={}"], "not above zero", 2),
    (["--mesh=8", "--graph={}", "--prices=mesured"], "did you mean 'measured'", 2),
    (["--mesh=8", "--graph={}", "--prices=measured", "--measure_seconds=0"], "not above zero", 2),
    (["--mesh=8", "--graph={}", "--prices=measured", "--explain=batch"], "--explain is for roofline prices", 2),
    (["--mesh=8", "--graph={}", "--prices=measured", "--machine=h100"], "'h100' is neither", 2),
    (["--mesh=8", "--graph=their_program"], "not module:function", 2),
    (["--mesh=8", "--graph=nowhere_at_all:f"], "no module 'nowhere_at_all'", 2),
    (["--mesh=8", "--graph=nowhere.py:f"], "no file nowhere.py", 2),
    (["--mesh=8", "--graph=their_program:build"], "did you mean 'build_graph'", 2),
    (["--mesh=8", "--graph=their_program:NUMBER"], "no function", 2),
    (["--mesh=8", "--graph=their_program:broken"], "failed: KeyError: 'hidden_size'", 2),
    (["--mesh=8", "--graph={}", "--memory_limit=lots"], "--memory_limit=lots: give bytes", 2),
    (["--mesh=8", "--graph={}", "--format=yaml"], "--format=yaml: unknown", 2),
    (["--mesh=8", "--graph={}", "--fix=batch"], "not dim:axis", 2),
    (["--mesh=8", "--graph={}", "--fix=batch="], "for two dims on one axis", 2),
    (["--mesh=8", "--graph={}", "--machine=h100", "--fix=batch=hiden"], "did you mean 'hidden'", 2),
    (["--mesh=8", "--graph={}", "--machine=h100", "--fix=batches:rows"], "did you mean 'batch'", 2),
    (["--mesh=8", "--graph={}", "--machine=h100", "--memory_limit=10"], "the least that any layout needs", 3),
    (["--mesh=7", "--graph={}", "--machine=h100"], "does not divide by 7", 3),
    (["--mesh=8", "--graph={}", "extra"], "unexpected argument 'extra'", 2),
    (["--mash=8"], "mash", 2),
    (["--mesh=8", "--graph={}", "--machine=h100", "--output=their_program.py", "--overwrite"],
     "is read for --graph", 2),
    (["--nooverwrite=1"], "--nooverwrite=1 does not take an argument; leave it out", 2),
    ([f"--flagfile={sys.executable}"], "is no text; give a file with a flag on every line", 2),
])
def test_mistakes_are_told_in_one_line(program, capsys, flags, message, code):
    got, out, err = run(capsys, *(flag.replace("{}", program) for flag in flags))
    assert got == code, err
    assert out == ""
    # On a busy machine a search that takes seconds says what it does, before.
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert err.splitlines()[-1] == lines[0]
    assert message in lines[0]


def test_what_to_do_instead_of_explaining_by_a_file(program, capsys, tmp_path):
    save_tables(tmp_path / "mine.json", [KernelTimes(fingerprint_of_kernels(8), {})])
    code, out, err = run(capsys, f"--graph={program}", "--mesh=8", f"--machine={tmp_path / 'mine.json'}",
                         "--explain=batch")
    assert (code, out) == (2, "")
    assert err.endswith("--explain is for roofline prices; leave it out, or take a machine with rates, such as local or"
                        " h100\n")


def test_by_measured_kernels(program, cache_dir, timed_kernels, capsys):
    code, out, err = run(capsys, f"--graph={program}", "--mesh=4", "--prices=measured")
    assert code == 0
    assert out.startswith("--mesh_shape=")
    assert "kernels of it measured" in err
    assert timed_kernels


@pytest.mark.parametrize(("flags", "message"), [
    (["--fix=batch:rows", "--fix=batch:cols"], "batch is fixed twice, to rows and to cols"),
    (["--fix=batch:;batch:rows"], "fixed twice"), (["--alternatives=-1"], "from 0 to"),
    (["--alternatives=99999"], "from 0 to")])
def test_flags_that_contradict_themselves(program, capsys, flags, message):
    assert layout_command.main(["layout", f"--graph={program}", "--mesh=8", "--machine=h100", *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_command_forgets_the_flags_of_the_one_before(program, capsys):
    flags = ["layout", f"--graph={program}", "--mesh=8", "--machine=h100"]
    assert layout_command.main([*flags, "--output=nowhere/layout.txt", "--alternatives=-1"]) == 2
    assert "no folder nowhere" in capsys.readouterr().err
    assert layout_command.main(flags) == 0
    assert capsys.readouterr().out.startswith("--mesh_shape=")


def test_programs_that_leave(program, tmp_path, capsys):
    (tmp_path / "their_script.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "their_function.py").write_text("import sys\ndef build():\n    sys.exit(0)\n")
    importlib.invalidate_caches()
    for graph in ("their_script:build", "their_function:build"):
        assert layout_command.main(["layout", f"--graph={graph}", "--mesh=8", "--machine=h100"]) == 2
        assert "SystemExit" in capsys.readouterr().err


def test_rules_for_dims_that_are_not_there(program, capsys):
    flags = ["layout", f"--graph={program}", "--mesh=8", "--machine=h100"]
    assert layout_command.main([*flags, "--compare=a:8;hiden:a"]) == 2
    assert "'hiden' is no dim of the graph; did you mean 'hidden'" in capsys.readouterr().err
    assert layout_command.main([*flags, "--compare=a:8;batch:a;hiden:a"]) == 0
    assert "note: layout" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["train.v2.py", "queue.py"])
def test_a_file_that_python_cannot_import_by_its_name(program, tmp_path, capsys, name):
    (tmp_path / name).write_text(_PROGRAM)
    code, out, err = run(capsys, f"--graph={tmp_path / name}:build_graph", "--mesh=8", "--machine=h100")
    assert (code, out) == (2, "")
    assert f"rename {name}" in err


def test_a_package_beside_a_file_of_its_name_is_not_taken_for_it(program, tmp_path, capsys):
    (tmp_path / "twice_there").mkdir()
    (tmp_path / "twice_there" / "__init__.py").write_text("raise ValueError('nobody asked for this')\n")
    (tmp_path / "twice_there.py").write_text(_PROGRAM)
    importlib.invalidate_caches()
    code, out, err = run(capsys, f"--graph={tmp_path / 'twice_there.py'}:build_graph", "--mesh=8", "--machine=h100")
    assert (code, out) == (2, "")
    assert "another module is called twice_there; rename twice_there.py" in err
    assert "nobody asked" not in err


@pytest.mark.slow
def test_a_flag_of_the_program_that_does_not_parse_is_told(tmp_path):
    flags = "from absl import flags\nflags.DEFINE_integer('hidden', 1024, '')\n"
    (tmp_path / "their_program.py").write_text(flags + _PROGRAM.replace("1024", "flags.FLAGS.hidden"))
    done = subprocess.run([sys.executable, "-m", "pase_mtf.layout", "--graph=their_program:build_graph", "--mesh=8",
                           "--machine=h100", "--", "--hidden=many"], cwd=tmp_path, capture_output=True, text=True,
                          timeout=300, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--hidden=many" in done.stderr.splitlines()[-1]


def test_spaces_in_what_is_fixed_are_of_no_name():
    assert layout_command._fixed(["batch : rows; length: "]) == ({"batch": "rows", "length": None}, [])


def test_what_an_import_says_is_one_line(program, tmp_path, capsys):
    (tmp_path / "their_program.py").write_text("raise ImportError('one line\\nand another')\n")
    code, out, err = run(capsys, f"--graph={program}", "--mesh=8", "--machine=h100")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: --graph=their_program:build_graph: importing their_program failed: "
                                           "ImportError: one line and another; import it")


def test_a_file_in_the_home_folder(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    code, out, err = run(capsys, "--graph=none:none", "--mesh=2", "--output=~/none/layout.txt")
    assert (code, out) == (2, "")
    assert f"there is no folder {tmp_path}/none; " in err


def test_a_program_in_the_home_folder(program, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    code, out, err = run(capsys, "--graph=~/their_program.py:build_graph", "--mesh=8", "--machine=h100")
    assert code == 0, err
    assert out.startswith("--mesh_shape=")


def test_what_a_decorated_function_needs_is_told_as_of_any(tmp_path, monkeypatch, capsys):
    (tmp_path / "decorated_program.py").write_text(
        "import functools\n\n\ndef timed(function):\n    @functools.wraps(function)\n"
        "    def inner(*args, **kwargs):\n        return function(*args, **kwargs)\n    return inner\n\n\n"
        "@timed\ndef build_graph(params):\n    return params\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    code, out, err = run(capsys, f"--graph={tmp_path}/decorated_program.py:build_graph", "--mesh=2", "--machine=h100")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: build_graph needs arguments (params); give a function")
