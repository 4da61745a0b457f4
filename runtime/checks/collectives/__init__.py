"""The calls of all ranks of a plan, derived without running it, and what of them would hang."""
