"""Exports plans to the launch lines and configuration files of other frameworks, and imports such
files.
"""
