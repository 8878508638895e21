"""Arguments of wrong types: every public function ends with one line that names the argument."""

import contextlib
import dataclasses
import inspect
import pathlib
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Optional, Union

import numpy as np
import pytest
from small_graphs import dense, perceptron

import pase_mtf
from pase_mtf.arguments import _expected, checked_arguments
from pase_mtf.calibration import load
from pase_mtf.compat import mtf, tf
from pase_mtf.epochs.curve import Run
from pase_mtf.errors import UsageError
from pase_mtf.graph.computation_graph import ComputationGraph
from pase_mtf.lowering.lowering import PlanLowering
from pase_mtf.machine.machine import Machine

# Of these nothing is right anywhere but where `_RIGHT` says so.
WRONG = (None, 3, -1, 2.5, float("nan"), True, "x", b"x", {}, (1, 2), object(), np.zeros(3), np.int64(4))

# (function, argument): values of `WRONG` that are right there, or for which another error is right, by their type.
_RIGHT = {
    ("find_layout", "machine"): (type(None),), ("find_layout", "mesh_shape"): (type(None),),
    ("find_layout", "devices"): (type(None), int, np.int64), ("find_layout", "memory_limit"): (type(None),),
    ("find_layout", "fixed"): (type(None), dict), ("find_layout", "outputs"): (dict,),
    ("find_layout", "exported"): (type(None),), ("find_layout", "name"): (str,),
    ("find_layout", "alternatives"): (int, np.int64), ("find_layout", "prices"): (type(None),),
    ("find_layout", "measure_seconds"): (int, float, np.int64),
    ("find_layout", "time_limit"): (type(None), int, float, np.int64),
    ("find_strategy", "devices"): (int, np.int64), ("find_strategy", "machine"): (type(None),),
    ("find_strategy", "mesh"): (type(None),), ("find_strategy", "idle"): (bool,),
    ("find_strategy", "start_from"): (type(None),), ("find_strategy", "memory_limit"): (type(None),),
    ("find_strategy", "simple_within"): (int, float, np.int64),
    ("find_strategy", "prices"): (type(None),),
    ("find_strategy", "simulate"): (int, np.int64, type(None)),
    ("find_strategy", "measure_seconds"): (int, float, np.int64),
    ("evaluate_strategy", "devices"): (int, np.int64), ("evaluate_strategy", "machine"): (type(None),),
    ("evaluate_strategy", "search"): (type(None), dict), ("evaluate_strategy", "name"): (str,),
    ("export_graph", "name"): (str,), ("export_graph", "meta"): (type(None), dict),
    ("export_graph", "alike"): (type(None),), ("export_graph", "sharded_updates"): (bool,),
    ("export_graph", "turns"): (bool,),
    ("find_strategy", "sharded_updates"): (bool,), ("find_strategy", "known"): (type(None),),
    ("lower", "step"): (type(None),), ("lower", "rank"): (type(None),),
    ("register_operation", "kind"): (type(None),), ("register_operation", "flops"): (type(None),),
    ("register_operation", "contracted"): (type(None),), ("register_operation", "lower"): (type(None),),
    # Its machine and its method are looked up when the program comes to mtf.Lowering.
    ("swap_lowering", "strategy"): (type(None),), ("swap_lowering", "devices"): (type(None),),
    ("swap_lowering", "machine"): (type(None), str), ("swap_lowering", "method"): (str,),
    ("project_training", "extrapolate"): (bool,), ("project_training", "devices"): (tuple,),
    ("project_training", "ways"): (tuple,),
    ("solve", "method"): (), ("solve", "time_limit"): (type(None), int, float, np.int64),
    ("solve", "gap"): (int, float, np.int64), ("solve", "progress"): (type(None), bool)}


def _entered(function):
    def call(**arguments):
        with function(**arguments):
            pass
    return call


