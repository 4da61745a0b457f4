"""Checkpoints of a training run, which any plan reads, and weights for other programs."""
