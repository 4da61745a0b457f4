"""Serving that switches layouts: prefill under one layout and decode under another, on the same
ranks.
"""
