"""Searchers: each searches for the fastest plan of a search space by its own method."""
