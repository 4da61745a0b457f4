"""Comparison of the closed form with the event simulator."""
