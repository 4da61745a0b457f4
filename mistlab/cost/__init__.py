"""Computes the costs of plans: the times of tasks, stages and pipelines, and the memory that is not
tensors.
"""
