"""Fits the numbers of a hardware file to measurements, and evaluates the fits on rows that they did
not use.
"""
