"""Checkpoints of a training run, which a run with any plan can resume, and weights in the file
formats of other programs.
"""
