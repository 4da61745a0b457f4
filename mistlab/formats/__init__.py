"""Imports other frameworks' launch scripts and configuration files, whose format is recognised by
their keys.
"""
