"""Comparison of the iteration times that the closed-form predictor and the event simulator
predict.
"""
