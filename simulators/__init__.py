"""Predicting a plan: in closed form, and event by event."""
