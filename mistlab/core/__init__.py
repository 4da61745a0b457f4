"""Checked values and the errors that they raise, files, units of measurement, and array types."""
