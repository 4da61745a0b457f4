"""The stages of a plan: columns of candidates for stages, the tasks of a stage's passes, and the
buffers that tasks use.
"""
