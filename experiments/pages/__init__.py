"""Shared parts of experiments: a folder of rows, tables, charts, and a page."""
