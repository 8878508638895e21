"""Models written with named dims: no strategy, mesh shape or device appears in them."""
