"""What is priced of sums, against the bytes that cross devices in the lowered graph."""

import crossing
import pytest

from pase_mtf.compat import mtf, tf

DIMS = {name: mtf.Dimension(name, 48) for name in ("batch", "inputs", "hidden", "other", "heads", "wide")}


def _variable(mesh, name, *dims):
    return mtf.get_variable(mesh, name, mtf.Shape([DIMS[dim] for dim in dims]))


def _product(x, name, *dims):
    """Of a tensor and a variable, as a tensor of these dims."""
    weights = [dim.name for dim in x.shape.dims if dim.name not in dims]
    weights += [dim for dim in dims if dim not in x.shape.dimension_names]
    return mtf.einsum([x, _variable(x.mesh, name, *weights)], [DIMS[dim] for dim in dims])


def _inputs(mesh, *dims):
    shape = mtf.Shape([DIMS[dim] for dim in dims])
    return mtf.import_tf_tensor(mesh, tf.zeros(shape.to_integer_list), shape)


def _with_gradients(loss):
    """The loss, and the updates of all variables."""
    variables = loss.graph.trainable_variables
    gradients = mtf.gradients([loss], [variable.outputs[0] for variable in variables])
    return [loss], mtf.optimize.SgdOptimizer(0.1).apply_grads(gradients, variables)


# What is chosen along a dim

def _top(size, *wanted):
    """A top-k of which only some outputs are read."""
    def program(mesh):
        y = mtf.tanh(_product(_inputs(mesh, "batch", "inputs"), "weights", "batch", "hidden"))
        outputs = mtf.top_k(y, DIMS["hidden"], mtf.Dimension("k", size))
        return [mtf.cast(outputs[number], tf.float32) + 1.0 for number in wanted], []

    return program


CHOICES = {"top-1": _top(1, 0, 1), "largest": _top(1, 0), "where": _top(1, 1), "top-6": _top(6, 0, 1)}


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_what_is_chosen_along_a_split_dim_is_gathered(name, devices):
    """Every device gets what all the others have found; of an index the values, too, by which it is chosen."""
    for found in (crossing.under_layout(CHOICES[name], devices, "hidden:all"),
                  crossing.under_strategy(CHOICES[name], devices, crossing.split("hidden"))):
        assert found.priced == pytest.approx(found.received)
        assert found.received > 0


# Sums whose dim is renamed to the one that they are over

def _renamed(layers, gradients):
    """Products over `hidden` of which `other` is renamed to it: what a recurrence does, or a stack of layers."""
    def program(mesh):
        x = _inputs(mesh, "batch", "hidden")
        for number in range(layers):
            x = mtf.tanh(mtf.rename_dimension(_product(x, f"w{number}", "batch", "other"), "other", "hidden"))
        loss = mtf.reduce_mean(mtf.square(x))
        return _with_gradients(loss) if gradients else ([loss], [])

    return program


def _added_after_renaming(mesh):
    x = _inputs(mesh, "batch", "hidden")
    y, z = (mtf.rename_dimension(_product(x, name, "batch", "other"), "other", "hidden") for name in "yz")
    return [mtf.reduce_mean(mtf.tanh(y + z))], []


@pytest.mark.parametrize("program", [_renamed(1, False), _renamed(2, False), _renamed(2, True), _added_after_renaming],
                         ids=["one", "two", "gradients", "added"])
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_sums_that_are_renamed_to_what_they_are_over(program, devices):
    """Stock Mesh-TensorFlow sums all of it on every device; we, of which each device needs a part, scatter the sum."""
    stock = crossing.under_layout(program, devices, "hidden:all")
    assert stock.priced == pytest.approx(stock.received, rel=0.01)
    ours = crossing.under_strategy(program, devices, crossing.split("hidden"))
    assert ours.priced == pytest.approx(ours.received, rel=0.01)
    assert 0 < ours.received < 0.7 * stock.received
