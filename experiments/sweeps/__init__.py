"""Solves many tuning problems (a sweep): the file that lists them, the workers that solve them, and
the page of results.
"""
