"""Checked values and their errors, files, units, and array types."""
