"""The stages of a plan: candidates for stages as columns, the tasks of a stage's passes, and the
buffers that tasks use.
"""
