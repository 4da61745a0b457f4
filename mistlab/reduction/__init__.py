"""Data parallelism that communicates less: with whom, how often and how compressed ranks
average.
"""