@pytest.fixture(scope="module")
def calls():
    """Function -> (the call, arguments that are right)."""
    program = mtf.Graph()
    mesh = mtf.Mesh(program, "mesh")
    batch, width = mtf.Dimension("batch", 4), mtf.Dimension("width", 4)
    with tf.Graph().as_default():
        x = mtf.import_tf_tensor(mesh, tf.zeros([4, 4]), mtf.Shape([batch, width]))
        loss = mtf.reduce_mean(mtf.layers.dense(x, mtf.Dimension("out", 4), name="dense"))
        mtf.gradients([loss], [variable.outputs[0] for variable in program.trainable_variables])
        graph = perceptron((8, 8), batch=8)
        strategy = pase_mtf.find_strategy(pase_mtf.export_graph(program), devices=2, machine="h100")
        of_graph = {"graph": graph, "devices": 2, "machine": "h100"}
        yield {
            "find_layout": (pase_mtf.find_layout, {**of_graph, "graph": program}),
            "find_strategy": (pase_mtf.find_strategy, of_graph),
            "evaluate_strategy": (pase_mtf.evaluate_strategy, {**of_graph, "configurations":
                                  pase_mtf.find_strategy(**of_graph).configurations}),
            "export_graph": (pase_mtf.export_graph, {"graph": program}),
            "lower": (pase_mtf.lower, {"graph": program, "strategy": strategy, "devices": ["cpu:0", "cpu:0"]}),
            "register_operation": (pase_mtf.register_operation,
                                   {"operation_class": type("Own", (mtf.Operation,), {}), "splittable": []}),
            "one_layer": (_entered(pase_mtf.one_layer), {"graph": program}),
            "swap_lowering": (_entered(pase_mtf.swap_lowering), {"machine": "h100"}),
            "project_training": (pase_mtf.project_training, {
                "curve": pase_mtf.EpochCurve((Run(8, 2.0),)), "steps": pase_mtf.StepTimes(8, {(1, 1): 0.5}),
                "devices": (1,)}),
            "solve": (pase_mtf.solve, {"network": None})}


@pytest.mark.parametrize("name", ["find_layout", "find_strategy", "evaluate_strategy", "export_graph", "lower",
                                  "register_operation", "one_layer", "swap_lowering", "project_training",
                                  "solve"])
def test_wrong_types_end_in_one_line(calls, name):
    call, right = calls[name]
    for argument, parameter in inspect.signature(getattr(pase_mtf, name)).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        for value in WRONG:
            if type(value) in _RIGHT.get((name, argument), ()):
                continue
            with pytest.raises(pase_mtf.PaseError) as caught:
                call(**{**right, argument: value})
            assert "\n" not in str(caught.value)
            assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", ["find_layout", "find_strategy", "evaluate_strategy"])
def test_the_machine_is_given_alike_everywhere(calls, monkeypatch, tmp_path, name):
    """A Machine, a name, the path of a file as a string or a Path, or what is at hand, which is the default."""
    call, right = calls[name]
    here = dataclasses.replace(Machine.load("a100"), name="here")
    monkeypatch.setattr(load, "_kept", lambda *_: here)
    here.save(tmp_path / "here.json")
    assert call(**{**right, "machine": "a100"}).machine_name == "a100"
    for given in (here, str(tmp_path / "here.json"), tmp_path / "here.json", "local", pathlib.Path("local"), None):
        assert call(**{**right, "machine": given}).machine_name == "here"
    assert call(**{key: value for key, value in right.items() if key != "machine"}).machine_name == "here"


def test_numbers_of_numpy_are_numbers(calls):
    call, right = calls["find_strategy"]
    assert call(**{**right, "devices": np.int64(4)}).devices == 4


@checked_arguments
def _collected(names: Sequence[str], more: Iterable[str] | None = None, one: str | Iterable[str] = "x") -> None:
    pass


@pytest.mark.parametrize(("arguments", "name"), [
    (("abc",), "names='abc'"), ((b"abc",), "names=b'abc'"), ((["abc"], "abc"), "more='abc'"),
    ((["abc"], None, b"x"), "one=b'x'")])
def test_a_string_is_no_collection_of_its_letters(arguments, name):
    _collected(["abc"], ("abc",), "abc")
    with pytest.raises(UsageError, match=re.escape(f"_collected: {name}: is one ") + "(str|bytes); give a list"):
        _collected(*arguments)


@pytest.mark.parametrize("devices", [["/device:CPU:0", "nix%"], ["/cpu:a", "/cpu:b"]])
def test_what_names_no_device(calls, devices):
    lower, right = calls["lower"]
    swap, _ = calls["swap_lowering"]
    for call in (lambda: lower(**{**right, "devices": devices}), lambda: swap(machine="h100", devices=devices),
                 lambda: PlanLowering(right["graph"], {}, devices)):
        with pytest.raises(UsageError, match="no name of a device; write it as in /device:CPU:0"):
            call()


@checked_arguments
def _function(count: int, names: list[str], rate: float = 0.5, *, on: bool = False, **options: object) -> str:
    return f"{count} {names} {rate} {on} {options}"


@pytest.mark.parametrize(("arguments", "message"), [
    ((True, []), "_function: count=True: is a truth value, not a number"),
    (("3", []), "_function: count='3': is no int"),
    ((3, ["a", 1]), "_function: names=['a', 1]: item 1 of list is not an instance of str"),
    ((3, [1]), "_function: names=[1]: item 0 of list is not an instance of str"),
    ((3, [], 1), None), ((3, [], "1"), "rate='1'")])
