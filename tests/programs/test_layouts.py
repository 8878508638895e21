"""Layouts of real programs: those found and those written by hand lower as they are, and train as one device."""

import numpy as np
import pytest
from programs import training

from benchmarks import layout_cases, programs
from pase_mtf.compat import mtf
from pase_mtf.machine.machine import Machine

DEVICES = training.DEVICES
# Arithmetic is slow and links cost next to nothing, so that even reduced programs are split in earnest.
SLOW = Machine.load("2080ti")
SLOW = type(SLOW)("slow arithmetic", {kind: rate * 1e-4 for kind, rate in SLOW.rates.items()},
                  SLOW.memory_bandwidth * 1e-4, SLOW.memory_bytes, 0.0,
                  tuple(type(link)(link.devices, link.bandwidth * 1e-2, 0.0) for link in SLOW.links))


def _with_one_quick(cases, quick):
    """All of these train or search for long; one of them stands for them in the gate."""
    return [case if case == quick else pytest.param(*(case if isinstance(case, tuple) else (case,)),
                                                    marks=pytest.mark.slow) for case in cases]


def _found(name):
    by_hand = [(mesh_shape, rules) for _, mesh_shape, rules in layout_cases.by_hand(name, DEVICES)]
    return layout_cases.find(name, "reduced", DEVICES, SLOW, by_hand)


def _one_device(name, mesh_shape, rules):
    """The losses of the program that is built for a layout: groups of experts depend on it."""
    if name not in programs.REBUILT or name.startswith("unet"):
        return training.one_device(name)
    return training.losses_of(name, training.stock(), mesh_shape, rules)


@pytest.mark.parametrize("name", _with_one_quick(programs.PROGRAMS, "toy"))
def test_the_layout_found_trains_as_one_device_does(name):
    layout = _found(name)
    assert layout.layout_rules
    losses = training.losses_of(name, training.stock(layout.mesh_shape, layout.layout_rules), layout.mesh_shape,
                                layout.layout_rules)
    np.testing.assert_allclose(losses, _one_device(name, layout.mesh_shape, layout.layout_rules),
                               rtol=training.TOLERANCE)
    # No layout that people write is predicted cheaper, each on the graph that is built for it.
    for entry in (layout.data_parallel, *layout.compared):
        if entry is not None and not entry.problem:
            assert layout.seconds <= entry.seconds * (1 + 1e-9), entry


@pytest.mark.parametrize(("name", "number"), _with_one_quick([("lm", 1), ("unet_2d", 1), ("digits", 1)],
                                                             None))
def test_layouts_written_by_hand_train_as_one_device_does(name, number):
    _, mesh_shape, rules = layout_cases.by_hand(name, DEVICES)[number]
    losses = training.losses_of(name, training.stock(mesh_shape, rules), mesh_shape, rules)
    np.testing.assert_allclose(losses, _one_device(name, mesh_shape, rules), rtol=training.TOLERANCE)


@pytest.mark.parametrize(("name", "devices"), _with_one_quick(
    [("translation", DEVICES), *((name, 32) for name in ("bert", "translation", "digits"))], ("translation", DEVICES)))
def test_other_numbers_of_devices(name, devices):
    layout = layout_cases.find(name, "reduced", devices, SLOW)
    shape = mtf.convert_to_shape(layout.mesh_shape)
    assert shape.size == devices
    assert layout.layout_rules
