"""Commands about serving: predictions of measured runs, fits to them, plans for a load, and
Seesaw's evaluation.
"""
