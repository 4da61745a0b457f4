"""Fits the numbers of a hardware file to measurements, and judges fits on rows held out."""
