import pytest

from pase_mtf.errors import UsageError
from pase_mtf.launch.arm_names import parse_arms


def _names(strategy, compare):
    return [arm.name for arm in parse_arms(strategy, compare)]


@pytest.mark.parametrize(("strategy", "compare", "expected"), [
    ("search", "data_parallel,expert,search", ["search", "stock_data_parallel", "data_parallel", "expert"]),
    ("search", "none", ["search"]),
    ("search", "", ["search"]),
    ("data_parallel", "search", ["data_parallel", "search"]),
    ("data_parallel", "data_parallel", ["data_parallel", "stock_data_parallel"]),
    ("expert", "random:2,search", ["expert", "search", "random_0", "random_1"]),
    ("search", "changed:2,random:1", ["search", "random_0", "changed_0", "changed_1"]),
    ("search", "stock_data_parallel", ["search", "stock_data_parallel"]),
    ("search", "mcmc_expert,expert,mcmc", ["search", "expert", "mcmc", "mcmc_expert"]),
    ("search", "auto_mtf,mcmc", ["search", "mcmc", "auto_mtf"]),
    ("some/mine.json", "search,other/mine.json", ["mine", "search", "other/mine.json"]),
])
def test_reads(strategy, compare, expected):
    assert _names(strategy, compare) == expected


@pytest.mark.parametrize(("strategy", "compare", "offered"), [
    ("serach", "none", "'search'"), ("search", "exprt", "'expert'"), ("search", "data-parallel", "'data_parallel'"),
    ("random:2", "none", "known"), ("stock_data_parallel", "none", "choose one of"), ("mcmc", "none", "choose one of"),
    ("search", "random:0", "random:3"), ("search", "changed:65", "changed:3"), ("changed:1", "none", "known"),
    ("search", "random:x", "random:3"), ("search", "random", "random:3"),
])
def test_offers_the_nearest_name(strategy, compare, offered):
    with pytest.raises(UsageError, match=offered):
        parse_arms(strategy, compare)
