"""Derives all ranks' calls of collectives from a plan, and finds calls that would deadlock."""
