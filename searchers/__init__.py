"""Strategies that search for the best plan, each in its own file."""
