"""Runs a rank on CPU tensors, and finds memory accesses of its streams that no wait orders (data
races).
"""
