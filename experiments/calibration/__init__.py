"""Measures machines, and fits hardware files to the measurements."""
