"""Schedules of an iteration: which tasks the stages of a pipeline run, in which order and on which
stream.
"""
