"""The Python library that ``import mistlab`` exports: functions that answer as the commands do,
with typed answers.
"""
