"""Derives every rank's calls of collectives from a plan, and reports calls that would deadlock."""
