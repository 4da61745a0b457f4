"""Runs plans: the slot table's tasks on streams, layer by layer."""
