
import os

import pytest

from pase_mtf.errors import UsageError
from pase_mtf.launch.flag_values import fitting_arms, parse_arms, parse_mesh


@pytest.mark.parametrize(("text", "devices", "axes"), [
    ("8", 8, ()),
    (" 1 ", 1, ()),
    ("rows:2;cols:4", 8, (("rows", 2), ("cols", 4))),
    ("all:3", 3, (("all", 3),)),
    ("a:2,b:3", 6, (("a", 2), ("b", 3))),
])
def test_reads_a_mesh(text, devices, axes):
    mesh = parse_mesh(text)
    assert (mesh.devices, mesh.axes) == (devices, axes)


@pytest.mark.parametrize(("text", "names"), [
    ("0", "fewer than one"), ("-4", "fewer than one"), ("rows:0", "fewer than one"),
    ("rows:-1;cols:2", "fewer than one"), ("", "axis:size"), ("eight", "axis:size"), ("2x4", "axis:size"),
    ("rows:2;", "axis:size"), ("rows=2", "axis:size"),
    ("rows:2;rows:4", "twice"), ("99999999", "at most"), ("1.5", "axis:size"),
])
def test_refuses_a_mesh_in_one_line(text, names):
    with pytest.raises(UsageError) as caught:
        parse_mesh(text)
    message = str(caught.value)
    assert names in message
    assert f"--mesh={text}" in message
    assert "\n" not in message


def test_a_mesh_names_a_folder():
    assert parse_mesh("8").file_name == "8"
    assert parse_mesh("rows:2;cols:4").file_name == "rows2-cols4"


def _names(strategy, compare):
    return [arm.name for arm in parse_arms(strategy, compare)]


@pytest.mark.parametrize(("strategy", "compare", "expected"), [
    ("search", "data_parallel,expert,search", ["search", "stock_data_parallel", "data_parallel", "expert"]),
    ("search", "none", ["search"]),
    ("search", "", ["search"]),
    ("data_parallel", "search", ["data_parallel", "search"]),
    ("data_parallel", "data_parallel", ["data_parallel", "stock_data_parallel"]),
    ("expert", "random:2,search", ["expert", "search", "random_0", "random_1"]),
    ("search", "changed:2,random:1", ["search", "random_0", "changed_0", "changed_1"]),
    ("search", "within:2,random:1", ["search", "random_0", "within_0", "within_1"]),
    ("search", "stock_data_parallel", ["search", "stock_data_parallel"]),
    ("search", "mcmc_expert,expert,mcmc", ["search", "expert", "mcmc", "mcmc_expert"]),
    ("search", "auto_mtf,mcmc", ["search", "mcmc", "auto_mtf"]),
    ("some/mine.json", "search,other/mine.json", ["mine", "search", "other/mine.json"]),
    ("some/search.json", "search", ["file_search", "search"]),
    ("some/data_parallel_tuned.json", "data_parallel", ["file_data_parallel_tuned", "stock_data_parallel",
                                                        "data_parallel"]),
    ("search", "m\udcfc.json,other/m\udcfc.json", ["search", r"m\udcfc", r"other/m\udcfc.json"]),
    ("search", "some/random_0.json,random:1,expert,expert.json", ["search", "expert", "file_random_0", "file_expert",
                                                                 "random_0"]),
])
def test_reads_arms(strategy, compare, expected):
    assert _names(strategy, compare) == expected


@pytest.mark.parametrize(("strategy", "compare", "offered"), [
    ("serach", "none", "'search'"), ("search", "exprt", "'expert'"), ("search", "data-parallel", "'data_parallel'"),
    ("random:2", "none", "known"), ("stock_data_parallel", "none", "choose one of"), ("mcmc", "none", "choose one of"),
    ("search", "random:0", "random:3"), ("search", "changed:65", "changed:3"), ("changed:1", "none", "known"),
    ("search", "random:x", "random:3"), ("search", "random:²", "random:3"),
    ("search", "random:" + "9" * 5000, "random:3"), ("search", "random", "random:3"),
    ("search", "within:0", "within:3"), ("within:1", "none", "known"),
    ("search", "within:2,within:4", "of within:2 and of within:4 have the same names; give one"),
])
def test_offers_the_nearest_arm(strategy, compare, offered):
    with pytest.raises(UsageError, match=offered):
        parse_arms(strategy, compare)


@pytest.mark.parametrize("text", ["9" * 5000, "a:" + "9" * 5000, ";".join(f"a{n}:999999999" for n in range(600))])
def test_numbers_of_thousands_of_digits(text):
    with pytest.raises(UsageError, match="can be driven"):
        parse_mesh(text)


@pytest.mark.parametrize(("batch", "devices", "suffix"), [(64, 8, ""), (64, 12, "_8"), (60, 7, "_6"), (36, 96, "_36")])
def test_data_parallelism_over_what_divides_the_batch(batch, devices, suffix):
    arms = fitting_arms(parse_arms("search", "data_parallel"), batch, devices)
    assert [arm.name for arm in arms] == ["search", f"stock_data_parallel{suffix}", f"data_parallel{suffix}"]
    arms = fitting_arms(parse_arms("search", "zero,mcmc"), batch, devices)
    assert [arm.name for arm in arms] == ["search", f"zero{suffix}", "mcmc"]


@pytest.mark.parametrize(("strategy", "compare"), [(os.devnull, "none"), ("search", f"expert,{os.devnull}")])
def test_a_pipe_is_no_file_of_a_strategy(strategy, compare):
    """Arms are parsed more than once, and nobody can read it twice."""
    with pytest.raises(UsageError, match="is a device or a pipe; name a file"):
        parse_arms(strategy, compare)
