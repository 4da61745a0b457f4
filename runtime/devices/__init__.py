"""Devices other than the CPU: what the runtime asks of one, and how CUDA answers."""
