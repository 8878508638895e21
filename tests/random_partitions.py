"""Random partitions for hypothesis, and what they mean, straight from the definition."""

from hypothesis import strategies as st

from pase_mtf.graph.partition import Partition


@st.composite
def partitions(draw, shape, devices=8):
    """A partition of a tensor of this shape over some of the devices, in any order."""
    size = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    numbers = tuple(draw(st.permutations(range(devices)))[:size])
    cuts, stride, open_dims = [(1, 1)] * len(shape), 1, list(range(len(shape)))
    while stride < size:
        factor = draw(st.sampled_from([n for n in (2, 3, 4, 6, 8) if size // stride % n == 0]))
        fitting = [dim for dim in open_dims if shape[dim] % factor == 0]
        dim = draw(st.sampled_from([*fitting, None]))
        if dim is not None:
            cuts[dim] = (factor, stride)
            open_dims.remove(dim)
        stride *= factor
    return Partition(numbers, tuple(cuts))


_SHAPES = st.lists(st.sampled_from([1, 2, 4, 8, 12, 6]), min_size=1, max_size=3).map(tuple)


@st.composite
def partition_pairs(draw):
    shape = draw(_SHAPES)
    return shape, draw(partitions(shape)), draw(partitions(shape))


def block(values, partition, position):
    """The block that a position holds, straight from the definition."""
    region = []
    for size, (parts, stride) in zip(values.shape, partition.shards, strict=True):
        part = (position // stride) % parts
        region.append(slice(part * size // parts, (part + 1) * size // parts))
    return values[tuple(region)]
