"""The schedule of an iteration: which tasks there are, in which order and on which stream they
run.
"""
