"""Mist's published evaluation, predicted: speedups over baselines, the gain of each step, and what
a search that ignores an effect loses.
"""
