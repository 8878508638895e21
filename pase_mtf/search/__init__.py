"""Searches for the cheapest assignment of a cost network, behind one registry."""
