"""Searches over layouts that serve a load."""
