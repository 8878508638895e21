"""Nodes like one that was made, by TensorFlow's C interface.

`Graph.create_op` defines a node as text, checks that and takes it apart again, asks for its device by functions, and
notes the Python stack: two thirds of the time that it takes. For nodes that are like one that it has made, and made in
one place, all of this is known.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Sequence
from typing import Any

from pase_mtf.compat import pywrap_tf_session, tf, tf_stack

__all__ = ["Maker", "Pattern"]


@dataclasses.dataclass(frozen=True)
class Pattern:
    """What is alike of nodes.

    Attributes:
      type: such as "MatMul".
      attributes: AttrValue by name, those of the definition.
      op_def: the definition of the type.
      serialized: the attributes as TensorFlow's C interface takes them.
      lists: per input of the definition, of how many tensors it is a list, or None where it is one tensor.
    """

    type: str
    attributes: Mapping[str, Any]
    op_def: Any
    serialized: tuple[tuple[str, bytes], ...]
    lists: tuple[int | None, ...]

    @classmethod
    def of(cls, operation: tf.Operation) -> Pattern:
        """That of a node, without attributes of its own (such as which other it is beside)."""
        definition, given = operation.op_def, operation.node_def.attr
        attributes = {attribute.name: given[attribute.name] for attribute in definition.attr}
        lists = [attributes[taken.number_attr].i if taken.number_attr
                 else len(attributes[taken.type_list_attr].list.type) if taken.type_list_attr else None
                 for taken in definition.input_arg]
        return cls(operation.type, attributes, definition,
                   tuple((name, value.SerializeToString()) for name, value in attributes.items()), tuple(lists))


class Maker:
    """Makes nodes of patterns, all in one place of a program: on the device and after the nodes that it asks for there.

        with Maker(tf.get_default_graph()) as maker:
            square = maker.make(pattern, "square", [x])

    Where something else is asked of nodes there (a loop, a function's graph, a gradient of their own, to be beside
    another, attributes), TensorFlow makes them.
    """

    def __init__(self, graph: tf.Graph) -> None:
        """Takes the graph, as it is asked for nodes now."""
        self._graph = graph
        self._is_plain = (
            type(graph) is tf.Graph and graph._get_control_flow_context() is None and not graph._attr_scope_map
            and not graph._container and not graph._op_to_kernel_label_map and not graph._gradient_override_map
            and not graph._colocation_stack)
        # Whether a device is asked for that does not depend on the node.
        self._one_device = all(asked.fast_string_merge for asked in graph._device_function_stack.peek_objs())
        self._first: tf.Operation | None = None
        self._lock = graph._mutation_lock()
        self._stack: Any = None

    def __enter__(self) -> Maker:
        self._lock.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: types.TracebackType | None) -> None:
        self._lock.__exit__(kind, error, traceback)

    def make(self, pattern: Pattern, name: str, inputs: Sequence[tf.Tensor]) -> tf.Operation:
        """A new node.

        Args:
          pattern: what it is.
          name: what it asks to be called, within the scope of the program; with a "/" at its end, a scope of its own
            that is there already.
          inputs: all tensors that it takes, one after the other.

        Raises:
          ValueError: it cannot take these.
        """
        graph = self._graph
        operations = {x.op for x in inputs}
        if not self._is_plain or any(operation._control_flow_context is not None for operation in operations):
            return graph._create_op_internal(pattern.type, list(inputs), name=name, attrs=pattern.attributes,
                                             op_def=pattern.op_def)
        graph._check_not_finalized()
        own = name[:-1] if name.endswith("/") else graph.unique_name(name)
        try:
            made = self._add(pattern, own, [x._as_tf_output() for x in inputs],
                             graph._control_dependencies_for_inputs(operations))
        except tf.errors.InvalidArgumentError as error:
            raise ValueError(error.message) from None  # as TensorFlow does
        operation = tf.Operation._from_c_op(made, graph)
        operation._gradient_function = graph._gradient_function_map.get(pattern.type)
        graph._record_op_seen_by_control_dependencies(operation)
        if self._first is None:
            graph._apply_device_functions(operation)
            self._first = operation if self._one_device else None
        else:
            operation._device_code_locations = self._first._device_code_locations
        operation._colocation_code_locations = {}
        return operation

    def _add(self, pattern: Pattern, name: str, inputs: Sequence[Any], waits: Sequence[tf.Operation]) -> Any:
        """Adds a node to TensorFlow's graph, without Python's side of it."""
        with self._graph._c_graph.get() as graph:
            made = pywrap_tf_session.TF_NewOperation(graph, pattern.type, name)
        if self._first is not None:
            pywrap_tf_session.TF_SetDevice(made, self._first.device)
        place = 0
        for count in pattern.lists:
            if count is None:
                pywrap_tf_session.TF_AddInput(made, inputs[place])
            else:
                pywrap_tf_session.TF_AddInputList(made, inputs[place:place + count])
            place += 1 if count is None else count
        for waited in waits:
            pywrap_tf_session.TF_AddControlInput(made, waited._c_op)
        for attribute, value in pattern.serialized:
            pywrap_tf_session.TF_SetAttrValueProto(made, attribute, value)
        node = pywrap_tf_session.TF_FinishOperation(made)
        if self._stack is None:
            self._stack = tf_stack.extract_stack(stacklevel=3)
        pywrap_tf_session.TF_SetOpStackTrace(node, self._stack)
        return node
