"""Which strategy every arm of a run trains with: found, priced, and told in the words of plain Mesh-TF."""
