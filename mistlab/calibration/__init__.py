"""Fits the numbers of a hardware file to measurements, and evaluates each fit on measurements that
it did not use.
"""
