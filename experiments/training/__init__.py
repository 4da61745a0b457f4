"""Runs plans in processes of their own, and keeps the result of each run."""
