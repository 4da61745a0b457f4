"""Derives from a plan every rank's calls of collectives, and finds calls that would deadlock."""
