"""Exports of plans to other frameworks' files, and imports of these files."""
