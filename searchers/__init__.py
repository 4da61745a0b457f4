"""Searchers: methods that each search a space of plans for the fastest plan."""
