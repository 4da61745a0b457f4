"""Serving: loads of requests, plans that answer them, and what a step of an engine costs."""
