"""Comparison of iteration times of the closed-form predictor with those of the event simulator."""
