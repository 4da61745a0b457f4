"""Checkpoints of a training run, which a run of any plan can resume, and weights in files of other
programs.
"""
