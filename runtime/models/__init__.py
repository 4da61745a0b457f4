"""Transformer models as one tensor-parallel rank holds them, and the operators that they use."""