def test_the_message_names_the_argument(arguments, message):
    if message is None:
        assert _function(*arguments, more=1).startswith("3 ")
    else:
        with pytest.raises(UsageError, match=re.escape(message)):
            _function(*arguments)


@checked_arguments
def _nested(fixed: Mapping[str, str | None] | None = None, mesh: Sequence[tuple[str, int]] | None = None,
            pairs: Sequence[str | tuple[str | int, str]] = (), call: Callable[..., int] | None = None) -> object:
    return fixed, mesh, pairs, call


@pytest.mark.parametrize(("arguments", "message"), [
    ({"fixed": {"batch": 3}}, "fixed={'batch': 3}: value of key 'batch' is no str or None"),
    ({"fixed": {3: "rows"}}, "fixed={3: 'rows'}: key 3 is not an instance of str"),
    ({"fixed": 3}, "fixed=3: is no Mapping or None"),
    ({"mesh": [("rows", 2.5)]}, "mesh=[('rows', 2.5)]: item 1 of item 0 is not an instance of int"),
    ({"mesh": [("rows",)]}, "mesh=[('rows',)]: item 0 has wrong number of elements (expected 2, got 1 instead)"),
    ({"pairs": [(2.5, "x")]}, "pairs=[(2.5, 'x')]: item 0 of list: item 0 is no str or int"),
    ({"pairs": [2.5]}, "pairs=[2.5]: item 0 of list is no str or tuple"),
    ({"call": 3}, "call=3: is no function or None")])
def test_what_is_wrong_in_a_collection_is_told(arguments, message):
    with pytest.raises(UsageError) as caught:
        _nested(**arguments)
    assert str(caught.value) == f"_nested: {message}"


def test_collections_of_something_are_no_classes_where_python_takes_them_for_types(monkeypatch):
    """As Python 3.10 does, which promises `isinstance(list[str], type)` and raises at `isinstance(x, list[str])`."""
    monkeypatch.setattr("pase_mtf.arguments.isinstance", lambda value, classes: isinstance(value, classes) or (
        classes is type and typing.get_origin(value) is not None), raising=False)
    _expected.cache_clear()
    hints = (list[str], str | Sequence[str], dict[str, int] | None, Callable[..., int], Any)
    assert [_expected(hint).classes for hint in hints] == [(), (str,), (type(None),), (), (object,)]
    _nested(fixed={"batch": "rows"}, mesh=[("rows", 2)], call=len)


def test_a_union_is_one_however_it_is_written():
    for hint in (int | None, Optional[int], Union[int, None]):  # noqa: UP007, UP045 (as Python 3.10 has it)
        assert _expected(hint)[:2] == ((int, type(None)), (int, type(None)))


def test_numbers_of_numpy_are_numbers_in_collections():
    mesh = [("rows", 2), ("cols", 2)]
    _, given, (pair, text), _ = _nested(mesh=[("rows", 2), ("cols", np.int64(2))], pairs=((np.int64(3), "x"), "y"))
    assert given == mesh
    assert [type(size) for _, size in given] == [int, int]
    assert (pair, type(pair[0]), text) == ((3, "x"), int, "y")
    assert _nested(mesh=mesh)[1] is mesh
    graph = ComputationGraph("attention", (dense("layer", 8, 8, 8, dims=("batch", "d_model", "heads")),), (), 4)
    strategy = pase_mtf.find_strategy(graph, 4, "h100", "expert",
                                      mesh=[("rows", np.int64(2)), ("cols", np.int64(2))])
    assert strategy.devices == 4


def test_a_limit_is_told_by_the_name_that_it_has_here(calls):
    call, right = calls["find_layout"]
    with pytest.raises(UsageError, match=r"^find_layout: memory_limit=lots: give bytes"):
        call(**{**right, "memory_limit": "lots"})


def test_a_wrong_call_is_pythons_own_error():
    with pytest.raises(TypeError, match="missing a required argument"), contextlib.suppress(UsageError):
        _function(3)


@pytest.mark.parametrize(("argument", "value"), [
    ("compare", ["all:2;batch:all", None]), ("compare", ["all:2;batch:all", ("all:2",)]),
    ("together", [("batch", "width"), 5]), ("fixed", {"batch": "rows", "width": 3})])
def test_later_items_of_a_collection_are_looked_at(calls, argument, value):
    call, right = calls["find_layout"]
    with pytest.raises(UsageError, match=f"^find_layout: {argument}="):
        call(**{**right, argument: value})
