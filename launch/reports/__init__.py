"""What a run shows people."""
