"""TensorFlow nodes as kernels, and kernels as nodes: what was lowered can be written down, timed, and found again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pase_mtf.compat import op_def_registry, tf
from pase_mtf.machine.kernels import Block, Kernel

__all__ = ["IDLE_NODES", "kernel_of", "node_of"]

IDLE_NODES = frozenset({"Const", "Placeholder", "NoOp", "VarHandleOp", "ReadVariableOp", "Identity", "IdentityN",
                        "Shape", "ShapeN", "StopGradient", "PreventGradient", "VarIsInitializedOp", "_Send", "_Recv",
                        # Timed, they would print on every device, run after run, what no program holds.
                        "Print", "PrintV2", "StringFormat"})
"""Neither compute nor copy anything, but for what people read."""

_FEW = 16  # elements of a constant on whose values a kernel may depend: axes and shapes


def kernel_of(node: tf.Operation) -> Kernel | None:
    """The kernel of a node; None where it has none, or where its sizes are only known when it runs."""
    if node.type in IDLE_NODES:
        return None
    inputs, outputs = [_block(tensor) for tensor in node.inputs], [_block(tensor) for tensor in node.outputs]
    known = [block for block in inputs if block is not None]
    if not all(block or tensor.dtype == tf.resource for block, tensor in zip(inputs, node.inputs, strict=True)) or any(
            block is None for block in outputs):
        return None
    if node.type == "Slice" and inputs[1] is not None:  # from wherever
        inputs[1] = inputs[1]._replace(value=(0,) * inputs[1].elements)
    # A variable has the shape of what it is given.
    shape = max((block.shape for block in known), key=len, default=())
    return Kernel(node.type, tuple(block or Block("resource", shape) for block in inputs),
                  tuple(block for block in outputs if block is not None), _attributes(node),
                  any(tensor.device not in ("", node.device) for tensor in node.inputs))


def _block(tensor: tf.Tensor) -> Block | None:
    """The tensor; None where its shape is not known, and of a variable."""
    if tensor.dtype == tf.resource or not tensor.shape.is_fully_defined():
        return None
    shape, value = tuple(tensor.shape.as_list()), None
    if tensor.op.type == "Const" and tensor.dtype.is_integer and (tensor.shape.num_elements() or 0) <= _FEW:
        value = tuple(map(int, tf.make_ndarray(tensor.op.get_attr("value")).ravel()))
    return Block(tensor.dtype.base_dtype.name, shape, value)


def _inferred(definition: tf.OpDef) -> set[str]:
    """The attributes that the inputs of an operation tell."""
    return {name for argument in definition.input_arg
            for name in (argument.type_attr, argument.number_attr, argument.type_list_attr) if name}


def _attributes(node: tf.Operation) -> tuple[tuple[str, object], ...]:
    definition = node.op_def
    defaults = {attr.name: attr.default_value for attr in definition.attr if attr.HasField("default_value")}
    left_out = _inferred(definition)
    found = []
    for name, value in sorted(node.node_def.attr.items()):
        if name.startswith("_") or name in left_out or name in ("shared_name", "container", "seed", "seed2"):
            continue
        if name in defaults and value.SerializeToString(deterministic=True) == defaults[name].SerializeToString(
                deterministic=True):
            continue
        found.append((name, _plain(value)))
    return tuple(found)


def _plain(value: tf.AttrValue) -> object:
    """An attribute's value in plain Python."""
    kind = value.WhichOneof("value")
    if kind == "s":
        return value.s.decode(errors="replace")
    if kind == "type":
        return str(tf.as_dtype(value.type).name)
    if kind == "shape":
        return tuple(int(dim.size) for dim in value.shape.dim)
    if kind == "list":
        items = value.list
        return (*items.i, *items.f, *items.b, *(text.decode(errors="replace") for text in items.s),
                *(tf.as_dtype(entry).name for entry in items.type))
    if kind in ("i", "f", "b"):
        return getattr(value, kind)
    return str(value)  # a function or a tensor: such a node cannot be made again from here


def node_of(kernel: Kernel, name: str, inputs: Sequence[str], device: str) -> tf.NodeDef:
    """The node of a kernel, for a GraphDef: a tenth of the time in which TensorFlow's Python makes a node.

    Args:
      kernel: which.
      name: of the node.
      inputs: names of tensors like its own (variables' handles where these are resources), then "^" and names of the
        nodes that it is to wait for.
      device: on which it is.

    Raises:
      ValueError: TensorFlow has no such operation, or it has no such attribute.
    """
    definition = op_def_registry.get(kernel.operation)
    if definition is None:
        raise ValueError(f"TensorFlow has no operation {kernel.operation}")
    attributes = _told_by(definition, kernel.inputs)
    types = {attr.name: attr.type for attr in definition.attr}
    for attribute, value in kernel.attributes:
        if attribute not in types:
            raise ValueError(f"{kernel.operation} has no attribute {attribute}")
        attributes[attribute] = _proto(types[attribute], value)
    return tf.NodeDef(name=name, op=kernel.operation, input=inputs, device=device, attr=attributes)


def _told_by(definition: tf.OpDef, inputs: Sequence[Block]) -> dict[str, tf.AttrValue]:
    """The attributes that the inputs tell: their types, and how many there are."""
    singles = sum(not (argument.number_attr or argument.type_list_attr) for argument in definition.input_arg)
    resources = [block.dtype for block in inputs if block.dtype != "resource"]
    found = {attr.name: _proto("type", resources[0]) for attr in definition.attr
             if attr.name == "dtype" and attr.type == "type" and resources}  # of the variable that is assigned to
    waiting = list(inputs)
    for argument in definition.input_arg:
        several = argument.number_attr or argument.type_list_attr
        count = len(inputs) - singles if several else 1  # a list of them is all that the others leave
        taken, waiting = waiting[:count], waiting[count:]
        if argument.number_attr:
            found[argument.number_attr] = _proto("int", count)
        if argument.type_list_attr:
            found[argument.type_list_attr] = _proto("list(type)", [block.dtype for block in taken])
        if argument.type_attr and taken:
            found[argument.type_attr] = _proto("type", taken[0].dtype)
    return found


def _proto(kind: str, value: Any) -> tf.AttrValue:
    """An attribute's value in TensorFlow's own words."""
    match kind:
        case "type":
            return tf.AttrValue(type=tf.as_dtype(value).as_datatype_enum)
        case "int":
            return tf.AttrValue(i=value)
        case "float":
            return tf.AttrValue(f=value)
        case "bool":
            return tf.AttrValue(b=value)
        case "string":
            return tf.AttrValue(s=value.encode())
        case "shape":
            return tf.AttrValue(shape=tf.TensorShape(value).as_proto())
        case "list(int)":
            return tf.AttrValue(list=tf.AttrValue.ListValue(i=value))
        case "list(float)":
            return tf.AttrValue(list=tf.AttrValue.ListValue(f=value))
        case "list(type)":
            return tf.AttrValue(list=tf.AttrValue.ListValue(type=[tf.as_dtype(entry).as_datatype_enum
                                                                  for entry in value]))
        case "list(string)":
            return tf.AttrValue(list=tf.AttrValue.ListValue(s=[entry.encode() for entry in value]))
    raise ValueError(f"an attribute of kind {kind} cannot be written down")
