"""Every program of the tables builds, as small as it comes, and is exported whole."""

import functools
import itertools

import pytest
from programs import training
from uniform import layouts_and_uniform_strategies_agree

from benchmarks import programs
from pase_mtf.compat import mtf
from pase_mtf.export.exporter import export_graph
from pase_mtf.layout.space import parse_layout
from pase_mtf.machine.machine import Machine

_QUICK = ("lm_default", "experts_attention")
_SMALL = [name if not name.startswith("own_") else pytest.param(name, marks=pytest.mark.slow)  # classes are tried
          for name in programs.tables()["small"]]
_ZOO = [name if name in _QUICK else pytest.param(name, marks=pytest.mark.slow) for name in programs.tables()["zoo"]]


@functools.cache
def _names():
    return list(itertools.chain(*programs.tables().values()))


def test_names_are_of_one_program_each():
    assert len(set(_names())) == len(_names())
    assert len(programs.tables()["zoo"]) >= 20
    assert len(programs.tables()["small"]) >= 12


def test_what_one_program_configures_no_other_is_built_with():
    gin = pytest.importorskip("gin")
    with training.built("experts_attention"):
        assert not gin.config_str(), "the configuration outlives the program that set it"


@pytest.mark.parametrize("name", _SMALL + _ZOO)
def test_it_builds_and_is_exported(name):
    own = programs.own_layout(name, 8)
    assert parse_layout(own)[0].devices == 8
    with training.built(name) as program:
        assert program.loss.shape == mtf.Shape([])
        exported = export_graph(program.graph)
        assert exported.layers
        assert sum(variable.size for variable in program.graph.trainable_variables) == exported.parameters
        assert layouts_and_uniform_strategies_agree(program.graph, exported, Machine.load("h100"), most=3,
                                                    own=parse_layout(own))
        batch = next(program.batches())
        assert {key: list(value.shape) for key, value in batch.items()} == {
            key: placeholder.shape.as_list() for key, placeholder in program.placeholders.items()}
