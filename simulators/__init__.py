"""Predictors of a plan's cost: one in closed form, and an event simulator that runs every task of
an iteration in simulated time.
"""
