"""A search for a layout that is given no time, and what it says while it goes on."""

import io
import math
import re
import time

import pytest

from pase_mtf.compat import mtf, placement_mesh_impl, tf
from pase_mtf.errors import InfeasibleError, UsageError
from pase_mtf.layout import progress, search
from pase_mtf.layout.find import find_layout
from pase_mtf.layout.graph import GraphSearch
from pase_mtf.layout.legality import Problem
from pase_mtf.layout.progress import Progress
from pase_mtf.machine.machine import Link, Machine

_RATES = dict.fromkeys(("matmul", "convolution", "pointwise", "reduction", "gather"), 1e6)
FLAT = Machine("flat", _RATES, 1e7, 1e12, 1e-6, (Link(64, 1e7, 1e-7),))


def build(batch=8):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    batch, width, hidden = mtf.Dimension("batch", batch), mtf.Dimension("width", 64), mtf.Dimension("hidden", 64)
    x = mtf.import_tf_tensor(mesh, tf.ones([batch.size, 64]), [batch, width])
    h = mtf.einsum([x, mtf.get_variable(mesh, "w", [width, hidden])], [batch, hidden])
    return graph, [mtf.reduce_sum(h)]


def build_for(mesh_shape="all:4", layout="width:all"):
    return build(8 if mtf.tensor_dim_to_mesh_dim_size(
        mtf.convert_to_layout_rules(layout), mtf.convert_to_shape(mesh_shape), mtf.Dimension("width", 4)) == 1 else 16)


@pytest.mark.parametrize("program", [build, build_for])
def test_without_time_the_best_so_far_is_returned_with_its_gap(program):
    best = find_layout(program, 4, machine=FLAT)
    assert best.search["optimal"]
    found = find_layout(program, 4, machine=FLAT, time_limit=1e-9)
    assert not found.best.problem
    assert found.seconds >= best.seconds * (1 - 1e-9)
    bound = found.seconds / (1 + found.search["gap"])
    assert 0 < bound <= best.seconds * (1 + 1e-9)
    assert found.search["optimal"] == (found.search["gap"] <= 1e-9)


def test_without_time_a_gap_is_said():
    found = find_layout(build, 4, machine=FLAT, time_limit=1e-9, fixed={"batch": None})
    assert not found.layout_rules  # data parallelism is not what was asked for
    assert not found.search["optimal"]
    assert math.isfinite(found.search["gap"])
    assert "above the optimum" in str(found)
    # Not looked for is not slower.
    assert "no dim is split" in str(found)
    assert "which is faster" not in str(found)
    assert "give it more time" in str(found)


def test_without_time_what_is_fixed_is_an_answer():
    best = find_layout(build, 4, machine=FLAT, fixed={"hidden": "rows"})
    found = find_layout(build, 4, machine=FLAT, time_limit=1e-9, fixed={"hidden": "rows"})
    assert found.layout_rules == "hidden:rows"
    assert found.seconds / (1 + found.search["gap"]) <= best.seconds * (1 + 1e-9)


def test_without_time_a_layout_to_compare_with_may_be_the_answer():
    best = find_layout(build, 4, machine=FLAT, fixed={"batch": None})
    assert best.layout_rules
    found = find_layout(build, 4, machine=FLAT, time_limit=1e-9, fixed={"batch": None},
                        compare=[f"{best.mesh_shape};{best.layout_rules}"])
    assert (found.mesh_shape, found.layout_rules) == (best.mesh_shape, best.layout_rules)
    assert found.seconds == pytest.approx(best.seconds)


def build_slices():
    """Slices that were laid out beforehand: unless their dim is split nothing lowers."""
    graph = mtf.Graph()
    impl = placement_mesh_impl.PlacementMeshImpl("all:4", "width:all", [""] * 4)
    dims = mtf.Shape([mtf.Dimension("batch", 8), mtf.Dimension("width", 64)])
    slices = impl.LaidOutTensor(impl.make_slices(tf.ones([8, 64]), dims))
    return graph, [mtf.reduce_sum(mtf.import_laid_out_tensor(mtf.Mesh(graph, "mesh"), slices, dims))]


def test_without_time_nothing_is_called_impossible():
    assert "width" in find_layout(build_slices, 4, machine=FLAT).layout_rules
    with pytest.raises(InfeasibleError, match="no layout was found within the time limit; give more"):
        find_layout(build_slices, 4, machine=FLAT, time_limit=1e-9)
    # What is wrong with all layouts is known without looking at any.
    with pytest.raises(InfeasibleError, match="does not lower"):
        find_layout(build_slices, 4, machine=FLAT, time_limit=1e-9, fixed={"width": "b"}, mesh_shape="a:2;b:2")


def test_with_time_nothing_changes():
    plain, limited = find_layout(build, 4, machine=FLAT), find_layout(build, 4, machine=FLAT, time_limit=1e6)
    assert (limited.mesh_shape, limited.layout_rules) == (plain.mesh_shape, plain.layout_rules)
    assert limited.search["optimal"]


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_time_limits_are_positive(seconds):
    with pytest.raises(UsageError, match=r"time_limit=.*not above zero"):
        find_layout(build, 4, machine=FLAT, time_limit=seconds)


def test_what_takes_long_is_said(monkeypatch):
    monkeypatch.setattr(progress, "_AFTER", 0.01)
    shown = io.StringIO()
    monkeypatch.setattr("sys.stderr", shown)
    line = Progress("words")
    line.say("export of 5 operations")  # before it begins: a busy machine may take longer to the next line than _AFTER
    with line:
        for _ in range(6000):
            time.sleep(0.01)
            if shown.getvalue():
                break
    assert re.fullmatch(r"(words: export of 5 operations \[\d\d:\d\d\]\n)+", shown.getvalue())  # lines, in a file


def test_what_is_over_before_is_not(monkeypatch):
    monkeypatch.setattr(progress, "_AFTER", 3600.0)
    shown = io.StringIO()
    monkeypatch.setattr("sys.stderr", shown)
    with Progress("words") as line:
        line.say("export of 5 operations")
    assert not shown.getvalue()


@pytest.mark.parametrize("fixed", [{"hidden": "rows"}, {"width": None, "batch": None}])
def test_without_time_what_is_fixed_is_an_answer_of_a_program_that_takes_its_layout(fixed):
    best = find_layout(build_for, 4, machine=FLAT, fixed=fixed)
    found = find_layout(build_for, 4, machine=FLAT, time_limit=1e-9, fixed=fixed)
    assert not found.best.problem
    assert found.layout_rules == ";".join(f"{dim}:{axis}" for dim, axis in fixed.items() if axis)
    assert found.seconds >= best.seconds * (1 - 1e-9)
    assert found.seconds / (1 + found.search["gap"]) <= best.seconds * (1 + 1e-9)


def test_without_patience_what_is_fixed_is_an_answer_whether_a_program_takes_its_layout_or_not(monkeypatch):
    def takes_its_layout(mesh_shape, layout):
        return build()
    monkeypatch.setattr(search, "_PATIENCE", -1)
    monkeypatch.setattr(GraphSearch, "_verify", lambda _, shape, rules: Problem("", (), "never") if rules else None)
    for program in (build, takes_its_layout):
        found = find_layout(program, 4, machine=FLAT)
        assert (found.layout_rules, found.best.problem) == ("", "")
        assert not found.search["optimal"]
