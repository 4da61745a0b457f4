"""Runs one rank on a stand-in for a GPU without memory, and records where the host would wait for
the GPU.
"""
