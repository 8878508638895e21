"""What a given strategy costs, whether or not a search is offered it."""

from pase_mtf.cost.build import build_network


def price_strategy(graph, machine, devices, configurations, model="seconds"):
    """The `Breakdown` of one configuration per layer."""
    priced = build_network(graph, machine, devices, [(configuration,) for configuration in configurations], model)
    return priced.breakdown([0] * len(graph.layers))
