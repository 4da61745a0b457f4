"""Exact search: lists the memory-saving strategies of each pipeline stage, and combines stages into
the fastest pipeline.
"""
