"""Fits the figures of a hardware file to measurements, and evaluates fits on held-out rows."""
