"""Plan -> TensorFlow: every operation with a layout of its own, tensors moved in between."""
