"""Readers of files that launch or configure training in other frameworks, recognised by their
keys.
"""
