"""Numbers: machines and model sizes, as JSON."""
