"""Measures a machine, through the code that training runs."""
