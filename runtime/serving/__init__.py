"""Serving that alternates between two layouts: prefill under one layout and decoding under another,
on the same ranks.
"""
