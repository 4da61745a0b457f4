"""Machines measured, and hardware files fitted to the measurements."""
