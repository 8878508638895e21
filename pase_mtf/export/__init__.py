"""mtf.Graph -> ComputationGraph: which operations are one layer, and what the cost model needs to know of them."""
