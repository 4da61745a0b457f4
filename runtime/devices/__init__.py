"""Devices other than the CPU: the interface that the runtime calls, and its CUDA implementation."""
