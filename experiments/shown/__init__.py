"""Runs that were made, shown on one page."""
