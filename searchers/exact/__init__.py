"""Exact search: finds memory-saving candidates for each stage, and joins stages to the fastest
pipeline.
"""
