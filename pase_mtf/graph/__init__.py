"""The computation graph: layers with named dims, their configurations, and how a tensor is sharded. No TensorFlow."""
