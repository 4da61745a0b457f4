"""Measured runs as tables tell of them: a row of a table, read into a job of this package."""
