"""Exports plans to Megatron-LM's launch lines, and imports jobs from launch lines."""
