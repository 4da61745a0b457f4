"""Serving of models: loads of requests, serving plans, and the time of a serving engine's step."""
