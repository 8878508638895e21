import math

import pytest

from pase_mtf.amounts import bytes_text, gap_text, needed_text, parse_bytes
from pase_mtf.errors import UsageError


@pytest.mark.parametrize(("text", "limit"), [
    ("1000", 1000), ("11GB", 11e9), ("10.5 GiB", 10.5 * 2**30), ("80gb", 80e9), ("3kib", 3072), ("7b", 7),
    ("none", math.inf), ("device", None), ("11e9", 11e9), ("1.5e+3 kb", 1.5e6)])
def test_reads_bytes(text, limit):
    assert parse_bytes(text) == limit


@pytest.mark.parametrize("text", ["", "GB", "-1", "0", "0.5", "e9", "1e-9", "1e999", "inf", "nan",
                                  "11 gigabytes", "9" * 5000])
def test_refuses_bytes_in_one_line(text):
    with pytest.raises(UsageError, match="--memory_limit=") as caught:
        parse_bytes(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("amount", "text"), [
    (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**20, "1.0 MiB"), (17.3e9, "16.11 GiB"), (1.3e12, "1.18 TiB")])
def test_bytes_for_people(amount, text):
    assert bytes_text(amount) == text


@pytest.mark.parametrize("amount", [*map(float, (0, 1, 1023, 1024, 1025, 235541, 2**20 - 1, 579022848, 17.3e9, 2**50))])
def test_what_is_needed_is_enough(amount):
    """Rounded up by less than one in the last digit, and never the same as the limit."""
    enough = parse_bytes(needed_text(amount)) if amount else amount
    assert amount <= enough < 1.1 * amount + 1
    if amount > 1:
        assert needed_text(amount, amount - 1) != bytes_text(amount - 1)
        assert parse_bytes(needed_text(amount, amount - 1)) >= amount
    assert needed_text(236000.5) == "230.5 KiB"
    assert needed_text(235500.0, 235510.0) == "235500 B"
    assert needed_text(math.inf) == bytes_text(math.inf)


@pytest.mark.parametrize(("gap", "text"), [
    (0.02, "at most 2 % above the optimum"), (0.0123, "at most 1.23 % above the optimum"),
    (0.123456, "at most 12.35 % above the optimum"), (1e-9, "at most 0.01 % above the optimum"),
    (0.0, "at most 0.01 % above the optimum"), (float("inf"), "without a bound")])
def test_what_is_not_proven_is_never_nothing(gap, text):
    assert gap_text(gap) == text
