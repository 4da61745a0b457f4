"""Benchmarks: commands and tests that measure how long parts of this project take."""
