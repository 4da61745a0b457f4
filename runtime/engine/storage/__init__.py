"""Storage of weights, gradients, optimizer states and activations, on a device and in host
memory.
"""
