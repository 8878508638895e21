"""Which nodes are run of those that are emitted, against the graphs that TensorFlow makes of them."""

import collections

from harness import device_names
from hypothesis import given, settings
from hypothesis import strategies as st

from pase_mtf.compat import tf
from pase_mtf.lowering.equal_nodes import first_of_equal
from pase_mtf.runtime import Devices, session_config

_TWO = {"Add": tf.add, "Sub": tf.subtract, "Mul": tf.multiply, "AddN": lambda x, y: tf.add_n([x, y]),
        "Maximum": tf.maximum}
_ONE = {"Tanh": tf.tanh, "cast": lambda x: tf.cast(tf.cast(x, tf.float64), tf.float32),
        "half": lambda x: tf.cast(tf.cast(x, tf.float16), tf.float32), "random": lambda x: x + tf.random.uniform([]),
        "first": lambda x: tf.unstack(tf.stack([x, x]))[0], "second": lambda x: tf.unstack(tf.stack([x, -x]))[1]}
_STEPS = st.lists(st.tuples(st.sampled_from([*_TWO, *_ONE]), st.integers(0, 3), st.integers(0, 3), st.integers(0, 1),
                            st.booleans()), min_size=1, max_size=12)


@settings(deadline=None, max_examples=30)
@given(_STEPS)
def test_tensorflow_runs_the_first_of_equal_nodes(steps):
    """Of any graph of operations that read the same few tensors, on two devices, some of them waiting for others."""
    devices = device_names(2)
    with tf.Graph().as_default() as graph:
        with tf.device(devices[0]):
            made = [tf.placeholder(tf.float32, []) for _ in range(2)]
        for name, one, other, device, waits in steps:
            operands = [made[number % len(made)] for number in (one, other)]
            with tf.device(devices[device]), tf.control_dependencies(operands[1:] if waits else []):
                made.append(_TWO[name](*operands) if name in _TWO else _ONE[name](operands[0]))
        read = tf.group(made)
        nodes = set(graph.get_operations())
        found = collections.Counter(node.type for node in first_of_equal(graph.get_operations()))
        metadata = tf.RunMetadata()
        with tf.Session(graph=graph, config=session_config(Devices.first(2, "cpu"))) as session:
            session.run(read, {made[0]: 1.0, made[1]: 2.0}, tf.RunOptions(output_partition_graphs=True), metadata)
    kinds = {node.type for node in nodes} - {"Placeholder", "NoOp", "Const"}
    run = collections.Counter(node.op for part in metadata.partition_graphs for node in part.node if node.op in kinds)
    assert run == collections.Counter({kind: times for kind, times in found.items() if kind in kinds})


def test_what_comes_from_the_iteration_before():
    with tf.Graph().as_default() as graph:
        enter = tf.raw_ops.Enter(data=tf.constant(0.0), frame_name="loop")
        merge = tf.raw_ops.Merge(inputs=[enter, enter])
        again = tf.raw_ops.NextIteration(data=tf.tanh(merge.output))
        merge.output.op._update_input(1, again)
        tf.tanh(merge.output)
        assert collections.Counter(node.type for node in first_of_equal(graph.get_operations())) == {
            "Const": 1, "Enter": 1, "Merge": 1, "NextIteration": 1, "Tanh": 1}
