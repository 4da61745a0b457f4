"""Runs a rank on a device without memory, and records where its host would wait for a GPU."""
