"""Predicts Mist's published evaluation: speedups over baselines, the gain of each step, and what is
lost by a search that ignores an effect such as overlap.
"""
