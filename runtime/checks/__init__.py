"""Checks, without a GPU, of the code that runs on GPUs: data races between streams, operations that
make the host wait unnoticed, and collectives that would deadlock.
"""
