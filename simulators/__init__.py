"""Predictors of what a plan costs: a closed form, and a simulator that plays every task."""
