"""Megatron-LM's options: plans as launch lines, and launch lines as jobs."""
