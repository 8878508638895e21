"""Random cost networks of many kinds, small enough for brute force."""

import numpy as np

from pase_mtf.search.network import CostNetwork, NetworkEdge

SHAPES = ("tree", "chain", "grid", "dense", "sparse", "parallel", "loops", "disconnected", "star")
COSTS = ("float", "integer", "ties", "tiny", "huge", "mixed", "forbidden", "zero", "negative", "large_integer")


def _pairs(shape, rng, layers):
    every = [(i, j) for i in range(layers) for j in range(i + 1, layers)]
    if shape == "tree":
        return [(int(rng.integers(j)), j) for j in range(1, layers)]
    if shape == "chain":
        return [(j - 1, j) for j in range(1, layers)]
    if shape == "star":
        return [(0, j) for j in range(1, layers)]
    if shape == "grid":
        width = max(2, round(layers ** 0.5))
        return [(i, j) for i, j in every if j == i + width or (j == i + 1 and j % width)]
    if shape == "dense":
        return every
    chosen = [pair for pair in every if rng.random() < 0.5]
    if shape == "parallel":
        return chosen + [(j, i) if rng.random() < 0.5 else (i, j) for i, j in chosen]
    if shape == "loops":
        return chosen + [(i, i) for i in range(layers) if rng.random() < 0.5]
    if shape == "disconnected":
        return [(i, j) for i, j in every if i % 2 == j % 2 and rng.random() < 0.7]
    return chosen


def _draw(kind, rng, shape):
    if kind == "integer":
        return rng.integers(0, 100, shape).astype(float)
    if kind == "large_integer":
        return rng.integers(0, 10 ** 12, shape).astype(float) * 16
    if kind == "ties":
        return rng.integers(0, 3, shape).astype(float)
    if kind == "tiny":
        return rng.random(shape) * 1e-12
    if kind == "huge":
        return rng.random(shape) * 1e15
    if kind == "mixed":
        return 10.0 ** rng.uniform(-12, 15, shape)
    if kind == "forbidden":
        return np.where(rng.random(shape) < 0.3, np.inf, rng.random(shape))
    if kind == "zero":
        return np.zeros(shape)
    if kind == "negative":
        return rng.normal(size=shape)
    return rng.random(shape)


def random_network(seed, most_assignments=20000):
    """A network of random shape and costs; every third one shares matrices between its edges."""
    rng = np.random.default_rng(seed)
    shape, kind = SHAPES[seed % len(SHAPES)], COSTS[seed // len(SHAPES) % len(COSTS)]
    layers = int(rng.integers(1, 9))
    sizes, product = [], 1
    for _ in range(layers):
        size = int(rng.integers(1, 6))
        size = size if product * size <= most_assignments else 1
        sizes.append(size)
        product *= size
    vectors = [_draw(kind, rng, size) for size in sizes]
    for vector in vectors:
        if kind == "forbidden" and np.isinf(vector).all():
            vector[0] = 1.0
    shared, edges = {}, []
    for source, target in _pairs(shape, rng, layers):
        height, width = (int(rng.integers(1, 4)), int(rng.integers(1, 4)))
        matrix = _draw(kind, rng, (height, width))
        if np.isinf(matrix).all():
            matrix[0, 0] = 0.5
        if seed % 3 == 0:
            matrix = shared.setdefault((height, width), matrix)
        edges.append(NetworkEdge(source, target, matrix, rng.integers(0, height, sizes[source]),
                                 rng.integers(0, width, sizes[target])))
    return CostNetwork(vectors, edges)


def splits(proof):
    """How often a certificate splits a domain."""
    return (proof.layer >= 0) + sum(map(splits, proof.proofs))


def frustrated(seed, layers=7, configurations=6):
    """Dense and random: the bound of the potentials alone stays below the optimum."""
    rng = np.random.default_rng(seed)
    ends = np.arange(configurations)
    return CostNetwork([rng.random(configurations) for _ in range(layers)],
                       [NetworkEdge(i, j, rng.random((configurations, configurations)), ends, ends)
                        for i in range(layers) for j in range(i + 1, layers)])
