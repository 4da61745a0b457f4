"""Jobs (what a plan file says), predictions of plans, measurements of runs, and searches for plans,
as plain values.
"""
