"""Searches over layouts (parallel degrees) of GPUs that serve a load of requests."""
