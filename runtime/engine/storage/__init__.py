"""Where weights, gradients, optimizer state and activations lie on a device and on its host."""
