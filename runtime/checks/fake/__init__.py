"""Runs a rank on a device without memory, and notes where its host would wait for a GPU."""
