"""Predictors of a plan's cost: a closed form, and an event simulator that plays every task."""
