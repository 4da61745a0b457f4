"""Checkpoints of a training run, which any plan can resume, and weights for other programs."""
