"""Serving: loads of requests, serving plans, and the cost of an engine's step."""
