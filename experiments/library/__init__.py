"""The functions that ``import mistlab`` offers as a Python library: they answer as the commands do,
with typed answers.
"""
