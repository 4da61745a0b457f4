"""Sweeps over many tuning problems: the file that lists them, the workers that solve them, the
page.
"""
