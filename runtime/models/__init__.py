"""Transformers of any size, on one tensor-parallel rank, and the operators that they need."""
