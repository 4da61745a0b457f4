"""Devices other than the CPU: the interface through which the runtime uses them, and its
implementation for CUDA.
"""
