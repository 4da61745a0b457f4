"""Profiling of a machine: times of operators, links, and how much concurrent streams slow one
another.
"""
