"""Transformers with any sizes, on one tensor-parallel rank, and the operators that they need."""
