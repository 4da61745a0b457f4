"""Trains by a plan: the executor issues the tasks of each layer to the streams of a device."""
