"""Numbers of devices beside the next power of two: what is measured, and the page."""

import pytest
from markdown_cells import rows
from small_graphs import perceptron

from benchmarks import search_devices
from pase_mtf.machine.machine import Machine


@pytest.mark.parametrize(("devices", "power"), [(1, 1), (3, 4), (4, 4), (6, 8), (96, 128), (1000, 1024), (1024, 1024)])
def test_next_power_of_two(devices, power):
    assert search_devices.next_power(devices) == power


def test_a_network_is_built_and_searched(tmp_path):
    perceptron().save(tmp_path / "graph.json")
    row = search_devices.measure(str(tmp_path / "graph.json"), Machine.load("h100"), 6, 2)
    assert (row["devices"], row["layers"], row["optimal"]) == (6, 3, True)
    assert row["build_seconds"] > 0
    assert row["search_seconds"] > 0


def test_the_page_compares_with_the_next_power_of_two():
    numbers = (6, 0.3, 0.01), (8, 0.2, 0.04), (4, 1.5, 0.02)
    measured = [{"model": "alexnet", "devices": devices, "build_seconds": build, "search_seconds": search,
                 "optimal": devices != 6, "rounds": 3} for devices, build, search in numbers]
    text = search_devices.document({"facts": {"machine": "Chip", "versions": "Python", "commit": "abc"},
                                    "machine": "h100", "rows": measured})
    assert rows(text) == [["model", "4", "6", "8"], ["alexnet", "1.50 s", "300 ms (1.50)", "200 ms"],
                          ["model", "4", "6", "8"], ["alexnet", "20.0 ms", "10.0 ms (0.25), not proven", "40.0 ms"]]
    assert "1.50 times as long as for the next power of two (alexnet on 6)" in text
    assert "2 of 3 optima are proven" in text


def test_powers_of_two_alone_are_compared_with_nothing():
    text = search_devices.document({
        "facts": {"machine": "Chip", "versions": "Python", "commit": "abc"}, "machine": "h100",
        "rows": [{"model": "alexnet", "devices": 8, "rounds": 1, "build_seconds": 1.0, "search_seconds": 0.5,
                  "optimal": True}]})
    assert "1.00 s" in text
    assert "The most" not in text
