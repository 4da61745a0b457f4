"""Exact search: lists the memory-saving strategies of each pipeline stage, and joins stages into
the fastest pipeline.
"""
