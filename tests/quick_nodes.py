"""TensorFlow's functions in less than half their time: nodes of one kind are made as the first of them was.

Nearly all that a test of a strategy takes is the making of nodes, and most of that is Python that finds out, node by
node, which types and attributes follow from the arguments. Here that is asked once for all arguments that are alike,
and the node is made by TensorFlow's C interface. `test_quick_nodes` holds the graphs to those that TensorFlow makes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import numpy as np
from tensorflow.python.framework import op_def_library, op_def_registry, ops

from pase_mtf.compat import tf
from pase_mtf.lowering.new_node import Maker, Pattern

_SCALARS = (bool, int, float, np.generic)
_PLAIN = (bool, int, float, str, bytes, type(None), tf.DType)
_FEW = 64  # elements of a constant that is remembered
_APPLY, _CONSTANT = op_def_library._apply_op_helper, ops._create_graph_constant


class _Known(NamedTuple):
    """What follows from arguments: the node, the types of its inputs, and what TensorFlow says of its outputs."""

    pattern: Pattern
    dtypes: tuple[tf.DType, ...]
    structure: tuple[Any, ...]
    is_stateful: bool


_known: dict[Hashable, _Known] = {}
_constants: dict[Hashable, Pattern] = {}


@functools.cache
def _inputs(kind: str) -> dict[str, tuple[str, bool]]:
    """Argument -> (input, whether it is a list), of a kind of node, in the order of its definition."""
    taken = [(one.name, bool(one.number_attr or one.type_list_attr)) for one in op_def_registry.get(kind).input_arg]
    return {argument: (name, is_list) for name, is_list in taken
            for argument in (name, f"{name}_")}  # as Python has keywords of its own


def _is_tensor(x: Any, graph: tf.Graph) -> bool:
    return isinstance(x, tf.Tensor) and x.graph is graph and not x.dtype._is_ref_dtype


def _like(value: Any) -> Hashable:
    """What the type of a constant may depend on; None where it may be of anything."""
    if isinstance(value, np.ndarray):
        return "array", value.dtype.str
    values = value if isinstance(value, (list, tuple)) else [value]
    if not values or not isinstance(values[0], _SCALARS) or len(set(map(type, values))) > 1:
        return None
    if isinstance(values[0], int) and not all(-2 ** 31 <= x < 2 ** 31 for x in values):
        return None  # of 64 bits, where an attribute does not say otherwise
    return type(values[0]), values is value


def _key(kind: str, arguments: Mapping[str, Any], graph: tf.Graph) -> Hashable:
    """What nodes have in common that are made alike; None where that is not known."""
    inputs, found = _inputs(kind), [kind]
    for name, value in arguments.items():
        part: Hashable = None
        if name not in inputs:
            if isinstance(value, _PLAIN):
                part = type(value), value
            elif isinstance(value, (list, tuple)) and all(isinstance(x, _PLAIN) for x in value):
                part = tuple((type(x), x) for x in value)
        elif inputs[name][1]:
            if isinstance(value, (list, tuple)) and value and all(_is_tensor(x, graph) for x in value):
                part = tuple(x.dtype for x in value)
        elif _is_tensor(value, graph):
            part = value.dtype
        else:
            part = _like(value)
        if part is None:
            return None
        found.append((name, part))
    return tuple(found)


def _is_plain(graph: tf.Graph) -> bool:
    return type(graph) is tf.Graph and graph._get_control_flow_context() is None


def _apply(slow: Callable[..., Any], kind: str, name: str | None = None, **arguments: Any) -> Any:
    """As TensorFlow's `_apply_op_helper`."""
    graph = tf.get_default_graph()
    key = _key(kind, arguments, graph) if _is_plain(graph) else None
    known = _known.get(key)
    if known is None:
        structure, is_stateful, operation, outputs = slow(kind, name, **arguments)
        if key is not None:
            _known[key] = _Known(Pattern.of(operation), tuple(x.dtype for x in operation.inputs), tuple(structure),
                                 is_stateful)
        return structure, is_stateful, operation, outputs
    inputs: list[Any] = []
    constants = []
    for argument, (taken, is_list) in _inputs(kind).items():
        if argument not in arguments:
            continue
        value = arguments[argument]
        if is_list:
            inputs += value
            continue
        if not isinstance(value, tf.Tensor):
            constants.append((len(inputs), taken))
        inputs.append(value)
    name = name or kind
    if constants:
        with graph.name_scope(name) as name:
            for place, taken in constants:
                inputs[place] = ops._create_graph_constant(inputs[place], known.dtypes[place], None, taken, False,
                                                           True)
    with Maker(graph) as maker:
        operation = maker.make(known.pattern, name, inputs)
    return list(known.structure), known.is_stateful, operation, operation.outputs


def _value(value: Any) -> Hashable:
    """What stands for a small constant; None for another."""
    if isinstance(value, np.ndarray):
        if 0 < value.size <= _FEW and value.dtype.kind in "biuf":
            return value.dtype.str, value.shape, value.tobytes()
    elif isinstance(value, _SCALARS):
        return type(value), str(value)  # for nan is not itself, and 0.0 is -0.0
    elif isinstance(value, (list, tuple)) and len(value) <= _FEW and all(isinstance(x, _SCALARS) for x in value):
        return tuple((type(x), str(x)) for x in value)
    return None


def _constant(slow: Callable[..., Any], value: Any, dtype: Any, shape: Any, name: str | None, *how: bool) -> tf.Tensor:
    """As TensorFlow's `_create_graph_constant`."""
    graph = tf.get_default_graph()
    key = _value(value) if shape is None and _is_plain(graph) else None
    if key is None:
        return slow(value, dtype, shape, name, *how)
    pattern = _constants.get((key, dtype, how))
    if pattern is None:
        made = slow(value, dtype, shape, name, *how)
        _constants[key, dtype, how] = Pattern.of(made.op)
        return made
    with Maker(graph) as maker:
        return maker.make(pattern, name or "Const", ()).outputs[0]


def install(quick: bool) -> None:
    """Has nodes of one kind made as the first of them was, or by TensorFlow alone."""
    op_def_library._apply_op_helper = functools.partial(_apply, _APPLY) if quick else _APPLY
    ops._create_graph_constant = functools.partial(_constant, _CONSTANT) if quick else _CONSTANT
