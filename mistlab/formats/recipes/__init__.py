"""Writes plans as recipes of frameworks for fine-tuning."""
