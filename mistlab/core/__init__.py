"""Checked values, their errors, files and units, and types of arrays."""
