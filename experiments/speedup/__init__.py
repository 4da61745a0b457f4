"""Training systems measured on the same machine: the plans that each system tries, its trials and
results.
"""
