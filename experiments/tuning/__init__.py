"""Searches compared with one another, and the plans that they find explained."""
