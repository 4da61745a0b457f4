"""Predicts Mist's published evaluation: speedups over baselines, the gain from each part of the
search space, and the loss from a search that ignores an effect such as overlap.
"""
