"""Executes torch models with symbolic sizes, without a GPU and without allocating tensors."""
