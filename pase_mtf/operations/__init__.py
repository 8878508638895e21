"""All that is known of a Mesh-TensorFlow operation."""
