"""Strategies that look for the best plan, one file each."""
