"""Exports plans to recipes of fine-tuning frameworks."""
