"""Exports plans to the files of other frameworks, imports such files as plans, and improves plans
by a few changes.
"""
