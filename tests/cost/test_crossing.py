"""What is priced of sums, against the bytes that cross devices in the lowered graph."""

import random

import crossing
import pytest

from pase_mtf.compat import mtf, tf
from pase_mtf.graph.configurations import enumerate_configurations

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


# Sums that several read

def _reshaped(y):
    return mtf.reshape(y, [mtf.Dimension("flat", 48 * 48)])


def _other(y):
    return mtf.rename_dimension(y, "hidden", "other")


def _read(*views, first=True, more=lambda y: [mtf.square(y)]):
    """A sum that is read as views of it, before or after anything more."""
    def program(mesh):
        y = _product(_inputs(mesh, "batch", "inputs"), "weights", "batch", "hidden")
        read = [lambda: [mtf.tanh(view(y)) for view in views], lambda: more(y)]
        return [mtf.add_n([mtf.reduce_mean(x) for each in (read if first else read[::-1]) for x in each()])], []

    return program


def _attention(mesh):
    """Queries, keys and values are one tensor."""
    y = _product(_inputs(mesh, "batch", "inputs"), "weights", "batch", "hidden")
    keys = mtf.rename_dimension(y, "batch", "other")
    scores = mtf.softmax(mtf.einsum([y, keys], [DIMS["batch"], DIMS["other"]]), DIMS["other"])
    return [mtf.reduce_mean(mtf.square(mtf.einsum([scores, keys], y.shape)))], []


def _fetched_alone(mesh):
    """The loss reads a view of it, and no gradient does."""
    y = _product(_inputs(mesh, "batch", "inputs"), "weights", "batch", "hidden")
    view = mtf.square(_other(mtf.stop_gradient(y)))
    return _with_gradients(mtf.reduce_mean(view) + mtf.reduce_mean(mtf.square(mtf.tanh(y))))


def _added_to_others(mesh):
    """One of the sums that are added is over a dim that a layout may leave whole."""
    over = _product(_inputs(mesh, "batch", "heads"), "over", "batch", "hidden")
    y, z = (_product(_inputs(mesh, "batch", "inputs"), name, "batch", "hidden") for name in "yz")
    return [mtf.add_n([mtf.reduce_mean(mtf.square(x)) for x in (over, over + y, y + z, mtf.tanh(z))])], []


VIEWS = {"renamed": _read(_other), "reshaped": _read(_reshaped), "after": _read(_other, first=False),
         "both": _read(_reshaped, _other), "of a view": _read(lambda y: _reshaped(_other(y)), _other),
         "added": _read(lambda y: y + _product(_inputs(y.mesh, "batch", "wide"), "more", "batch", "hidden"), _other),
         "nothing else": _read(_other, _reshaped, more=lambda y: []), "attention": _attention,
         "fetched alone": _fetched_alone}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_a_sum_of_which_several_read_views_is_made_once(name, devices):
    found = crossing.under_strategy(VIEWS[name], devices, crossing.split("inputs"))
    assert found.priced == pytest.approx(found.received, rel=0.01)
    assert found.received > 0


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_stock_mesh_tensorflow_sums_views_by_themselves(name, devices):
    found = crossing.under_layout(VIEWS[name], devices, "inputs:all")
    assert found.priced == pytest.approx(found.received, rel=0.01)
    assert found.received > 0


@pytest.mark.parametrize("layout", ["inputs:one;batch:other", "inputs:one;hidden:other", "inputs:one;other:other",
                                    "inputs:one;flat:other"])
@pytest.mark.parametrize("program", [*VIEWS.values(), _added_to_others], ids=[*VIEWS, "added to others"])
def test_no_more_is_sent_by_stock_mesh_tensorflow_than_is_priced(program, layout):
    """Of views whose slices move under a layout, what they are made of is summed: once."""
    found = crossing.under_layout(program, 4, layout, "one:2;other:2")
    assert 0 < found.received <= 1.001 * found.priced


def _greatest(y):
    """Of pairs of rows."""
    pairs = mtf.reshape(y, [mtf.Dimension("high", 24), mtf.Dimension("low", 2), DIMS["hidden"]])
    return mtf.reduce_max(pairs, reduced_dim=mtf.Dimension("low", 2))


@pytest.mark.parametrize("first", [True, False], ids=["pieces first", "whole first"])
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_a_sum_of_which_one_reader_needs_pieces_is_made_once(first, devices):
    """Whichever reader comes first: the pieces are cut from the sum that another one needs whole."""
    program = _read(_greatest, first=first)

    def choose(graph, devices):
        return [crossing.split("inputs" if "inputs" in layer.dims else "hidden")(graph, devices)[number]
                for number, layer in enumerate(graph.layers)]

    found = crossing.under_strategy(program, devices, choose)
    assert found.priced == pytest.approx(found.received, rel=0.01)
    assert found.received > 0


