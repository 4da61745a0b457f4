"""Devices other than the CPU: the interface by which the runtime uses them, and its implementation
for CUDA.
"""
