"""Runs one rank on CPU tensors, and finds data races: memory accesses by different streams that no
wait orders.
"""
