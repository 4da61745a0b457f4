"""The storage of weights, gradients, optimizer states and activations on a device and its host."""
