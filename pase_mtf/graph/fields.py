"""What a file of a computation graph holds."""

from __future__ import annotations

from typing_extensions import NotRequired, TypedDict

__all__ = ["EdgeFields", "GraphFields", "LayerFields", "OperandFields", "OperationFields"]


class OperandFields(TypedDict):
    """See `computation_graph.Operand`."""

    dims: list[str]
    shape: list[int]
    itemsize: int


class OperationFields(TypedDict):
    """See `computation_graph.LayerOperation`."""

    index: int
    name: str
    type: str
    phase: str
    kind: str
    flops: float
    dims: list[str]
    inputs: list[OperandFields]
    outputs: list[OperandFields]
    reduced: list[str]
    shift: list[str | int]
    nodes: int
    traffic: float
    rows: float
    role: str
    partial_sums: list[list[str]]
    trips: NotRequired[int]
    held: NotRequired[list[list[float]]]
    handed_on: NotRequired[list[int]]
    added_on: NotRequired[list[int]]
    looked_up: NotRequired[list[int]]
    broadcast_after: NotRequired[list[int]]
    summed_again: NotRequired[int]
    repeats: NotRequired[bool]


class _VariableFields(TypedDict):
    name: str
    operand: OperandFields
    trainable: bool
    updated_by: NotRequired[str]


class LayerFields(TypedDict):
    """See `computation_graph.Layer`."""

    name: str
    kind: str
    dims: dict[str, int]
    splittable: list[str]
    operations: list[OperationFields]
    variables: list[_VariableFields]
    aliases: dict[str, str]


class EdgeFields(TypedDict):
    """See `computation_graph.Edge`."""

    source: int
    target: int
    tensor: str
    phase: str
    shape: list[int]
    itemsize: int
    source_dims: list[str]
    target_dims: list[str]
    trips: NotRequired[int]
    pending: NotRequired[list[str]]
    added_to: NotRequired[list[str]]
    looked_up: NotRequired[list[int]]
    held: NotRequired[list[list[int]]]


class GraphFields(TypedDict):
    """All of it; see `computation_graph.ComputationGraph`."""

    format: str
    version: int
    hash: str
    name: str
    layers: list[LayerFields]
    edges: list[EdgeFields]
    operations: int
    meta: dict[str, object]
