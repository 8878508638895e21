"""Reshapes under layouts, simulated, against what stock Mesh-TF makes of them."""

import numpy as np
import pytest
from harness import device_names, session

from pase_mtf.compat import mtf, placement_mesh_impl, tf
from pase_mtf.operations.stock_reshape import reshape_problem

_MESHES = [(2, 2), (2, 4), (4, 2), (2, 2, 2), (3, 2), (1, 4)]


def random_shape(rng, total):
    """Dims of a random factorisation, with random names."""
    sizes, rest = [], total
    while rest > 1 and len(sizes) < 4:
        sizes.append(int(rng.choice([n for n in range(2, rest + 1) if rest % n == 0])))
        rest //= sizes[-1]
    sizes = [*sizes, rest] if rest > 1 else sizes
    if rng.random() < 0.2:
        sizes.insert(int(rng.integers(len(sizes) + 1)), 1)
    names = rng.permutation(list("tuvwxyz"))[:len(sizes)]
    return tuple((str(name), size) for name, size in zip(names, sizes, strict=True))


def shared_axis(dims, axis_of):
    axes = [axis_of[name] for name, _ in dims if name in axis_of]
    return len(set(axes)) < len(axes)


def cases(seed, count):
    """(dims before, dims after, dim -> axis, sizes of the mesh), with no two dims of a tensor on one axis."""
    rng = np.random.default_rng(seed)
    while count:
        sizes = _MESHES[rng.integers(len(_MESHES))]
        total = int(rng.choice([8, 16, 24, 32, 64, 96]))
        old, new = random_shape(rng, total), random_shape(rng, total)
        names = sorted({name for name, _ in (*old, *new)})
        axis_of = {name: int(rng.integers(len(sizes))) for name in names if rng.random() < 0.6}
        if axis_of and not shared_axis(old, axis_of) and not shared_axis(new, axis_of):
            count -= 1
            yield old, new, axis_of, sizes


def really(old, new, axis_of, sizes):
    """The reshaped tensor, lowered; None where that fails."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    total = int(np.prod([size for _, size in old]))
    x = mtf.import_tf_tensor(mesh, tf.reshape(tf.range(total), [size for _, size in old]), mtf.Shape(
        [mtf.Dimension(*entry) for entry in old]))
    y = mtf.reshape(x, mtf.Shape([mtf.Dimension(*entry) for entry in new]))
    shape = mtf.Shape([mtf.Dimension(f"m{number}", size) for number, size in enumerate(sizes)])
    rules = mtf.LayoutRules([(name, f"m{axis}") for name, axis in axis_of.items()])
    impl = placement_mesh_impl.PlacementMeshImpl(shape, rules, device_names(shape.size))
    try:
        return mtf.Lowering(graph, {mesh: impl}).export_to_tf_tensor(y)
    except (ValueError, NotImplementedError, AssertionError, TypeError):  # what Mesh-TF raises where it cannot
        return None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_the_simulation_tells_right_from_wrong(seed):
    with tf.Graph().as_default():
        all_cases = [case for case in cases(seed, 150)]
        tensors = [really(*case) for case in all_cases]
        legal = 0
        with session(8) as tf_session:
            for (old, new, axis_of, sizes), tensor in zip(all_cases, tensors, strict=True):
                right = False
                if tensor is not None:
                    try:
                        values = tf_session.run(tensor)
                        right = list(values.reshape(-1)) == list(range(values.size))
                    except tf.errors.OpError:
                        pass
                problem, _ = reshape_problem(old, new, axis_of, sizes)
                assert (problem == "") == right, (old, new, axis_of, sizes, problem, tensor)
                legal += right
        assert 10 < legal < 140


def test_a_dim_that_moves_between_axes_is_wrong():
    problem, _ = reshape_problem([("x", 4)], [("y", 4)], {"x": 0, "y": 1}, (2, 2))
    assert "wrong values" in problem
    assert reshape_problem([("x", 4)], [("y", 4)], {"x": 0, "y": 0}, (2, 2)) == ("", False)
    assert reshape_problem([("x", 4)], [("y", 4)], {"x": 0}, (2, 2)) == ("", True)


def test_what_has_no_elements_is_in_no_wrong_order():
    """Dims behind an empty one begin at one place: it does not tell which of them an axis splits."""
    old, new = (("b", 8), ("none", 0), ("heads", 4), ("kv", 4)), (("b", 8), ("none", 0), ("d", 16))
    with tf.Graph().as_default():
        assert really(old, new, {"heads": 0}, (4,)).shape.as_list() == [8, 0, 16]
    assert reshape_problem(old, new, {"heads": 0}, (4,)) == ("", True)
