"""Training systems that are measured on the same machine: the plans that each system tries, how
they run, and the results.
"""
