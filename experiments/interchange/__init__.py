"""Exports to and imports from other frameworks, and improvements of plans by few changes."""
