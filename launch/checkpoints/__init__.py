"""The checkpoints of a run: written, kept, found and checked."""
