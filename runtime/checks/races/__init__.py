"""A rank on CPU tensors as a graph of what its streams would do, and what in it nothing orders."""
