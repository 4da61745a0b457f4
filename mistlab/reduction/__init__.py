"""Gradient reductions with less communication than an all-reduce in every step: with whom
data-parallel ranks average, how often, and how gradients are compressed.
"""
