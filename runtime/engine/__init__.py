"""Executes plans: issues each layer's tasks to the streams of a device."""
