"""Finds, for a Mesh-TensorFlow model and p devices, the provably best way to split every layer."""