# Sums that are broadcast

def _mean_of_words(mesh):
    """A product that sums a dim of its first input alone: that one's gradient is broadcast along it."""
    x = mtf.tanh(_product(_inputs(mesh, "batch", "inputs"), "first", "batch", "inputs", "wide"))
    weights = _variable(mesh, "weights", "wide", "hidden")
    return _with_gradients(mtf.reduce_mean(mtf.square(mtf.einsum([x, weights], [DIMS["batch"], DIMS["hidden"]]))))


def _broadcast_by_einsum(mesh):
    x = _inputs(mesh, "batch", "hidden")
    return [mtf.reduce_mean(mtf.square(mtf.einsum([x, x], [DIMS["wide"], DIMS["batch"]])))], []


def _broadcast_and_added(mesh):
    """Nothing is added to parts that are broadcast."""
    x = _inputs(mesh, "batch", "hidden")
    one, other = (mtf.einsum([x, _variable(mesh, name, "hidden")], [DIMS["wide"], DIMS["batch"]]) for name in "ab")
    return [mtf.reduce_mean(mtf.square(one + other))], []


@pytest.mark.parametrize("program", [_mean_of_words, _broadcast_by_einsum, _broadcast_and_added],
                         ids=["gradient", "einsum", "added"])
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_what_is_broadcast_is_summed_before(program, devices):
    for found in (crossing.under_layout(program, devices, "hidden:all"),
                  crossing.under_strategy(program, devices, crossing.split("hidden"))):
        assert found.priced == pytest.approx(found.received, rel=0.01)
        assert found.received > 0


# Sums of several layers that are added

def _gradients_added(layers):
    """What several layers read has the sum of their gradients, each of which a split of `heads` leaves in parts."""
    def program(mesh):
        x = mtf.tanh(_product(_inputs(mesh, "batch", "inputs"), "first", "batch", "hidden"))
        y = mtf.tanh(_product(x, "w0", "batch", "heads"))
        for number in range(1, layers):
            y *= mtf.tanh(_product(x, f"w{number}", "batch", "heads"))
        return _with_gradients(mtf.reduce_mean(mtf.square(_product(y, "last", "batch", "hidden"))))

    return program


def _side_by_side(*over):
    """Layers beside each other, whose sums are added: x + attention(x) + feed_forward(x)."""
    def program(mesh):
        x = mtf.tanh(_product(_inputs(mesh, "batch", "inputs"), "first", "batch", "hidden"))
        made = [_product(mtf.tanh(_product(x, f"in{number}", "batch", dim)), f"out{number}", "batch", "hidden")
                for number, dim in enumerate(over)]
        return _with_gradients(mtf.reduce_mean(mtf.square(mtf.tanh(mtf.add_n([*made, x])))))

    return program


ADDED = {"one": _gradients_added(1), "two": _gradients_added(2), "three": _gradients_added(3),
         "side by side": _side_by_side("heads", "heads", "heads"), "other dims": _side_by_side("heads", "wide")}


@pytest.mark.parametrize("name", ADDED)
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_sums_that_are_added_are_made_once(name, devices):
    for found in (crossing.under_layout(ADDED[name], devices, "heads:all;wide:all"),
                  crossing.under_strategy(ADDED[name], devices, crossing.split("heads", "wide"))):
        assert found.priced == pytest.approx(found.received, rel=0.01)
        assert found.received > 0


def _keys_renamed(mesh):
    """Keys are made of what queries are made of, under another name of a dim: the gradient is renamed back, and added
    to that of the queries, before anything is summed."""
    x = mtf.tanh(_product(_inputs(mesh, "batch", "inputs"), "first", "batch", "hidden"))
    keys = mtf.tanh(_product(mtf.rename_dimension(x, "batch", "other"), "keys", "other", "heads"))
    queries = mtf.tanh(_product(x, "queries", "batch", "heads"))
    scores = mtf.einsum([queries, keys], [DIMS["batch"], DIMS["other"]])
    return _with_gradients(mtf.reduce_mean(mtf.square(scores)))


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_a_sum_that_is_renamed_and_added_is_made_once(devices):
    found = crossing.under_layout(_keys_renamed, devices, "heads:all")
    assert found.priced == pytest.approx(found.received, rel=0.01)
    assert found.received > 0


