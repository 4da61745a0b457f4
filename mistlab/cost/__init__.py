"""Predicts what a training plan costs: the times of tasks, pipeline stages and iterations, and its
memory.
"""
