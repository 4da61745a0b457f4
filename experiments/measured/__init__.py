"""Prediction errors on tables of measured runs."""
