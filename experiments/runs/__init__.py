"""Measured training runs: rows of tables are read and turned into jobs of this package."""
