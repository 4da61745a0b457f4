"""Executing torch models with symbolic sizes, without a GPU and without their tensors."""
