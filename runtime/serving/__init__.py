"""Serving in phases: prefill under one layout, decode under another, on one set of ranks."""
