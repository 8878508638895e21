"""No number moves by accident: graph hashes, optima and predicted times are those of tests/data/pinned.json."""

import json

import pytest
from pinned import FILE, numbers_of

from pase_mtf import models

_QUICK = ("alexnet", "biglstm", "rnnlm")


@pytest.mark.parametrize("model", [
    name if name in _QUICK else pytest.param(name, marks=pytest.mark.slow) for name in models.names()])
def test_numbers_are_those_that_were_pinned(model):
    expected, found = json.loads(FILE.read_text(encoding="utf-8"))[model], numbers_of(model)
    assert found.keys() == expected.keys()
    # Sums over layers may be added up in another order by another NumPy.
    moved = {what: (number, found[what]) for what, number in expected.items() if not (
        found[what] == pytest.approx(number, rel=1e-12) if isinstance(number, float) else found[what] == number)}
    assert not moved, "moved on purpose? python tests/pinned.py, and say why in the commit"
