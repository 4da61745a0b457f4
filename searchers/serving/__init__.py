"""Searches for the parallel degrees (layout) with which GPUs serve a load of requests best."""
