"""Compares predictions with measurements, for tables of measured runs."""
