"""Measuring a machine: its operators, its links, and how its streams slow one another down."""
