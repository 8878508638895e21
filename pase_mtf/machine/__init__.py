"""Machines: devices, their rates and memory, and the links between them. No TensorFlow."""
