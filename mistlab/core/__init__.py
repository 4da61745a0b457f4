"""Checked values and their errors, files, units of measurement, and array types."""
