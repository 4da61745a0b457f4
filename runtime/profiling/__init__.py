"""Profiling of a machine: its operators, its links, and the interference of its streams."""
