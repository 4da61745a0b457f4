"""Predictors of a plan's cost: a closed form, and a simulator that plays every task."""
