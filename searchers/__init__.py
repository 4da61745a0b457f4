"""Searchers: each looks in its own way for the fastest plan of a search space, and is in a file of
its own.
"""
