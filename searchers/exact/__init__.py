"""Exact search: finds the candidates for each stage of a pipeline, and joins stages to the fastest
pipeline.
"""
