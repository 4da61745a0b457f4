"""Exports plans to other frameworks' launch lines and configuration files, and imports these
files.
"""
