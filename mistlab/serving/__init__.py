"""Serving: loads of requests, serving plans, and the cost of a serving engine's step."""
