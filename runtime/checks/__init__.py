"""Checks of the GPU path without a GPU: races of streams, hidden host waits, deadlocked
collectives.
"""
