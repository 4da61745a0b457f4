"""Commands about serving: predictions of measured runs, fits, plans for a load, and Seesaw's
evaluation.
"""
