"""Exports plans to other frameworks' files, imports such files, and improves plans by few
changes.
"""