@pytest.mark.parametrize("layout", ["heads:one;wide:other", "heads:one;wide:one", "heads:one;wide:one;batch:other",
                                    "heads:one;batch:other", "heads:other;hidden:one"])
def test_sums_over_several_axes_are_made_by_themselves(layout):
    found = crossing.under_layout(_side_by_side("heads", "wide"), 4, layout, "one:2;other:2")
    assert found.priced == pytest.approx(found.received, rel=0.01)


@pytest.mark.parametrize("name", ADDED)
@pytest.mark.parametrize("devices", [6, 8])
def test_no_more_is_sent_than_priced_where_layers_are_split_otherwise(name, devices):
    """What is not the same parts is summed, and added to one of those of the layer that adds."""
    def some(seed):
        def choose(graph, devices):
            rng, found = random.Random(seed), []
            for layer in graph.layers:
                offered = enumerate_configurations(layer, devices)
                in_parts = [each for each in offered if any(dim in ("heads", "wide") for dim, _ in each.axes)]
                found.append(rng.choice(in_parts if in_parts and rng.random() < 0.75 else offered))
            return found

        return choose

    for seed in range(4):
        found = crossing.under_strategy(ADDED[name], devices, some(seed))
        assert found.received <= 1.001 * found.priced


def _first_and_others(first, others):
    """A strategy that splits one dim of the layer that reads the inputs, and another of all others."""
    def choose(graph, devices):
        return [crossing.split(first if "inputs" in layer.dims else others)(graph, devices)[number]
                for number, layer in enumerate(graph.layers)]
    return choose


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_names_of_one_tensor_are_moved_once(devices):
    def program(mesh):
        y = mtf.tanh(_product(_inputs(mesh, "batch", "inputs"), "weights", "batch", "hidden"))
        return [mtf.reduce_mean(mtf.tanh(mtf.einsum([y, mtf.stop_gradient(y)], [DIMS["batch"]])))], []

    found = crossing.under_strategy(program, devices, _first_and_others("batch", "hidden"))
    assert found.priced == pytest.approx(found.received, rel=0.01)
    assert found.received > 0


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_a_sum_that_trains_nothing_before_it_is_scattered_all_the_same(devices):
    def program(mesh):
        y = mtf.stop_gradient(_product(_inputs(mesh, "batch", "inputs"), "weights", "batch", "hidden"))
        return [mtf.reduce_mean(mtf.tanh(_product(y, "more", "batch", "other")))], []

    found = crossing.under_strategy(program, devices, _first_and_others("inputs", "batch"))
    assert found.priced == pytest.approx(found.received, rel=0.01)
    assert found.received > 0


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_sums_over_the_same_dims_in_another_order_are_made_once(devices):
    """Weights that are read batch first, and time first."""
    def program(mesh):
        weights = _variable(mesh, "weights", "wide", "hidden")
        made = [mtf.tanh(mtf.einsum([_inputs(mesh, *order, "wide"), weights],
                                    [DIMS[name] for name in (*order, "hidden")]))
                for order in (("batch", "other"), ("other", "batch"))]
        return _with_gradients(mtf.add_n([mtf.reduce_mean(mtf.square(y)) for y in made]))

    found = crossing.under_strategy(program, devices, crossing.split("batch"))
    assert found.priced == pytest.approx(found.received, rel=0.01)
    assert found.received > 0


@pytest.mark.parametrize("devices", [4, 6, 8])
def test_of_a_part_no_more_is_gathered_than_it_has(devices):
    """Of 48 in 8 parts none has the 12 that are wanted."""
    program = _top(12, 0, 1)
    for found in (crossing.under_layout(program, devices, "hidden:all"),
                  crossing.under_strategy(program, devices, crossing.split("hidden"))):
        assert found.priced == pytest.approx(found.received)
        assert found.received > 0


@pytest.mark.parametrize(("offset", "wrap"), [(49, True), (-49, True), (96, True), (48, False), (-60, False)])
@pytest.mark.parametrize("devices", [2, 6])
def test_a_shift_beyond_the_end_of_its_dim(offset, wrap, devices):
    """In circles what is left of it crosses; else there are zeros everywhere, and nothing does."""
    def program(mesh):
        y = mtf.tanh(_product(_inputs(mesh, "batch", "inputs"), "weights", "batch", "hidden"))
        return [mtf.tanh(mtf.shift(y, offset, DIMS["hidden"], wrap))], []

    for found in (crossing.under_layout(program, devices, "hidden:all"),
                  crossing.under_strategy(program, devices, crossing.split("hidden"))):
        assert found.priced == pytest.approx(found.received)
        assert (found.received > 0) == (wrap and offset % DIMS["hidden"].size != 0)
