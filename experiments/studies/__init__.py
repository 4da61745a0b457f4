"""Experiments that answer one question each, as a table, a picture and a page."""
