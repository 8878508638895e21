"""What a search adds up of layers, against what a device holds: no strategy that fits is ruled out."""

import dataclasses
import json
import random

import harness
import numpy as np
import pytest
from micro_models import SIZES

from pase_mtf import models
from pase_mtf.cost.build import build_network
from pase_mtf.graph.configurations import enumerate_configurations


def _graph(name, tmp_path):
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps({**SIZES[name], "preset": "tiny"}))
    return harness.export_model(name, models.load_config(name, str(path)))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", ["alexnet", "transformer", "gnmt"])
def test_layers_add_up_to_no_more_than_is_there(name, shared, tmp_path):
    """At any moment, under strategies drawn at random: sums of gradients and what others read of a layer are in it."""
    graph, draw = _graph(name, tmp_path), random.Random(name)
    machine = dataclasses.replace(harness.MACHINE, shared_cores=shared)
    choices = [enumerate_configurations(layer, 4, max_axes=2) for layer in graph.layers]
    tightest = []
    for keep in (0.0, 0.5, 0.9, 1.0):
        preferred: dict[str, float] = {}
        chosen = []
        for each in choices:
            if draw.random() >= keep:
                preferred = {}
            weights = [max((preferred.setdefault(dim, draw.random()) ** 4 for dim, _ in one.axes), default=1.0) + 1e-9
                       for one in each]
            chosen.append(draw.choices(each, weights)[0])
        priced = build_network(graph, machine, 4, [[one] for one in chosen])
        most, at = priced.peak_memory([0] * len(chosen))
        sums = [sum(float(vector[0]) for vector in priced.memory_with(moment))
                for moment in {*range(0, priced.memory_model.moments, 7), at, priced.memory_model.fullest}]
        assert max(sums) <= most * (1 + 1e-9)
        tightest.append(max(sums) / most)
        # What layers would need of others that stay is about what there is beside the sum.
        beside = sum(float(vector[0]) for vector in priced.copies_at([0] * len(chosen), at))
        assert sum(float(vector[0]) for vector in priced.memory_with(at)) + beside > 0.9 * most
    assert np.median(tightest) > 0.6
