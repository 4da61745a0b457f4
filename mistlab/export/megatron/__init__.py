"""Megatron-LM's options - plans as a launch line, and launch lines as jobs."""
