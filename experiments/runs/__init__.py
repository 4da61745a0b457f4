"""Measured runs: rows of tables read into jobs of this package."""
