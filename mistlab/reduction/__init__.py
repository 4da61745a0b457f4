"""Gradient reductions for data parallelism that communicate less: with whom ranks average, how
often, and how compressed.
"""
