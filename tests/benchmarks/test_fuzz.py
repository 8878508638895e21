"""Every reader of files with inputs of hypothesis: refused in one line, or taken and used."""

import json
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks import fuzz, fuzz_data


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    return {target.name: target for target in fuzz.targets(tmp_path_factory.mktemp("fuzz"))}


def test_a_few(targets):
    assert tuple(targets) == fuzz.TARGETS
    refused = [target.refuses(random.Random(number)) for target in targets.values() for number in range(4)]
    assert any(refused)


@pytest.mark.slow
@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_inputs(targets, name):
    @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, 2 ** 64))
    def refused_or_taken(seed):
        targets[name].refuses(random.Random(seed))
    refused_or_taken()


@pytest.mark.parametrize("name", ["checkpoint", "graph"])
def test_a_file_that_was_not_changed_is_taken(targets, monkeypatch, name):
    """A checkpoint had another hash than its manifest said, a graph sums that no edge took: nearly all inputs were
    refused for that."""
    monkeypatch.setattr(fuzz, "json_of", lambda data, source, seal=None: json.dumps(data).encode())
    assert not targets[name].refuses(random.Random(0))


def test_pictures_that_were_not_damaged_are_taken(targets, monkeypatch):
    monkeypatch.setattr(fuzz_data, "damaged", lambda raw, source: raw)
    assert not any(targets["pictures"].refuses(random.Random(number)) for number in range(40))
