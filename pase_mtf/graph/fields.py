"""What a file of a computation graph holds."""

from __future__ import annotations

from typing import Any

from typing_extensions import NotRequired, TypedDict

__all__ = ["GraphFields"]


class _OperandFields(TypedDict):
    dims: list[str]
    shape: list[int]
    itemsize: int


class _OperationFields(TypedDict):
    index: int
    name: str
    type: str
    phase: str
    kind: str
    flops: float
    dims: list[str]
    inputs: list[_OperandFields]
    outputs: list[_OperandFields]
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
    looked_up: NotRequired[list[int]]


class _VariableFields(TypedDict):
    name: str
    operand: _OperandFields
    trainable: bool
    updated_by: NotRequired[str]


class _LayerFields(TypedDict):
    name: str
    kind: str
    dims: dict[str, int]
    splittable: list[str]
    operations: list[_OperationFields]
    variables: list[_VariableFields]
    aliases: dict[str, str]


class _EdgeFields(TypedDict):
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
    looked_up: NotRequired[list[int]]
    held: NotRequired[list[list[int]]]


class GraphFields(TypedDict):
    """All of it; see `computation_graph.ComputationGraph`."""

    format: str
    version: int
    hash: str
    name: str
    layers: list[_LayerFields]
    edges: list[_EdgeFields]
    operations: int
    meta: dict[str, Any]
