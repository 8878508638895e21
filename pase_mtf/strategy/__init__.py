"""A configuration for every layer: the type, how one is found, and those that experts write. No TensorFlow."""
