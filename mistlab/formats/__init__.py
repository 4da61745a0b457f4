"""Readers for other frameworks' launch scripts and configuration files, which are recognised by
their keys.
"""
