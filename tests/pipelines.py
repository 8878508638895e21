"""Strategies that give the layers of a recurrent stack, or its two directions, devices of their own."""

from typing import Any

from harness import LoweringRule, random_with, some_slow, under_strategy

from pase_mtf.graph.configurations import Configuration


def by_batch(devices: int = 4) -> LoweringRule:
    """Layers over two groups of devices, the batch over the devices of a group."""
    rest = devices // 2
    return under_strategy(random_with(
        2, devices, layers=Configuration((("layers", 2), ("batch", rest))),
        directions=Configuration((("batch", rest), ("directions", 2)))), devices)


def by_units(devices: int = 4) -> LoweringRule:
    """The same, with the units of a layer over the devices of a group, and what it reads over the rest of them."""
    inputs = (("inputs", devices // 4),) if devices > 4 else ()
    return under_strategy(random_with(
        3, devices, layers=Configuration((("units", 2), ("layers", 2), *inputs)),
        directions=Configuration((("directions", 2), ("units", 2), *inputs))), devices)


RULES: dict[str, LoweringRule] = {
    "exact": under_strategy("exact"), "random": under_strategy("random0"), "pipeline": by_batch(),
    "pipeline, units": by_units(), "expert": under_strategy("expert"),
    "exact, 8 devices": under_strategy("exact", 8), "random, 8 devices": under_strategy("random1", 8),
    "pipeline, 8 devices": by_batch(8), "pipeline, units, 8 devices": by_units(8)}
"""Name -> how the tests of a recurrent model lower it."""


def rules(*gate: str) -> list[Any]:
    """The names of RULES for pytest's parametrize; those that are not named are not part of the gate."""
    return some_slow(gate, [name for name in RULES if name not in gate])
