"""The ways by which tensors are made of others."""

from nets import Builder, dim

from pase_mtf.compat import mtf, tf
from pase_mtf.operations.flow import Ways


def test_a_way_is_told_once():
    """However many end where another passed by: a graph with a skip from its first layer to each has thousands."""
    with tf.Graph().as_default():
        builder = Builder(tf.float32)
        start = builder.input("x", [dim("x", 4)]) * 2.0
        beside = mtf.exp(builder.input("y", [dim("x", 4)]))
        chain = [start]
        for _ in range(4):
            chain.append(mtf.tanh(chain[-1]) * beside)
        whole = mtf.cast(mtf.cast(chain[-1], tf.int32), tf.float32)
    ways = Ways({operation: number for number, operation in enumerate(builder.graph.operations)})
    first = ways.between(start, [chain[2], start])
    tanh, product = chain[1].operation.inputs[0].operation, chain[1].operation
    assert first[:2] == [(tanh, start), (product, tanh.outputs[0])]
    assert len(first) == 4
    assert all(read not in (beside, beside.operation.inputs[0]) for _, read in first)
    again = ways.between(start, [chain[4]])
    assert {operation for operation, _ in again}.isdisjoint({operation for operation, _ in first})
    assert len(again) == 4
    last = ways.between(start, [chain[3]])
    assert last == [(chain[3].operation, chain[3].operation.inputs[0])]
    assert ways.between(chain[3], [start, beside]) == []  # they were made before
    assert ways.between(start, [whole]) == []  # whole numbers have no gradient
