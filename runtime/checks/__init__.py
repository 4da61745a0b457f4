"""Checks of the code that runs on GPUs, without a GPU: data races of streams, hidden waits of the
host, and collectives that would deadlock.
"""
