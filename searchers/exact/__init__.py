"""Finds candidates for each stage, and joins those that make the best pipeline."""
