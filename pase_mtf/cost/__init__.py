"""What a configuration costs: per layer, per edge, and as a cost network."""
