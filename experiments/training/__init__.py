"""Runs plans in separate processes, and stores the result of each run."""
