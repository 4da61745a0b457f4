"""Models traced, and model types read."""
