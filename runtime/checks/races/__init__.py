"""Runs a rank on CPU tensors, and finds uses of memory by its streams that nothing orders."""
